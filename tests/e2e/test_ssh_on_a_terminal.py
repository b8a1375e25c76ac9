"""Questions of SSH, as a person on a terminal meets them: what they read, what they type, and what is left after."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import PASSWORD, Network, require_hosts
from tests.support.typist import Typist

if TYPE_CHECKING:
    from collections.abc import Iterator

PASSPHRASE = "open it"


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    require_hosts()
    with Network("h1", "h2", sshd_options=getattr(request, "param", ())) as network:
        (network.directory / "run").mkdir(mode=0o700)
        yield network


def environment(network: Network) -> dict[str, str]:
    return {
        **os.environ,
        "RANKDECK_PYTHON": sys.executable,
        "RANKDECK_SSH_CONFIG": str(network.ssh_config),
        "XDG_RUNTIME_DIR": str(network.directory / "run"),
    }


def typist(network: Network, *arguments: str) -> Typist:
    return Typist([sys.executable, "-P", "-m", "app", *arguments], environment(network))


def test_hosts_that_nobody_knows_are_asked_about_one_after_the_other_and_the_passphrase_once(network: Network) -> None:
    network.known_hosts.unlink()
    network.lock_key(PASSPHRASE)

    with typist(network, "down", "h1", "h2") as local_user:
        is_new, is_locked = "(yes/no/[fingerprint])? ", f"Passphrase of the key {network.key} (for h"
        asked = []
        for _ in range(3):  # in the order in which the hosts come to it
            asked.append(local_user.until_it_says(is_new, is_locked))
            assert local_user.shows_what_is_typed() is (asked[-1] == is_new)
            local_user.types("yes" if asked[-1] == is_new else PASSPHRASE)
        assert sorted(asked) == [is_new, is_new, is_locked]
        assert local_user.exit_code() == 0

        assert local_user.said.count("key fingerprint is SHA256:") == local_user.said.count("is added to") == 2
        assert local_user.said.count("Passphrase of the key") == 1
        assert local_user.said.count("no agent runs on") == 2
        assert PASSPHRASE not in local_user.said
        assert "Traceback" not in local_user.said
        assert local_user.shows_what_is_typed()
    with typist(network, "down", "h1") as local_user:
        local_user.until_it_says("Passphrase of the key")
        local_user.types(PASSPHRASE)
        assert local_user.exit_code() == 0
        assert "fingerprint" not in local_user.said


@pytest.mark.parametrize(
    ("answer", "words"),
    [("no", "is not a known host"), ("SHA256:" + "A" * 43, "not the one that was typed: somebody may stand between")],
)
def test_a_host_that_is_not_accepted_is_refused_in_one_line(network: Network, answer: str, words: str) -> None:
    network.known_hosts.unlink()

    with typist(network, "status", "--host", "h1") as local_user:
        local_user.until_it_says("(yes/no/[fingerprint])? ")
        local_user.types(answer)
        assert local_user.exit_code() == 3

        assert words in local_user.said
        assert "Traceback" not in local_user.said
    assert not network.known_hosts.exists()


@pytest.mark.parametrize("command", [("status", "--host", "h1"), ("up", "h1", "h2")], ids=["here", "in threads"])
def test_ctrl_c_at_a_question_ends_the_command_and_leaves_a_terminal_that_shows_what_is_typed(
    network: Network, command: tuple[str, ...]
) -> None:
    network.lock_key(PASSPHRASE)

    with typist(network, *command) as local_user:
        local_user.until_it_says("Passphrase of the key")
        assert not local_user.shows_what_is_typed()
        local_user.presses_ctrl_c()
        assert local_user.exit_code() == 130

        assert local_user.shows_what_is_typed()
        assert "Traceback" not in local_user.said


@pytest.mark.parametrize("network", [("PermitRootLogin yes", "PasswordAuthentication yes")], indirect=True)
def test_a_password_is_asked_for_where_no_key_is_taken(network: Network) -> None:
    (network["h1"].directory / "authorized_keys").write_text("")

    with typist(network, "down", "h1") as local_user:
        local_user.until_it_says("root@h1's password: ")
        local_user.types("guess")
        local_user.until_it_says("root@h1 does not take that password.")
        local_user.until_it_says("root@h1's password: ")
        local_user.types(PASSWORD)
        assert local_user.exit_code() == 0

        assert "no agent runs on h1" in local_user.said
        assert PASSWORD not in local_user.said
        assert "guess" not in local_user.said


def test_a_script_is_asked_nothing_even_if_it_was_started_on_a_terminal(network: Network) -> None:
    network.lock_key(PASSPHRASE)
    network.known_hosts.write_text(network.known_hosts.read_text().splitlines()[0] + "\n")
    command = f"{sys.executable} -P -m app down h1 h2 </dev/null"

    with Typist(["bash", "-c", command], environment(network)) as script:
        assert script.exit_code() == 3

        assert f"ssh-add {network.key}" in script.said
        assert "accept it once by: ssh h2 true" in script.said
        assert "Passphrase" not in script.said


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_terminal_that_a_screen_is_drawn_on_is_not_asked_on(is_shown: bool) -> None:
    program = (
        "import sys, termios, tty\n"
        "from app.cli.terminal import TerminalPrompter\n"
        "person = TerminalPrompter()\n"
        "print(person.can_ask())\n"
        "tty.setcbreak(0)\n"
        "person.show('in the way')\n"
        f"print(person.can_ask(), person.ask('in the way', is_shown={is_shown}))\n"
    )

    with Typist([sys.executable, "-P", "-c", program], dict(os.environ)) as screen:
        assert screen.exit_code() == 0
        assert screen.said.split() == ["True", "False", "None"]


def test_who_says_nothing_is_asked_no_longer(network: Network) -> None:
    program = (
        "import app.cli.terminal as terminal\n"
        "terminal.ANSWER_WITHIN_S = 0.1\n"
        "print(terminal.TerminalPrompter().ask('Well? '))\n"
    )

    with Typist([sys.executable, "-P", "-c", program], environment(network)) as screen:
        assert screen.exit_code() == 0
        assert screen.said == "Well? \r\nNone\r\n"
        assert screen.shows_what_is_typed()
