"""The first contact with a host, against what OpenSSH itself makes of what is written then."""

from __future__ import annotations

import subprocess
import threading
from typing import TYPE_CHECKING

import pytest

from app.errors import HostKeyError
from app.ssh.login import Logins
from tests.support.hosts import Network, require_hosts
from tests.support.people import LocalUser
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Hosts of which nothing is known."""
    require_hosts()
    with Network("h1", "h2", sshd_options=getattr(request, "param", ())) as network:
        network.known_hosts.unlink()
        yield network


def enter(network: Network, local_user: LocalUser, host: str = "h1") -> None:
    Logins(local_user).connect(host, str(network.ssh_config)).close()


def fingerprint_of(network: Network, host: str = "h1") -> str:
    key = network[host].directory / "host_key.pub"
    printed = subprocess.run(["ssh-keygen", "-lf", str(key)], capture_output=True, text=True, check=True)
    return printed.stdout.split()[1]


def openssh_enters(network: Network, host: str = "h1") -> bool:
    """Say whether ssh knows the host, and asks nothing."""
    argv = [
        "ssh",
        "-F",
        str(network.ssh_config),
        "-o",
        "BatchMode=yes",
        "-o",
        "StrictHostKeyChecking=yes",
        host,
        "true",
    ]
    return subprocess.run(argv, capture_output=True, timeout=30, check=False).returncode == 0


def test_a_person_says_yes_and_from_then_on_the_host_is_known_to_ssh_and_to_us(network: Network) -> None:
    local_user = LocalUser(["of course", "yes"])

    enter(network, local_user)
    enter(network, nobody := LocalUser())

    assert f"ED25519 key fingerprint is {fingerprint_of(network)}\n" in local_user.asked[0]
    assert network["h1"].address in local_user.asked[0]
    assert local_user.asked[0].endswith("(yes/no/[fingerprint])? ")
    assert local_user.asked[1] == "Please type 'yes', 'no' or the fingerprint: "
    assert local_user.shown == local_user.asked, "it is no secret"
    assert "is added to" in local_user.notes[0]
    assert nobody.asked == []
    assert network.known_hosts.stat().st_mode & 0o777 == 0o600
    assert network.known_hosts.read_text().startswith(f"{network['h1'].address} ssh-ed25519 ")
    assert openssh_enters(network)


def test_the_fingerprint_itself_is_the_best_answer(network: Network) -> None:
    enter(network, LocalUser([fingerprint_of(network)]))

    assert openssh_enters(network)


def test_another_fingerprint_is_refused_loudly_and_nothing_is_written(network: Network) -> None:
    with pytest.raises(HostKeyError, match="not the one that was typed: somebody may stand between"):
        enter(network, LocalUser([fingerprint_of(network, "h2"), "yes"]))

    assert not network.known_hosts.exists()
    assert network["h1"].num_logins() == 0


@pytest.mark.parametrize("answers", [["no"], [""] * 3, []])
def test_whatever_is_no_yes_is_a_no(network: Network, answers: list[str]) -> None:
    local_user = LocalUser([*answers, "yes"] if answers else [])

    with pytest.raises(HostKeyError, match="not a known host"):
        enter(network, local_user)

    assert len(local_user.asked) == max(1, len(answers))
    assert not network.known_hosts.exists()


def test_a_changed_key_is_never_asked_about(network: Network) -> None:
    network.configure("Host *\n  StrictHostKeyChecking no")
    network.trust_all()
    network["h1"].change_host_key()
    before = network.known_hosts.read_text()
    local_user = LocalUser(["yes"])

    with pytest.raises(HostKeyError, match="HAS CHANGED"):
        enter(network, local_user)

    assert local_user.asked == []
    assert network.known_hosts.read_text() == before


@pytest.mark.parametrize(
    ("strictness", "is_asked", "gets_in"),
    [("yes", False, False), ("accept-new", False, True), ("ask", True, True), ("no", True, True)],
)
def test_the_configuration_says_who_decides_and_nobody_is_trusted_in_silence(
    network: Network, strictness: str, is_asked: bool, gets_in: bool
) -> None:
    network.configure(f"Host *\n  StrictHostKeyChecking {strictness}")
    local_user = LocalUser(["yes"])

    if gets_in:
        enter(network, local_user)
        assert "is added to" in local_user.notes[0]
        assert fingerprint_of(network) in local_user.notes[0]
    else:
        with pytest.raises(HostKeyError, match="not a known host"):
            enter(network, local_user)

    assert bool(local_user.asked) is is_asked
    assert openssh_enters(network) is gets_in


@pytest.mark.parametrize("option", ["HashKnownHosts yes", "HostKeyAlias lab-one", "HostKeyAlias *", "Port 2222"])
def test_what_is_written_is_what_ssh_looks_for(network: Network, option: str) -> None:
    if option == "Port 2222":
        config = network["h1"].directory / "sshd_config"
        config.write_text("Port 2222\n" + config.read_text())
        network["h1"].restart_sshd()
    network.configure(f"Host h1\n  {option}")

    enter(network, LocalUser(["yes"]))

    written = network.known_hosts.read_text()
    beginnings = {
        "HashKnownHosts yes": "|1|",
        "HostKeyAlias lab-one": "lab-one ",
        "HostKeyAlias *": "|1|",  # a pattern would stand for every host
        "Port 2222": f"[{network['h1'].address}]:2222 ",
    }
    assert written.startswith(beginnings[option])
    assert openssh_enters(network)


@pytest.mark.parametrize("network", [("LoginGraceTime 5",)], indirect=True)
def test_a_person_may_take_longer_than_the_host_waits(network: Network) -> None:
    """A list of new hosts is asked about one after the other, and each has its own patience."""

    class Slow(LocalUser):
        def ask(self, text: str, *, is_shown: bool = False) -> str | None:
            host = network["h1"]
            until(lambda: not host.sessions(), 60, "sshd has lost its patience")
            # It is not to lose it with a machine that has other work.
            config = host.directory / "sshd_config"
            config.write_text(config.read_text().replace("LoginGraceTime 5", "LoginGraceTime 120"))
            host.restart_sshd()
            return super().ask(text, is_shown=is_shown)

    local_user = Slow(["yes"])

    enter(network, local_user)

    assert len(local_user.asked) == 1
    # sshd lets us in before it writes that down.
    until(lambda: network["h1"].num_logins() == 1, 20, "one has come in")


def test_a_key_that_another_host_shows_too_is_said_to(network: Network) -> None:
    key = " ".join((network["h1"].directory / "host_key.pub").read_text().split()[:2])
    network.known_hosts.write_text(f"elsewhere {key}")  # without a last line end

    enter(network, local_user := LocalUser(["yes"]))

    assert f"known by other names: {network.known_hosts}:1" in local_user.asked[0]
    assert network.known_hosts.read_text() == f"elsewhere {key}\n{network['h1'].address} {key}\n"


def test_a_host_that_cannot_be_written_down_is_taken_for_known_as_long_as_the_command_runs(network: Network) -> None:
    network.configure("Host *\n  UserKnownHostsFile /proc/known_hosts")
    logins = Logins(local_user := LocalUser(["yes"]))

    logins.connect("h1", str(network.ssh_config)).close()
    logins.connect("h1", str(network.ssh_config), asks=False).close()

    assert len(local_user.asked) == 1
    assert "taken for known this once: /proc/known_hosts cannot be written" in local_user.notes[0]


def test_a_directory_for_known_hosts_is_made_for_its_owner_alone(network: Network) -> None:
    network.configure(f"Host *\n  UserKnownHostsFile {network.directory}/new/known_hosts")

    enter(network, LocalUser(["yes"]))

    assert (network.directory / "new").stat().st_mode & 0o777 == 0o700


def test_several_hosts_at_one_address_are_one_question(network: Network) -> None:
    network.configure(f"Host a b c\n  HostName {network['h1'].address}")
    logins = Logins(local_user := LocalUser(["yes"]))

    def go(host: str) -> None:
        logins.connect(host, str(network.ssh_config)).close()

    threads = [threading.Thread(target=go, args=(host,)) for host in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(local_user.asked) == 1
    assert len(network.known_hosts.read_text().splitlines()) == 1
    until(lambda: network["h1"].num_logins() == 3, 20, "all three have come in")
