"""A cluster of four hosts, from a bare Python on each to nothing left: walked once, harmed on the way in every manner.

The hosts share their files, as by NFS, so one installation serves all; each has its own sshd, agent and ranks.
"""

from __future__ import annotations

import signal
import sys
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from app.install.own_wheel import own_wheel
from tests.support.bare_python import LACKING, fill_wheelhouse, link_packages
from tests.support.counting import BATCH, COUNTING, STEPS, uses_of_samples
from tests.support.desk import IMPORT_S, Desk, read_until, told_of
from tests.support.waiting import until

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.support.hosts import Host, Network

HOSTS = ("h1", "h2", "h3", "h4")
JOB = """
[job.gpt]
command = ["train.py"]
hosts = ["h*"]
env = { BATCH = "24" }
allow_faults = true
"""
INSTALL_S = 180.0
END_S = 90.0
REST_S = 180.0
"""For some hundred steps of six ranks that share the cores of one machine with other work."""


@pytest.fixture
def desk(desk: Desk) -> Desk:
    desk.at = ()
    return desk


@pytest.fixture
def project(desk: Desk) -> Path:
    """The directory of the cluster, on this machine and on all hosts."""
    project = desk.directory / "project"
    project.mkdir()
    (project / "train.py").write_text(COUNTING)
    desk.directory = project
    return project


def make_bare(network: Network) -> Path:
    """Let each host have a Python with torch and without rankdeck; return the wheels of what else that lacks."""
    packages, wheelhouse = network.directory / "packages", network.directory / "wheelhouse"
    packages.mkdir()
    wheelhouse.mkdir()
    names = {distribution.name for distribution in metadata.distributions()}
    link_packages(names - {"rankdeck", "pip", *LACKING}, packages)
    fill_wheelhouse(wheelhouse)
    for host in network.hosts.values():
        host.tell_sshd(PYTHONPATH=str(packages))
    return wheelhouse


def write_inventory(desk: Desk, project: Path) -> None:
    (project / "hosts").write_text("".join(f"{host} slots=2\n" for host in HOSTS))
    code, _, stderr = desk.run("init", "--hostfile", "hosts", "--name", "lab", "--yes")
    assert (code, "rankdeck: then: rankdeck install, rankdeck doctor" in stderr) == (0, True)
    inventory = project / "rankdeck.toml"
    inventory.write_text(f"{inventory.read_text()}{JOB}".replace("[cluster]", f'[cluster]\nworkdir = "{project}"'))


def install(desk: Desk, project: Path, wheelhouse: Path) -> None:
    """Put this rankdeck into a new Python of the hosts, and let the inventory name that."""
    wheel = own_wheel(project.parent).wheel.path
    venv = project.parent / "venv"
    how = ("--python", sys.executable, "--venv", str(venv), "--wheel", wheel, "--wheelhouse", str(wheelhouse))
    code, stdout, stderr = desk.run("install", *how, timeout_s=INSTALL_S)
    assert code == 0, stderr
    said = Counter(line.split(" (")[0].split(" ", 1)[1] for line in stdout.splitlines())
    version = metadata.version("rankdeck")
    assert said == {f"has rankdeck {version} now": 1, f"has rankdeck {version} already": 3}, "the others waited for one"
    advice = f'write python = "{venv}/bin/python" into rankdeck.toml'
    assert advice in stderr
    inventory = project / "rankdeck.toml"
    line = f'[cluster]\npython = "{venv}/bin/python"'
    inventory.write_text(inventory.read_text().replace("[cluster]", line))


def examine(desk: Desk) -> None:
    """Look at all hosts before there is an agent on any."""
    found = desk.json("doctor")
    assert [row["host"] for row in found["hosts"]] == list(HOSTS)
    assert not [row for host in found["hosts"] for row in host["rows"] if row["status"] == "bad"]


def kill_console(desk: Desk, console: subprocess.Popen[str], project: Path) -> None:
    """Kill the console that has started the job: it goes on, and whoever comes next knows what was before."""
    console.send_signal(signal.SIGKILL)
    console.communicate(timeout=END_S)
    step = desk.watch_until_steps_move()
    kept = desk.json("evidence", "gpt", "--output", str(project / "kept.zip"))
    assert kept["num_records"] > 20, "what agents remember of the time before is in it"
    terminal = desk.terminal("again", "attach")
    terminal.until_it_shows("8 ranks training", IMPORT_S)
    terminal.keys("6")
    for host in HOSTS:
        terminal.until_it_shows(f"begins on {host}", END_S)
    terminal.keys("q")
    terminal.until_it_shows("exit code 0", END_S)
    assert desk.watch_until_steps_move() > step


def kill_connections(follower: subprocess.Popen[str], host: Host) -> None:
    """Kill the SSH sessions of a host: whoever looks on is told, and they come back by themselves."""
    host.drop_sessions()
    assert "no job ends by that" in read_until(follower, f"{host.name}: the connection is lost")
    read_until(follower, f"{host.name}: the connection is back")


def kill_agents(desk: Desk, follower: subprocess.Popen[str], network: Network) -> None:
    """Kill every agent: the ranks train on, the next agents take them up, and whoever looks on sees them again."""
    before = {row["host"]: (row["pid"], row["epoch"]) for row in desk.json("up")["hosts"]}
    ranks = {name: {process.pid for process in host.processes()} for name, host in network.hosts.items()}
    step = desk.watch_until_steps_move()
    for name, host in network.hosts.items():
        host.exec("kill", "-9", str(before[name][0]))
    assert "rankdeck up h" in read_until(follower, "nothing is known of jobs there")
    code, _, stderr = desk.run("status")
    assert (code, "no agent runs on h1, h2 and 2 more" in stderr) == (3, True), stderr

    after = {row["host"]: (row["pid"], row["epoch"]) for row in desk.json("up")["hosts"]}

    assert all(after[host] != before[host] for host in HOSTS)
    read_until(follower, ": the agent is back")
    read_until(follower, "8 ranks training")
    assert desk.watch_until_steps_move() > step
    for name, host in network.hosts.items():
        left = {process.pid for process in host.processes()} & ranks[name]
        assert len(left) >= len(ranks[name]) - 2, "its launcher and ranks are the same"
    (job,) = desk.json("status", codes=(0, 10))["jobs"]
    assert (job["state"], job["attempt"]) == ("running", 0)


def freeze_and_thaw(desk: Desk, follower: subprocess.Popen[str]) -> None:
    """Freeze a rank of the third host; whoever asks is told that it is the one."""
    code, stdout, stderr = desk.run("fault", "freeze", "--rank", "5")
    assert (code, stdout) == (0, "job gpt on h3: rank 5 is frozen (SIGSTOP)\n"), stderr
    assert "rank 5 on h3 is frozen" in read_until(follower, "is frozen")
    # Until the ranks have stood for a while, one that was late before may be told of beside it.
    until(lambda: told_of(desk.json("status", codes=(0, 10))) == [("frozen", [5])], END_S, "it alone is told of")
    assert desk.run("status")[0] == 10
    found = desk.json("stacks", "gpt")
    assert [(rank["rank"], rank["node"]) for rank in found["ranks"]] == [(r, HOSTS[r // 2]) for r in range(8)]
    assert desk.run("fault", "thaw", "--rank", "5")[0] == 0


def lose_and_find_a_host(desk: Desk, host: Host) -> None:
    """Look on without a host, and with it once it is back."""
    host.pull_cable()
    code, stdout, stderr = desk.run("status")
    assert (code in {0, 10}, f"{host.name}: " in stderr, stdout.startswith("h1, h2 and h3: up, h4: lost")) == (
        *(True, True, True),
    ), (code, stdout, stderr)
    follower = desk.start("attach", "--headless")
    assert "going on without 1 of 4 hosts" in read_until(follower, "going on")
    host.plug_in_cable()
    assert f"{host.name}: the connection is back" in read_until(follower, "is back")
    leave(follower)


def leave(follower: subprocess.Popen[str]) -> None:
    follower.send_signal(signal.SIGINT)
    said = follower.communicate(timeout=END_S)[1]
    assert (
        "job gpt goes on; watch it: rankdeck attach gpt, look: rankdeck status gpt, end it: rankdeck stop gpt" in said
    )


@pytest.mark.fault(row=[1, 5, 10, 18])
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.timeout(1200)
def test_a_cluster_is_made_used_harmed_and_taken_down_and_each_sample_is_used_once(
    desk: Desk, network: Network, project: Path
) -> None:
    wheelhouse = make_bare(network)
    write_inventory(desk, project)
    install(desk, project, wheelhouse)
    examine(desk)
    brought_up = desk.json("up")["hosts"]
    assert [(row["host"], row["is_new"], row["error"]) for row in brought_up] == [(host, True, None) for host in HOSTS]
    console = desk.start("start", "gpt", "--json", "--", "--steps", "as many as it takes")
    assert "job gpt started on h1, h2 and 2 more with 8 ranks" in read_until(console, "started")
    read_until(console, "8 ranks training")

    kill_console(desk, console, project)
    follower = desk.start("attach", "--headless")
    read_until(follower, "8 ranks training")
    kill_connections(follower, network["h2"])
    kill_agents(desk, follower, network)
    freeze_and_thaw(desk, follower)
    leave(follower)
    step = desk.watch_until_steps_move()
    lose_and_find_a_host(desk, network["h4"])
    assert desk.watch_until_steps_move() > step

    stopped = desk.json("stop", "gpt")
    assert (stopped["state"], [row["host"] for row in stopped["hosts"]]) == ("stopped", list(HOSTS))
    before = uses_of_samples(project)
    assert max(before.values()) == 1
    assert len(before) < BATCH * STEPS, "the stop came before the end"
    code, _, stderr = desk.run("restart", "gpt", "--exclude", "h1")
    assert (code, "only 3 of the 4 nodes of job gpt can be asked" in stderr) == (2, True), stderr
    (project / "hurry").touch()
    again = desk.json("restart", "gpt", "--exclude", "h1", "--on-these-hosts")
    assert (again["attempt"], again["num_ranks"], again["hosts"]) == (1, 6, ["h2", "h3", "h4"])
    until(lambda: desk.json("status", codes=(0, 10))["jobs"][0]["state"] == "succeeded", REST_S, "it ends")
    assert uses_of_samples(project) == Counter(range(BATCH * STEPS)), "each sample once, over eight ranks and six"

    down = desk.json("down")["hosts"]
    assert [(row["host"], row["num_jobs_left"]) for row in down] == [(host, 0) for host in HOSTS]
    for host in network.hosts.values():
        until(lambda host=host: host.processes() == [], END_S, f"nothing runs on {host.name}")  # type: ignore[misc]
    assert list(desk.runtime.iterdir()) == []
