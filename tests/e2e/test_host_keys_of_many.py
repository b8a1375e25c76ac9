"""One of four hosts shows a key that is not its own: it is told of, with what to do, and left alone; others go on."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.desk import IMPORT_S, Desk, read_until
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.hosts import Host, Network

HOSTS = ("h1", "h2", "h3", "h4")
OTHERS = ["h1", "h2", "h4"]
WAITING = "import os, signal\nopen(f'rank-{os.environ[\"RANK\"]}', 'w').close()\nsignal.sigwait({signal.SIGTERM})\n"
SOON_S = 90.0
"""What takes a second or two."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def desk(network: Network) -> Iterator[Desk]:
    """At an inventory of all hosts, whose agents are up."""
    desk = Desk(network)
    desk.directory = network.directory / "project"
    desk.directory.mkdir()
    (desk.directory / "wait.py").write_text(WAITING)
    nodes = "".join(f'[[node]]\nhost = "{host}"\nnproc = 1\n' for host in HOSTS)
    (desk.directory / "rankdeck.toml").write_text(f'[cluster]\nworkdir = "{desk.directory}"\n{nodes}')
    desk.json("up")
    yield desk
    desk.end()


def num_connections(host: Host) -> int:
    """Return how often somebody has come to a host's sshd, let in or not."""
    return (host.directory / "sshd.log").read_text().count("Connection from ")


def states(desk: Desk) -> dict[str, str]:
    return {row["node"]: row["state"] for row in desk.json("status", codes=(0, 10))["nodes"]}


@pytest.mark.fault(row=19)
@pytest.mark.slow
def test_a_host_with_a_wrong_key_is_left_out_of_everything_with_the_reason(desk: Desk, network: Network) -> None:
    right = network.known_hosts.read_text()
    key_of_another = (network["h4"].directory / "host_key.pub").read_text().split()[:2]
    lines = [line for line in right.splitlines() if not line.startswith(f"{network['h3'].address} ")]
    network.known_hosts.write_text("\n".join([*lines, " ".join([network["h3"].address, *key_of_another])]) + "\n")

    for verb, expected in (("up", 3), ("status", 0)):
        before = num_connections(network["h3"])
        code, stdout, stderr = desk.run(verb)
        assert (code, "THE HOST KEY OF" in stderr, "ssh-keygen -R" in stderr) == (expected, True, True), stderr
        assert all(host in stdout for host in OTHERS), "the others are done"
        assert num_connections(network["h3"]) == before + 1, "it is not tried again"
    found = {row["host"]: row["rows"] for row in desk.json("doctor", "--all", codes=(1, 3))["hosts"]}
    (row,) = [row for row in found["h3"] if row["status"] == "bad"]
    assert ("HAS CHANGED" in row["detail"], "ssh-keygen -R" in row["todo"]) == (True, True)
    assert states(desk) == {"h1": "up", "h2": "up", "h3": "lost", "h4": "up"}

    code, _, stderr = desk.run("run", "--no-doctor", "--detach", "--", "wait.py")
    assert (code, "1 of 4 hosts cannot take part" in stderr) == (3, True), "a job is all or nothing"
    network.known_hosts.write_text("".join(f"{line}\n" for line in lines))
    code, _, stderr = desk.run("status")
    assert (code, "is not a known host; it shows the key" in stderr) == (0, True)
    network.known_hosts.write_text(right)
    assert desk.run("status")[0] == 0
    assert states(desk) == dict.fromkeys(HOSTS, "up")
    desk.json("down")


@pytest.mark.fault(row=19)
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.skipif(shutil.which("tmux") is None and not os.environ.get("CI"), reason="tmux is not installed")
def test_a_host_whose_key_changes_meanwhile_is_neither_tried_again_nor_told_to_do_anything(
    desk: Desk, network: Network
) -> None:
    run = ("run", "--name", "wait", "--no-doctor", "--no-probe", "--detach", "--", "wait.py")
    assert desk.run(*run)[0] == 0
    terminal = desk.terminal("console", "attach")
    terminal.until_it_shows("h4", IMPORT_S)
    follower = desk.start("attach", "--headless")
    read_until(follower, "4 ranks")
    host = network["h3"]
    # While torch is imported, programs come and go that nobody ends.
    until(lambda: len(list(desk.directory.glob("rank-*"))) == len(HOSTS), IMPORT_S, "all ranks wait")
    before = host.processes()

    host.change_host_key()
    host.drop_sessions()

    terminal.until_it_shows("HAS CHANGED", SOON_S)
    said = follower.communicate(timeout=SOON_S)[1]
    assert ("THE HOST KEY OF" in said, "job wait goes on" in said) == (True, True), said
    assert follower.returncode == 3, "without a person to look, a script is told"
    tried = num_connections(host)
    network["h2"].drop_sessions()
    terminal.until_it_shows("h2: the connection is back", SOON_S)
    assert num_connections(host) == tried, "others are tried again meanwhile, it is not"
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", SOON_S)

    code, _, stderr = desk.run("stop", "wait", "--now")
    assert (code, "how it stands on 1 more of its hosts is not known" in stderr) == (3, True), stderr
    assert [process for process in before if process.is_running()] == before, "nobody has told it anything"
    network.trust_all()
    assert desk.json("kill", "wait")["state"] == "stopped"
    until(lambda: states(desk) == dict.fromkeys(HOSTS, "up"), SOON_S, "all are there")
    desk.json("down")
    for one in network.hosts.values():
        until(lambda one=one: one.processes() == [], SOON_S, f"nothing runs on {one.name}")  # type: ignore[misc]
