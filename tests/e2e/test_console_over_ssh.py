"""Questions of hosts, and the doctor, in a console that is open, as a person on a real terminal meets them."""

from __future__ import annotations

import gzip
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import Desk, named
from tests.support.file_contents import contents

if TYPE_CHECKING:
    from tests.support.hosts import Network

HOSTS = ("h1", "h2", "h3")
PASSPHRASE = "open it"
WITHIN_S = 90.0
LOOK_S = 120.0
"""Two hosts import torch at once, on a machine with other work."""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed"),
]


def test_the_console_is_there_before_its_hosts_are(desk: Desk, network: Network) -> None:
    assert desk.run("up", "h1", "h2")[0] == 0
    network["h2"].pull_cable()
    network.configure("Host h2\n  ConnectTimeout 60")  # it connects until the screen has been seen
    before = set(desk.runtime.rglob("*"))
    terminal = desk.terminal("opening", "attach", *named("h1", "h2"))

    screen = terminal.until_it_shows("h2    connecting", WITHIN_S, "h1    ready", "going to 2 hosts: 1 of 2 done")
    assert "1 Overview" in screen
    terminal.keys("q")

    terminal.until_it_shows("exit code 130", WITHIN_S)
    assert set(desk.runtime.rglob("*")) == before, "nothing is left of connections that were being opened"


def test_what_hosts_ask_while_the_console_opens_is_a_dialog(desk: Desk, network: Network) -> None:
    assert desk.run("up", "h1", "h2")[0] == 0
    network.lock_key(PASSPHRASE)
    terminal = desk.terminal("passphrase", "attach", *named("h1", "h2"))

    terminal.until_it_shows(f"Passphrase of the key {network.key}", WITHIN_S, "To reach h1 and h2")
    terminal.tmux("send-keys", "-l", PASSPHRASE)
    terminal.until_it_shows("•" * len(PASSPHRASE), WITHIN_S)
    terminal.keys("Enter")

    terminal.until_it_shows("starts a program here", WITHIN_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", WITHIN_S)


def test_why_a_start_was_not_made_is_on_the_terminal_once_the_console_is_gone(desk: Desk, network: Network) -> None:
    for name in ("h1", "h2"):
        (network[name].home / "train.py").touch()
    terminal = desk.terminal("unfit", "run", *named("h1", "h2"), "--job-python", "/no/python", "train.py")

    screen = terminal.until_it_shows("exit code", LOOK_S, "--no-doctor starts all the same")

    assert "/no/python" in screen
    assert "h2" in screen
    assert "1 Overview" not in screen


@pytest.mark.slow
def test_the_doctor_is_a_key_away(desk: Desk, network: Network) -> None:
    assert desk.run("up", "h1", "h2")[0] == 0
    terminal = desk.terminal("doctor", "attach", *named("h1", "h2"))
    terminal.until_it_shows("starts a program here", WITHIN_S)
    network["h2"].exec("ip", "route", "add", "unreachable", f"{network['h1'].address}/32")

    terminal.keys("d")
    terminal.until_it_shows("2 hosts to look at", WITHIN_S)
    screen = terminal.until_it_shows("it does not reach h1", LOOK_S)
    assert screen.index("h2") < screen.index("it does not reach h1")
    terminal.keys("Escape")
    terminal.until_it_shows("starts a program here", WITHIN_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", WITHIN_S)


def test_lost_hosts_come_back_by_an_answer_and_the_secret_is_nowhere(desk: Desk, network: Network) -> None:
    assert desk.run("up", "h1", "h2", "h3")[0] == 0
    terminal = desk.terminal("asks", "attach", *named("h1", "h2", "h3"), "--record", str(desk.directory / "heard"))
    terminal.until_it_shows("starts a program here", WITHIN_S)
    network.lock_key(PASSPHRASE)
    known = network.known_hosts.read_text().splitlines()
    network.known_hosts.write_text("\n".join(line for line in known if network["h2"].address not in line) + "\n")
    network["h3"].change_host_key()
    for host in network.hosts.values():
        host.drop_sessions()

    terminal.until_it_shows("a: try h1 and h2 again, and answer what is asked", WITHIN_S)
    terminal.until_it_shows("THE HOST KEY OF", WITHIN_S)
    terminal.keys("a")
    terminal.until_it_shows(f"Passphrase of the key {network.key} (for h1)", WITHIN_S)
    terminal.tmux("send-keys", "-l", PASSPHRASE)
    terminal.until_it_shows("•" * len(PASSPHRASE), WITHIN_S)
    terminal.keys("Enter")
    terminal.until_it_shows("The authenticity of host h2", WITHIN_S, "ED25519 key fingerprint is SHA256:")
    terminal.tmux("send-keys", "-l", "yes")
    terminal.until_it_shows(" yes", WITHIN_S)
    terminal.keys("Enter")

    terminal.until_it_no_longer_shows("The authenticity of host h2", WITHIN_S)
    terminal.until_it_no_longer_shows("answer what is asked", WITHIN_S)
    terminal.keys("8")
    terminal.until_it_shows("h2: the connection is back", WITHIN_S, "h1: the connection is back")
    terminal.keys("a")
    terminal.until_it_shows("No host wants an answer", WITHIN_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code", WITHIN_S)
    new_key = (network["h3"].directory / "host_key.pub").read_text().split()[1]
    assert new_key not in network.known_hosts.read_text(), "a changed key is written nowhere"
    files = contents(desk.directory)
    assert desk.directory / "heard" in files
    assert [path for path, content in files.items() if PASSPHRASE.encode() in unpacked(content)] == []
    assert PASSPHRASE not in terminal.text()


def unpacked(data: bytes) -> bytes:
    """Return what is in a file; of a recording, unpacked."""
    return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
