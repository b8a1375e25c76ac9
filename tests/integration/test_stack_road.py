"""A job's stacks from several real agents: who does not know the job is left out, who does not answer is named."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import pytest

from agent.processes.py_spy import find_py_spy
from agent.wire.commands import InjectFault
from agent.wire.reports import ProcessState
from agent.wire.stacks import StackSource
from app.errors import AgentRefusedError, AgentUnreachableError, UsageError
from app.fleet.fleet import fetch_stacks
from app.session.session import Session
from ddpcore.wire import FaultKind
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_py_spy(sys.executable) is None, reason="needs py-spy: pip install 'rankdeck[stacks]'"),
]

START_S = 60.0
END_S = 15.0


@contextlib.contextmanager
def agent_that_runs_one(directory: Path) -> Iterator[RunningAgent]:
    """Make an agent whose job has one rank, without torch."""
    (directory / "serve.py").write_text("import time; time.sleep(600)")
    with RunningAgent("--private") as agent:
        agent.start_job(make_local_spec(directory, 1, command=["serve.py"]))
        agent.wait_until(lambda report: len(report.workers) == 1, START_S, "the rank is found")
        yield agent


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """Return such an agent, for tests that only ask it."""
    with agent_that_runs_one(tmp_path_factory.mktemp("serving")) as agent:
        yield agent


async def test_nodes_answer_each_for_itself(serving: RunningAgent, tmp_path: Path) -> None:
    with RunningAgent("--private") as idle:
        directories = {"a": serving.directory, "idle": idle.directory, "dead": tmp_path / "dead"}

        answers = await fetch_stacks(directories, "train", is_native=False)

    assert [(one.node, one.stacks is not None) for one in answers] == [("a", True), ("dead", False)]
    assert "the agent on dead does not answer" in answers[1].trouble
    assert answers[0].stacks
    assert [rank.source for rank in answers[0].stacks.ranks] == [StackSource.PY_SPY]


async def test_a_node_that_is_silent_outweighs_one_that_does_not_know_the_job(tmp_path: Path) -> None:
    with RunningAgent("--private") as idle:
        directories = {"idle": idle.directory, "dead": tmp_path / "dead"}
        with pytest.raises(AgentUnreachableError, match="the agent on dead does not answer"):
            await fetch_stacks(directories, "train", is_native=False)


async def test_a_job_that_nobody_knows_is_refused(serving: RunningAgent) -> None:
    with pytest.raises(AgentRefusedError, match="there is no job nobody on this node; those here: train"):
        await fetch_stacks({"a": serving.directory}, "nobody", is_native=False)


async def test_a_job_that_has_ended_has_none(tmp_path: Path) -> None:
    with agent_that_runs_one(tmp_path) as serving:
        serving.ask(InjectFault("train", FaultKind.KILL, 0))
        serving.wait_until(lambda report: report.workers[0].process is ProcessState.EXITED, END_S, "it is killed")
        until(lambda: serving.report().jobs[0].state == "failed", END_S, "the job has failed")

        with pytest.raises(AgentRefusedError, match="job train does not run: it has no stacks"):
            await fetch_stacks({"a": serving.directory}, "train", is_native=False)


async def test_a_session_asks_about_the_job_that_is_shown(serving: RunningAgent) -> None:
    session = Session({"a": serving.directory})
    with pytest.raises(UsageError, match="there is no job yet"):
        await session.stacks(is_native=False)
    await session.connect()
    try:
        await until_async(lambda: session.view().job() is not None, END_S, "the job is shown")
        (answer,) = await session.stacks(is_native=False)
    finally:
        await session.close()
    assert answer.stacks
    assert answer.stacks.job_id == "train"
