"""Agents, shims, launchers and ranks killed at random moments: no orphan, no lost job, the true exit status.

One round in every run. RANKDECK_AGENT_KILLS says how many with `-m chaos`: 8, a hundred by hand after a change of this
code. Each round draws its own dice, so that a round that fails can be run again alone: RANKDECK_AGENT_KILLS_FROM says
where to begin.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from agent.wire.commands import Accepted, Commit, Prepare, encode_command
from agent.wire.jobs import ENDED_STATES, JobSpec, JobState, JobStatus
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.ranks import is_alive
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from agent.wire.reports import NodeReport

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

NUM_ROUNDS = int(os.environ.get("RANKDECK_AGENT_KILLS", "8"))
FIRST_ROUND = int(os.environ.get("RANKDECK_AGENT_KILLS_FROM", "0"))
LONGEST_S = 8.0
"""From the commit to the first kill: by then the ranks have trained for a while."""
SETTLE_S = 150.0

PROGRAM = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
while True:
    is_over = torch.tensor(float(os.path.exists(sys.argv[1])))
    dist.all_reduce(is_over)
    if is_over:
        break
    time.sleep(0.01)
dist.barrier()
"""


class World:
    """One state directory, the agent that serves it now, and what runs below it."""

    def __init__(self, stack: ExitStack, tmp_path: Path) -> None:
        self._stack = stack
        self._tmp_path = tmp_path
        (tmp_path / "program.py").write_text(PROGRAM)
        self.agent = stack.enter_context(RunningAgent())
        self.directory = self.agent.directory

    def replace_agent(self) -> None:
        """Start an agent where one was killed."""
        self.agent = self._stack.enter_context(RunningAgent(directory=self.directory))

    def kill_agent(self) -> None:
        """Kill the agent and nothing else."""
        self.agent.process.kill()
        self.agent.process.wait()

    def over(self, job_id: str) -> Path:
        """Return the file whose existence ends a job's program."""
        return self._tmp_path / f"{job_id}.over"

    def spec(self, job_id: str, max_restarts: int) -> JobSpec:
        """Return a job of two ranks."""
        command = ["program.py", str(self.over(job_id))]
        return make_local_spec(self._tmp_path, job_id=job_id, command=command, grace_s=3.0, max_restarts=max_restarts)

    def record(self, job_id: str, name: str) -> dict[str, int]:
        """Return one of the shim's records; empty when it is not there."""
        try:
            found: dict[str, int] = msgspec.json.decode((self.directory / "jobs" / job_id / "0" / name).read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def status(self, job_id: str, report: NodeReport | None = None) -> JobStatus | None:
        """Return a job as the agent tells it."""
        jobs = (report or self.agent.report()).jobs
        return next((status for status in jobs if status.job_id == job_id), None)

    def processes(self, job_id: str) -> list[psutil.Process]:
        """Return what is alive of a job, by its environment: launcher, ranks, what they started, and the shim."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RANKDECK_JOB_ID") == job_id and is_alive(process.pid):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def pid_of(self, job_id: str, target: str) -> int | None:
        """Return the pid of one of a job's processes, None if it is not there."""
        run = self.record(job_id, "run.json")
        if target == "shim":
            return run.get("shim_pid")
        if target == "launcher":
            return run.get("launcher_pid")
        for process in self.processes(job_id):
            try:
                is_rank = process.environ().get("RANK") == target and process.ppid() == run.get("launcher_pid")
            except psutil.Error:
                continue
            if is_rank:
                return process.pid
        return None


@pytest.mark.parametrize(
    "number",
    [
        FIRST_ROUND,
        *(pytest.param(number, marks=pytest.mark.chaos) for number in range(FIRST_ROUND + 1, FIRST_ROUND + NUM_ROUNDS)),
    ],
)
def test_whoever_is_killed_when_nothing_is_left_and_the_truth_is_told(tmp_path: Path, number: int) -> None:
    dice = random.Random(number)
    with ExitStack() as stack:
        world, job_id = World(stack, tmp_path), f"round{number}"
        max_restarts = dice.choice([0, 0, 1])
        is_acknowledged = commit(world, world.spec(job_id, max_restarts), dice)
        targets = dice.sample(["agent", "shim", "launcher", "0", "1"], dice.choice([1, 1, 2, 3]))
        struck = strike(world, job_id, targets, dice)
        if not is_alive(world.agent.process.pid):
            world.replace_agent()

        status = world.status(job_id)
        if status is None:
            assert not is_acknowledged, "a job that was taken is unknown"
        elif set(struck) <= {"shim"}:
            check_that_it_goes_on(world, job_id, is_lone=bool(struck))
        elif max_restarts and not has_state(world, job_id, JobState.LOST):
            until(lambda: is_in_attempt(world, job_id, 1), SETTLE_S, f"job begins again after {struck}")
            check_that_it_goes_on(world, job_id)
        else:
            until(ended(world, job_id), SETTLE_S, f"job ends after {struck}")
            check_the_truth(world, job_id, struck)
        until(lambda: not world.processes(job_id), SETTLE_S, f"nothing of the job is left after {targets}")


def commit(world: World, spec: JobSpec, dice: random.Random) -> bool:
    """Start a job and wait for a random moment; return whether the agent has acknowledged it."""
    job_id = spec.job_id
    assert isinstance(world.agent.ask(Prepare(spec)), Accepted)
    if dice.random() < 0.2:
        # Who is killed in the midst of a command may have carried it out or not.
        road = world.agent.connect()
        road.sendall(encode_command(Commit(job_id)))
        time.sleep(dice.uniform(0.0, 0.03))
        world.kill_agent()
        road.close()
        world.replace_agent()
        return False
    assert isinstance(world.agent.ask(Commit(job_id)), Accepted)
    time.sleep(dice.uniform(0.0, LONGEST_S))
    return True


def strike(world: World, job_id: str, targets: list[str], dice: random.Random) -> list[str]:
    """Kill one after the other, as far as they are there; return whom of the job it hit."""
    struck = []
    for target in targets:
        if target == "agent":
            world.kill_agent()
        elif (pid := world.pid_of(job_id, target)) is not None and is_alive(pid):
            with contextlib.suppress(ProcessLookupError):  # whoever was struck before may have taken it along just now
                os.kill(pid, signal.SIGKILL)
                struck.append(target)
        time.sleep(dice.choice([0.0, 0.0, dice.uniform(0.0, 0.5)]))
    return struck


def ended(world: World, job_id: str) -> Callable[[], bool]:
    def look() -> bool:
        status = world.status(job_id)
        assert status is not None
        return status.state in ENDED_STATES

    return look


def has_state(world: World, job_id: str, state: JobState) -> bool:
    status = world.status(job_id)
    return status is not None and status.state is state


def is_in_attempt(world: World, job_id: str, attempt: int) -> bool:
    status = world.status(job_id)
    return status is not None and (status.state, status.attempt) == (JobState.RUNNING, attempt)


def check_that_it_goes_on(world: World, job_id: str, *, is_lone: bool = False) -> None:
    """A job that runs, since only agent or shim was killed or since it began again, ends well when its program does.

    Without a shim, and of another agent's, that is known from Linux 6.15 on.
    """
    until(lambda: has_state(world, job_id, JobState.RUNNING), SETTLE_S, "the job runs")
    world.over(job_id).touch()
    until(ended(world, job_id), SETTLE_S, "the job ends by itself")
    status = world.status(job_id)
    assert status is not None
    is_unknown = is_lone and (status.state, status.exit_code) == (JobState.LOST, None)
    assert is_unknown or (status.state, status.exit_code) == (JobState.SUCCEEDED, 0), status


def check_the_truth(world: World, job_id: str, struck: list[str]) -> None:
    """What is told is what the shim has written; without its word nobody pretends to know."""
    status = world.status(job_id)
    assert status is not None
    recorded = world.record(job_id, "exit.json")
    if not recorded:
        # What ended a launcher is known where the agent was its parent by then, or the kernel tells it.
        assert "shim" in struck, status
        assert status.exit_code != 0
        assert status.state in {JobState.FAILED, JobState.LOST}
        return
    assert status.exit_code == recorded["exit_code"] != 0, status
    assert status.state is JobState.FAILED
    assert status.detail
