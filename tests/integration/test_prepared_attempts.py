"""An attempt that is prepared and never begins, as when a console is lost in between: the one before it is the job."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agent.wire.commands import (
    Abort,
    Accepted,
    Command,
    Commit,
    Kill,
    Prepare,
    PrepareAgain,
    RefusalReason,
    Refused,
    Stop,
)
from agent.wire.jobs import JobState
from tests.support.agents import RunningAgent
from tests.support.commands import run_rankdeck
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

END_S = 30.0
START_AND_END_S = 90.0
"""Of torchrun, on a busy machine."""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def told(agent: RunningAgent) -> list[tuple[int, JobState]]:
    return [(job.attempt, job.state) for job in agent.report().jobs]


def exits(agent: RunningAgent) -> list[tuple[int, int, int | None, str]]:
    ended = [(worker, worker.exit) for worker in agent.report().workers if worker.exit is not None]
    return [(worker.rank, worker.pid, end.code, end.error) for worker, end in ended]


def with_an_attempt_that_is_prepared(agent: RunningAgent, tmp_path: Path) -> None:
    """Let a job be stopped, and its next attempt be prepared."""
    (tmp_path / "train.py").write_text("import time\ntime.sleep(600)\n")
    assert isinstance(agent.start_job(make_local_spec(tmp_path, 1)), Accepted)
    assert agent.ask(Kill("train")) == Accepted()
    until(lambda: told(agent) == [(0, JobState.STOPPED)], END_S, "it ends")
    again = PrepareAgain("train", 1, 0, 1, 1)
    until(lambda: isinstance(agent.ask(again), Accepted), END_S, "nothing of the first attempt is left")
    assert told(agent) == [(1, JobState.PREPARED)]


@pytest.mark.parametrize("command", [Abort("train"), Stop("train"), Kill("train")])
def test_whoever_ends_it_finds_the_attempt_before_it_again(stack: ExitStack, tmp_path: Path, command: Command) -> None:
    agent = stack.enter_context(RunningAgent())
    with_an_attempt_that_is_prepared(agent, tmp_path)

    assert agent.ask(command) == Accepted()

    assert told(agent) == [(0, JobState.STOPPED)]
    assert isinstance(agent.ask(PrepareAgain("train", 1, 0, 1, 1)), Accepted), "its number is free again"


def test_an_attempt_that_cannot_be_started_gives_way_to_the_one_before_it(stack: ExitStack, tmp_path: Path) -> None:
    agent = stack.enter_context(RunningAgent())
    with_an_attempt_that_is_prepared(agent, tmp_path)
    shutil.rmtree(agent.directory / "jobs" / "train" / "1")

    refused = agent.ask(Commit("train"))
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.CANNOT_SPAWN
    assert agent.ask(Abort("train")) == Accepted()

    assert told(agent) == [(0, JobState.STOPPED)]


def test_an_agent_that_is_killed_meanwhile_is_followed_by_one_that_knows_the_attempt_before(
    stack: ExitStack, tmp_path: Path
) -> None:
    agent = stack.enter_context(RunningAgent())
    with_an_attempt_that_is_prepared(agent, tmp_path)

    for _ in range(2):  # the second one knows it from the record of the first
        agent.process.kill()
        agent.process.wait()
        agent = stack.enter_context(RunningAgent(directory=agent.directory))
        assert told(agent) == [(0, JobState.STOPPED)]

    assert isinstance(agent.ask(PrepareAgain("train", 1, 0, 1, 1)), Accepted)
    assert agent.ask(Commit("train")) == Accepted()
    assert told(agent) == [(1, JobState.RUNNING)]
    assert agent.ask(Kill("train")) == Accepted()


def test_how_the_ranks_of_the_attempt_before_it_ended_is_told_again(stack: ExitStack, tmp_path: Path) -> None:
    agent = stack.enter_context(RunningAgent())
    (tmp_path / "train.py").write_text("raise RuntimeError('out of luck')\n")
    assert isinstance(agent.start_job(make_local_spec(tmp_path, 1)), Accepted)
    until(lambda: told(agent) == [(0, JobState.FAILED)], START_AND_END_S, "it fails")
    before = exits(agent)
    assert [(code, "out of luck" in exception) for _, _, code, exception in before] == [(1, True)]
    again = PrepareAgain("train", 1, 0, 1, 1)
    until(lambda: isinstance(agent.ask(again), Accepted), END_S, "nothing of the first attempt is left")

    assert agent.ask(Abort("train")) == Accepted()
    assert exits(agent) == before

    until(lambda: isinstance(agent.ask(again), Accepted), END_S, "it is prepared once more")
    agent.process.kill()
    agent.process.wait()
    agent = stack.enter_context(RunningAgent(directory=agent.directory))
    assert told(agent) == [(0, JobState.FAILED)]
    assert exits(agent) == before


def test_a_person_who_stops_what_never_began_is_told_that_it_is_stopped(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rdl-", dir="/tmp") as home:
        environ = {**os.environ, "XDG_STATE_HOME": home}
        directory = Path(home, "rankdeck", socket.gethostname())
        directory.parent.mkdir()
        (tmp_path / "train.py").touch()
        with RunningAgent(directory=directory) as agent:
            assert isinstance(agent.ask(Prepare(make_local_spec(tmp_path, 1))), Accepted)
            stop = ("stop", "train", "--host", "localhost")

            code, stdout, stderr = run_rankdeck(*stop, cwd=tmp_path, environ=environ)
            assert (code, stdout) == (0, "job train on localhost: stopped\n")
            assert stderr in {"", "rankdeck: job train was asked to end\n"}, "it may have ended before anybody looks"

            assert told(agent) == []
            code, _, stderr = run_rankdeck(*stop, cwd=tmp_path, environ=environ)
            assert (code, "there is no job train" in stderr) == (2, True)
