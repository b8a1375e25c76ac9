"""Ranks that ended before their agent saw them, since it could not look: how they ended is told all the same."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.wire.commands import Accepted
from agent.wire.jobs import JobState
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.reports import NodeReport

pytestmark = pytest.mark.ranks

END_S = 60.0
FAILING = (
    "import os, signal, sys\nsys.exit('bad luck') if os.environ['RANK'] == '1' else signal.sigwait({signal.SIGUSR1})\n"
)


@pytest.fixture
def agents() -> Iterator[ExitStack]:
    with ExitStack() as agents:
        yield agents


def begin(agent: RunningAgent, tmp_path: Path, program: str) -> None:
    """Start a job of two ranks that come when the agent is stopped, and cannot look at them."""
    (tmp_path / "quick.py").write_text(program)
    python, is_stopped = tmp_path / "python", tmp_path / "stopped"
    python.write_text(f'#!/bin/sh\nwhile [ ! -e {is_stopped} ]; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    spec = make_local_spec(tmp_path, command=["quick.py"], python=str(python), is_probed=False)
    assert isinstance(agent.start_job(spec), Accepted)
    agent.process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(agent.process.pid).status() == psutil.STATUS_STOPPED, END_S, "it is stopped")
    is_stopped.touch()


def wait_for_its_end(agent: RunningAgent) -> None:
    until((agent.directory / "jobs/train/0/exit.json").exists, END_S, "the job ends unseen")


def told(report: NodeReport) -> tuple[JobState, list[tuple[int, int, int | None, int | None, str]]]:
    """Return the state of the job, and of each rank: its pid, its exit code or signal, its words."""
    (job,) = report.jobs
    ends = [(worker.rank, worker.pid, worker.exit) for worker in report.workers]
    return job.state, [(rank, pid, end.code, end.signal, end.error_text) for rank, pid, end in ends if end is not None]


@pytest.mark.slow
def test_of_a_job_that_ends_well_all_ranks_have(agents: ExitStack, tmp_path: Path) -> None:
    agent = agents.enter_context(RunningAgent())
    begin(agent, tmp_path, "")
    wait_for_its_end(agent)
    agent.process.send_signal(signal.SIGCONT)

    done = (JobState.SUCCEEDED, [(0, 0, 0, None, ""), (1, 0, 0, None, "")])
    until(lambda: told(agent.report()) == done, END_S, "it is told")

    agent.process.kill()
    agent.process.wait()
    agent = agents.enter_context(RunningAgent(directory=agent.directory))
    assert told(agent.report()) == done, "also by an agent that was not there"


def test_of_one_that_fails_the_launcher_says_which_rank_did(agents: ExitStack, tmp_path: Path) -> None:
    agent = agents.enter_context(RunningAgent())
    begin(agent, tmp_path, FAILING)
    wait_for_its_end(agent)
    agent.process.kill()
    agent.process.wait()

    agent = agents.enter_context(RunningAgent(directory=agent.directory))
    report = agent.wait_until(lambda report: report.jobs[0].state is JobState.FAILED, END_S, "it is told")

    assert told(report) == (JobState.FAILED, [(0, 0, None, signal.SIGTERM, ""), (1, 0, 1, None, "bad luck")])
    assert report.jobs[0].root_cause is not None
    assert report.jobs[0].root_cause.rank == 1
