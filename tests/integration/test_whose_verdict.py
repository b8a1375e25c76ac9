"""Several jobs on one agent, with the command as a person runs it: each answer is about the job that was asked for."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent.wire.commands import Accepted, Prepare
from tests.support.agents import RunningAgent
from tests.support.commands import run_rankdeck
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.ranks

START_S = 90.0
HERE = ("--host", "localhost")
FAILS = "raise SystemExit(3)\n"
SUCCEEDS = "print('well')\n"
TRAINS = """
import ctypes, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor, rank = torch.ones(1000), dist.get_rank()
for step in range(1_000_000):
    time.sleep(0.02)
    if rank == 1:
        {at_fault}
    dist.all_reduce(tensor)
    tensor /= 2
"""
SLOW = "time.sleep(0.06)"
HOLDS_GIL = "ctypes.PyDLL(None).sleep(600 * (step > 50))"
SLEEPS = "import time\ntime.sleep(600)\n"


class Desk:
    """A person on a machine with an agent of its own."""

    def __init__(self, home: str, directory: Path) -> None:
        self.environ = {**os.environ, "XDG_STATE_HOME": home, "XDG_RUNTIME_DIR": home}
        self.agent_dir = Path(home, "rankdeck", socket.gethostname())
        self._directory = directory

    def run(self, *arguments: str) -> tuple[int, str, str]:
        return run_rankdeck(*arguments, cwd=self._directory, environ=self.environ)

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        code, printed, said = self.run(*arguments, *HERE, "--json")
        assert printed, said
        found: dict[str, Any] = json.loads(printed)
        return code, found

    def start(self, name: str, program: str) -> None:
        (self._directory / f"{name}.py").write_text(program)
        options = ("--nproc-per-node", "2", "--name", name, "--detach")
        code, _, said = self.run("run", *HERE, *options, "--beside", "--", f"{name}.py")
        assert code == 0, said

    def pids(self, name: str) -> list[int]:
        """Return the pids of a job's ranks, once both are there."""

        def look() -> list[int]:
            ranks = self.json("status", name)[1]["ranks"]
            return [rank["pid"] for rank in ranks] if all(rank["pid"] for rank in ranks) else []

        return until(look, START_S, "the ranks are there") or []


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="rdw-", dir="/tmp") as home:
        desk = Desk(home, tmp_path)
        try:
            yield desk
        finally:
            desk.run("down", "localhost", "--kill-jobs")


@pytest.mark.slow
def test_after_a_job_that_failed_a_healthy_one_returns_0_and_after_down_and_up_nothing_old_is_an_alarm(
    desk: Desk, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(FAILS)
    (tmp_path / "good.py").write_text(SUCCEEDS)
    run = ("run", *HERE, "--nproc-per-node", "2", "--headless")
    assert desk.run(*run, "--name", "bad", "--", "bad.py")[0] == 10
    assert desk.json("status")[0] == 10, "it is the one that was started last"

    code, printed, said = desk.run(*run, "--name", "good", "--", "good.py")

    assert (code, "verdict" in printed, "job good: succeeded, exit code 0" in printed) == (0, False, True), said
    assert "exited" not in said
    code, status = desk.json("status")
    assert (code, status["jobs"][0]["job_id"], status["verdicts"]) == (0, "good", [])
    assert [(other["job_id"], other["state"]) for other in status["other_jobs"]] == [("bad", "failed")]
    code, status = desk.json("status", "bad")
    assert (code, status["verdicts"][0]["cause"]) == (10, "exited")

    assert desk.run("down", "localhost")[0] == 0
    assert desk.run("up", "localhost")[0] == 0
    code, status = desk.json("status")
    assert (code, status["jobs"], status["verdicts"]) == (0, [], [])
    assert "no job runs; ended: good, bad (failed); rankdeck status JOB" in desk.run("status", *HERE)[1]
    for verb in ("ranks", "memory", "barriers", "stragglers"):
        line = f"no job runs; ended: good, bad (failed); rankdeck {verb} JOB"
        assert line in desk.run(verb, *HERE)[1]
    assert "no job runs; ended: good, bad (failed); rankdeck logs JOB" in desk.run("logs", *HERE)[2]
    assert "(ended: bad, good; rankdeck evidence JOB" in desk.run("evidence", *HERE)[2]
    assert desk.json("status", "bad")[1]["jobs"][0]["state"] == "failed", "who asks for it is answered"


@pytest.mark.slow
def test_of_two_jobs_that_run_each_is_judged_alone_and_a_name_that_is_not_there_is_refused(desk: Desk) -> None:
    desk.start("first", SLEEPS)
    desk.start("second", SLEEPS)
    victim = desk.pids("first")[1]
    desk.pids("second")
    os.kill(victim, signal.SIGSTOP)
    until(lambda: desk.json("status", "first")[0] == 10, START_S, "it is named")

    assert [verdict["culprits"] for verdict in desk.json("status", "first")[1]["verdicts"]] == [[1]]
    code, status = desk.json("status", "second")
    assert (code, status["verdicts"], status["jobs"][0]["job_id"]) == (0, [], "second")
    assert [(row["job_id"], row["cause"], row["culprits"]) for row in status["other_jobs"]] == [
        ("first", "frozen", [1])
    ]
    code, printed, _ = desk.run("status", *HERE)
    assert code == 0, "the one that was started last is shown"
    beside = "job second is shown; also on these nodes: job first, frozen rank 1; rankdeck"
    assert f"{beside} attach first" in printed
    for verb in ("ranks", "barriers"):
        assert f"rankdeck: {beside} {verb} first" in desk.run(verb, *HERE)[2]
        assert "is shown" not in desk.run(verb, "second", *HERE)[2], "it was asked for"
    events = desk.json("events")[1]["events"]
    found = {(event["job_id"], event["kind"], event["severity"]) for event in events}
    assert {("first", "verdict", "critical"), ("first", "job", "quiet"), ("second", "job", "quiet")} <= found
    assert not [event for event in events if event["kind"] == "beside"], "their own events are there"
    printed = desk.run("events", *HERE)[1]
    assert "  CRITICAL  job first: rank 1 on " in printed
    assert "  INFO      job second: starting" in printed
    assert desk.run("events", "-n", "2", *HERE)[1].splitlines() == printed.splitlines()[-2:]
    assert {event["job_id"] for event in desk.json("events", "second")[1]["events"]} <= {"", "second"}
    for verb in ("status", "attach"):
        code, _, said = desk.run(verb, "secund", *HERE, "--headless" if verb == "attach" else "--json")
        assert code == 2, said
        assert "there is no job secund on localhost; those there: first, second; the nearest is second" in said
        assert "(rankdeck status JOB --host localhost shows one of them)" in said


@pytest.mark.slow
def test_a_job_that_no_host_knows_is_wrong_use_of_whichever_command(desk: Desk) -> None:
    assert desk.run("up", "localhost")[0] == 0
    for verb in (
        *("status", "ranks", "barriers", "stragglers", "memory", "events", "logs", "attach", "stacks", "evidence"),
        *("stop", "kill", "restart", "fault kill --rank 0 --job"),
    ):
        code, _, said = desk.run(*verb.split(), "nobody", *HERE)
        assert (code, "there is no job nobody on" in said) == (2, True), (verb, said)


@pytest.mark.fault(row=23)
@pytest.mark.slow
def test_what_a_killed_console_has_left_prepared_hides_no_job_that_runs(desk: Desk, tmp_path: Path) -> None:
    desk.agent_dir.parent.mkdir(parents=True)
    with RunningAgent(directory=desk.agent_dir) as agent:
        desk.start("train", SLEEPS)
        (tmp_path / "left.py").touch()
        left = make_local_spec(tmp_path, 1, job_id="left", command=["left.py"])
        assert isinstance(agent.ask(Prepare(left)), Accepted)
        os.kill(desk.pids("train")[1], signal.SIGSTOP)

        until(lambda: desk.json("status")[0] == 10, START_S, "the job that runs is shown")

        assert desk.json("status")[1]["jobs"][0]["job_id"] == "train"
        assert desk.json("kill", "train")[1]["state"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at_fault", "cause"), [("slow", SLOW, "straggler"), ("gil", HOLDS_GIL, "silent")])
def test_a_single_look_says_what_a_console_says_that_has_looked_on(
    desk: Desk, name: str, at_fault: str, cause: str
) -> None:
    desk.start(name, TRAINS.format(at_fault=at_fault))

    def seen() -> list[tuple[int, list[tuple[str, list[int]]]]]:
        code, status = desk.json("status", name)
        told = [(verdict["cause"], verdict["culprits"]) for verdict in status["verdicts"]]
        return [(code, told)] if told else []

    assert until(seen, START_S, "it is named") == [(10, [(cause, [1])])]
    desk.run("kill", name, *HERE)
