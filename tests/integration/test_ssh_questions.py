"""What a person is asked on the way into a host, and what is never asked: passphrases, passwords, second factors."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from app.errors import AnswerNeededError, HostKeyError, HostUnreachableError, LoginRefusedError
from app.fleet.host_link import Access, HostLink
from app.ssh.login import Logins
from app.ssh.transport import Transport
from tests.support.hosts import PASSWORD, Network, require_hosts
from tests.support.interviewer import Interviewer, Round
from tests.support.people import LocalUser
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSPHRASE = "open it"
PASSWORDS = ("PermitRootLogin yes", "PasswordAuthentication yes")
KEY_AND_PASSWORD = ("AuthenticationMethods publickey,password", *PASSWORDS)


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=getattr(request, "param", ())) as network:
        yield network


def enter(network: Network, local_user: LocalUser, host: str = "h1") -> None:
    """Log in and out again."""
    Logins(local_user).connect(host, str(network.ssh_config)).close()


def test_a_passphrase_is_asked_for_once_whichever_threads_go_to_which_hosts(network: Network) -> None:
    network.lock_key(PASSPHRASE)
    local_user = LocalUser(["wrong", PASSPHRASE])
    logins = Logins(local_user)
    arrived: list[str] = []

    def go(host: str) -> None:
        with closing(logins.connect(host, str(network.ssh_config))) as connection:
            arrived.append(connection.run(["hostname"], 20).stdout.decode().strip())

    threads = [threading.Thread(target=go, args=(host,)) for host in ("h1", "h2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(arrived) == ["h1", "h2"]
    assert len(local_user.asked) == 2, "the wrong one, and the right one"
    assert str(network.key) in local_user.asked[0]
    assert local_user.shown == []
    assert local_user.notes == ["That does not open it."]


def test_a_key_in_the_old_form_is_unlocked_too(network: Network) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "rsa", "-N", PASSPHRASE, "-m", "PEM", "-f", f"{network.key}_old"], check=True
    )
    (network["h1"].directory / "authorized_keys").write_text(network.key.with_name("console_key_old.pub").read_text())
    network.key.with_name("console_key_old.pub").unlink()
    network.configure(f"Host *\n  IdentityFile {network.key}_old")

    enter(network, local_user := LocalUser([PASSPHRASE]))

    assert len(local_user.asked) == 1


def test_a_key_that_is_left_locked_is_not_asked_about_again(network: Network) -> None:
    network.lock_key(PASSPHRASE)
    local_user = LocalUser([""])
    logins = Logins(local_user)

    for host in ("h1", "h2"):
        with pytest.raises(HostUnreachableError, match="was offered no key") as caught:
            logins.connect(host, str(network.ssh_config))
        assert caught.value.hint == f"ssh-add {network.key}"

    assert len(local_user.asked) == 1


@pytest.mark.parametrize("has_public_file", [True, False])
def test_nobody_types_a_passphrase_for_a_key_that_the_host_does_not_take(
    network: Network, has_public_file: bool
) -> None:
    network.lock_key(PASSPHRASE)
    (network["h1"].directory / "authorized_keys").write_text("")
    if not has_public_file:
        network.key.with_suffix(".pub").unlink()

    logins = Logins(local_user := LocalUser([PASSPHRASE]))
    for asks in (True, False):
        with pytest.raises(HostUnreachableError, match=r"takes none of our keys .*console_key") as caught:
            logins.connect("h1", str(network.ssh_config), asks=asks)
        assert local_user.asked == []
        assert not caught.value.is_answerable, "no answer would help"
        assert caught.value.hint == "put your public key there: ssh-copy-id h1"
    with pytest.raises(HostUnreachableError) as caught:
        logins.connect("h2", str(network.ssh_config), asks=False)
    assert caught.value.is_answerable

    enter(network, local_user, "h2")
    assert len(local_user.asked) == 1


@pytest.mark.parametrize("why", ["nobody is there", "BatchMode", "a reconnection"])
def test_nobody_is_asked(network: Network, why: str) -> None:
    network.lock_key(PASSPHRASE)
    network.known_hosts.write_text(network.known_hosts.read_text().splitlines()[0] + "\n")
    local_user = LocalUser([PASSPHRASE, "yes"], is_there=why != "nobody is there")
    if why == "BatchMode":
        network.configure("Host *\n  BatchMode yes")
    logins = Logins(local_user)

    for host, kind in (("h1", HostUnreachableError), ("h2", HostKeyError)):
        with pytest.raises(kind):
            logins.connect(host, str(network.ssh_config), asks=why != "a reconnection")

    assert local_user.asked == []


def test_a_lost_connection_comes_back_with_the_key_that_was_unlocked(network: Network) -> None:
    network.lock_key(PASSPHRASE)
    local_user = LocalUser([PASSPHRASE])
    with HostLink(Access("h1", sys.executable, str(network.ssh_config)), Logins(local_user)) as link:
        link.connect()
        link.bring_up()
        network["h1"].drop_sessions()
        until(lambda: not link.is_alive, 10, "the loss is noticed")

        link.reconnect()

        assert link.is_alive
        link.shut_down(kill_jobs=True)
    assert len(local_user.asked) == 1


@pytest.mark.parametrize("network", [KEY_AND_PASSWORD], indirect=True)
def test_a_password_after_a_key_is_asked_for_until_it_is_right_and_then_kept_for_that_host(network: Network) -> None:
    local_user = LocalUser(["wrong", PASSWORD, PASSWORD])
    logins = Logins(local_user)

    for asks in (True, False):
        with closing(logins.connect("h1", str(network.ssh_config), asks=asks)) as connection:
            assert connection.run(["hostname"], 20).stdout == b"h1\n"
    assert local_user.asked == ["root@h1's password: "] * 2
    assert local_user.shown == []
    logins.connect("h2", str(network.ssh_config)).close()

    assert local_user.asked[2:] == ["root@h2's password: "], "a password is for one host"


@pytest.mark.parametrize("network", [PASSWORDS], indirect=True)
def test_a_password_that_is_no_longer_right_is_forgotten_and_in_no_error(network: Network) -> None:
    network.configure("Host *\n  PubkeyAuthentication no")
    local_user = LocalUser([PASSWORD, "guess"])
    logins = Logins(local_user)
    logins.connect("h1", str(network.ssh_config)).close()
    shadow = network["h1"].directory / "shadow"
    shadow.write_text(shadow.read_text().replace("root:$6$", "root:!$6$"))

    with pytest.raises(AnswerNeededError, match=r"wants an answer by .*password") as caught:
        logins.connect("h1", str(network.ssh_config), asks=False)
    assert PASSWORD not in repr(caught.value) + str(caught.value.__cause__) + str(caught.value.__context__)

    with pytest.raises(HostUnreachableError) as again:
        logins.connect("h1", str(network.ssh_config))
    assert len(local_user.asked) == 3, "the person gives up at the second question"
    assert "guess" not in repr(again.value)


@pytest.mark.parametrize("network", [PASSWORDS], indirect=True)
def test_where_a_key_was_enough_before_it_is_offered_again_when_the_person_wants_it(network: Network) -> None:
    logins = Logins(local_user := LocalUser([PASSWORD]))
    logins.connect("h1", str(network.ssh_config)).close()
    keys = network["h1"].directory / "authorized_keys"
    text = keys.read_text()
    keys.write_text("")

    for _ in range(2):
        with pytest.raises(LoginRefusedError, match="takes none of our keys"):
            logins.connect("h1", str(network.ssh_config), asks=False)
        keys.write_text(text)

    logins.forget_refusals()
    logins.connect("h1", str(network.ssh_config), asks=False).close()
    assert local_user.asked == []


@pytest.mark.parametrize("network", [KEY_AND_PASSWORD], indirect=True)
def test_without_a_terminal_a_host_that_wants_a_password_says_so(network: Network) -> None:
    with pytest.raises(AnswerNeededError, match=r"takes none|wants an answer by password") as caught:
        Logins().connect("h1", str(network.ssh_config))

    assert caught.value.exit_code == 3


SECOND_FACTOR: list[Round] = [
    (
        "Lab",
        "The code is on your \x1b[2Jdevice.\nHurry.",
        [("Code: ", False), ("Which device? ", True)],
        ["123456", "phone"],
    ),
    ("", "", [], []),
]


@pytest.fixture
def interviewer(network: Network) -> Iterator[Interviewer]:
    host = network["h1"]
    with Interviewer(host.directory / "host_key", SECOND_FACTOR, wants_key=True) as interviewer:
        network.configure(f"Host door\n  HostName 127.0.0.1\n  HostKeyAlias {host.address}\n  Port {interviewer.port}")
        yield interviewer


def test_a_host_that_hangs_up_on_whoever_compares_its_key_twice_is_an_error_like_others(
    network: Network, interviewer: Interviewer
) -> None:
    class Slow(LocalUser):
        def ask(self, text: str, *, is_shown: bool = False) -> str | None:
            interviewer.drop()
            interviewer.be_another(network["h2"].directory / "host_key")
            until(lambda: not any(isinstance(one, Transport) for one in threading.enumerate()), 20, "it has hung up")
            return super().ask(text, is_shown=is_shown)

    network.configure(f"Host slow\n  HostName 127.0.0.1\n  Port {interviewer.port}\n  UserKnownHostsFile none")

    with pytest.raises(HostUnreachableError, match="it hangs up before anybody can log in"):
        enter(network, local_user := Slow(["yes", "yes"]), "slow")

    assert len(local_user.asked) == 2


def test_an_interview_after_a_key_names_the_host_and_shows_only_what_may_be_seen(
    network: Network, interviewer: Interviewer
) -> None:
    local_user = LocalUser(["000000", "phone", "123456", "phone"])

    enter(network, local_user, "door")

    assert interviewer.num_logins == 1
    assert local_user.asked == ["(root@door) Code: ", "(root@door) Which device? "] * 2
    assert local_user.shown == ["(root@door) Which device? "] * 2
    assert local_user.notes[0].splitlines() == [
        "(root@door) Lab",
        "(root@door) The code is on your \\x1b[2Jdevice.",
        "(root@door) Hurry.",
    ]
    assert local_user.notes[1] == "root@door does not take that."


def test_who_does_not_answer_an_interview_is_let_go_at_once(network: Network, interviewer: Interviewer) -> None:
    with pytest.raises(AnswerNeededError, match="nobody has answered"):
        enter(network, LocalUser([]), "door")

    assert interviewer.num_logins == 0


def test_a_second_factor_is_not_tried_again_without_the_person(network: Network, interviewer: Interviewer) -> None:
    logins = Logins(LocalUser(["123456", "phone"]))
    logins.connect("door", str(network.ssh_config)).close()

    with pytest.raises(AnswerNeededError, match="wants a new answer at each login"):
        logins.connect("door", str(network.ssh_config), asks=False)

    assert interviewer.num_connections == 1


def test_an_interview_without_end_is_ended(network: Network, interviewer: Interviewer) -> None:
    interviewer.rounds = [("", "", [], [])] * 1000

    with pytest.raises(HostUnreachableError, match="asks without end"):
        enter(network, LocalUser(), "door")


def test_a_host_that_falls_silent_after_an_answer_is_given_up_in_time(
    network: Network, interviewer: Interviewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ssh.authentication.REPLY_TIMEOUT_S", 0.2)
    thought_over = threading.Event()
    monkeypatch.setattr(
        "tests.support.interviewer._Server.check_auth_interactive_response", lambda *_: thought_over.wait(30) and 2
    )

    with pytest.raises(HostUnreachableError, match="does not answer in time"):
        enter(network, LocalUser(["123456", "phone"]), "door")
    thought_over.set()
    assert interviewer.num_logins == 0
