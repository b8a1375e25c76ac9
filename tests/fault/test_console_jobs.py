"""What a console does to jobs of hosts that come and go, and beside another console."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.counting import COUNTING
from tests.support.desk import Desk, named
from tests.support.hosts import Network, require_hosts
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.fault, pytest.mark.ranks]

HOSTS = named("h1", "h2")
END_S = 90.0


@pytest.fixture
def desk() -> Iterator[Desk]:
    require_hosts()
    with Network("h1", "h2") as network:
        desk = Desk(network)
        desk.at = ("h1", "h2")
        try:
            desk.json("up", "h1", "h2")
            yield desk
        finally:
            desk.run("down", "h1", "h2", "--kill-jobs")
            desk.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_job_whose_host_was_away_has_not_failed(desk: Desk) -> None:
    h2 = desk.network["h2"]
    for host in desk.network.hosts.values():
        (host.home / "train.py").write_text(COUNTING)
    how = ("--no-doctor", "--detach", "--name", "gpt", "--nproc-per-node", "1", "--env", "BATCH=24")
    assert desk.run("run", *HOSTS, *how, "train.py", "--steps", "as many as it takes")[0] == 0
    desk.watch_until_steps_move()
    watcher = desk.start("attach", *HOSTS, "--json")
    h2.pull_cable()

    code, stdout, stderr = desk.run("stop", "gpt", "--now", *HOSTS)
    assert (code, stdout, "it may run there" in stderr) == (3, "job gpt on h1: stopped\n", True), stderr
    h2.plug_in_cable()

    def state() -> str:
        (job,) = desk.json("status", *HOSTS, codes=(0, 3, 10))["jobs"]
        assert job["state"] != "failed"
        assert job["root_cause"] is None
        return str(job["state"] if job["num_nodes"] == 2 else "")

    until(
        lambda: "h1 and h2: up" in desk.run("status", *HOSTS)[1] and state() == "stopped", END_S, "all of it has ended"
    )
    ended = desk.json("stop", "gpt", *HOSTS)
    assert (ended["state"], {row["state"] for row in ended["hosts"]}) == ("stopped", {"stopped"})
    summary, _ = watcher.communicate(timeout=END_S)
    # One that came too late to hear of h2 before its cable was pulled knows of no end there.
    assert watcher.returncode == (10 if "nothing came from h2" in summary else 0), summary
    kept = desk.json("evidence", "gpt", *HOSTS, "--output", str(desk.directory / "kept.zip"))
    assert "failed" not in str(kept)


@pytest.mark.fault(row=26)
def test_the_second_of_two_consoles_is_told_what_runs_and_asked(desk: Desk) -> None:
    for host in desk.network.hosts.values():
        (host.home / "stay.py").write_text("import signal\nsignal.sigwait({signal.SIGUSR2})\n")
    start = ("run", *HOSTS, "--no-doctor", "--no-probe", "--detach", "--nproc-per-node", "1", "--name")
    assert desk.run(*start, "one", "stay.py")[0] == 0

    code, stdout, stderr = desk.run(*start, "two", "stay.py")
    said = "job one runs on h1 and h2 (--beside starts two there too; rankdeck stop one ends the other)"
    assert (code, stdout, stderr.splitlines()[-1]) == (2, "", f"rankdeck: {said}")
    assert desk.run(*start, "two", "--beside", "stay.py")[0] == 0
    assert desk.run("restart", "two", "--now", *HOSTS)[0] == 0, "it shares the hosts already"
    assert desk.run("kill", "two", *HOSTS)[0] == 0
    code, stdout, stderr = desk.run("restart", "two", *HOSTS)
    assert (code, stdout, stderr.splitlines()[-1]) == (2, "", f"rankdeck: {said}")
    assert desk.run("restart", "two", "--beside", *HOSTS)[0] == 0
    assert desk.run("kill", "two", *HOSTS)[0] == 0
    terminal = desk.terminal("again", "restart", "two", *HOSTS)
    terminal.until_it_shows("Start two there too? [y/N]", END_S)
    terminal.keys("y", "Enter")
    terminal.until_it_shows("watch it: rankdeck attach", END_S)

    terminal = desk.terminal("third", "run", *HOSTS, "--no-doctor", "--no-probe", "--name", "three", "stay.py")
    terminal.until_it_shows("Start three there too? [y/N]", END_S)
    terminal.keys("y", "Enter")
    terminal.until_it_shows("three", END_S)
    until(lambda: "three" in desk.run("status", "three", *HOSTS)[1], END_S, "it has begun")
    terminal.keys("q")
    terminal.until_it_shows("exit code", END_S)
