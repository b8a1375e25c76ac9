"""Nodes that are frozen while a start is committed: what was given up elsewhere does not begin when they wake."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.wire.commands import Accepted, Commit, Prepare, RefusalReason, Refused, decode_reply, encode_command
from agent.wire.jobs import ENDED_STATES, JobSpec, JobState
from app.errors import AgentUnreachableError
from app.fleet.commands import StreamChannel
from app.fleet.fleet import Fleet
from tests.support.agents import RunningAgent
from tests.support.fault_rows import measure
from tests.support.jobs import make_local_spec, make_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.commands import Command, Reply

pytestmark = pytest.mark.fault


@pytest.fixture
def agents() -> Iterator[list[RunningAgent]]:
    with ExitStack() as stack:
        yield [stack.enter_context(RunningAgent(node=f"n{number}")) for number in (0, 1)]


def spec_of(workdir: Path, node_rank: int = 0) -> JobSpec:
    (workdir / "train.py").write_text("import time; time.sleep(600)")
    return make_spec(
        workdir=str(workdir), node_rank=node_rank, first_rank=node_rank, local_world_size=1, world_size=2, master_port=0
    )


def launchers(agent: RunningAgent) -> list[int]:
    """Return the launchers of a job that live below an agent, whatever it says."""
    found = []
    for process in agent.processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            is_shim = any(word.endswith("shim.py") for word in words)  # its arguments are those of the launcher
            if "torch.distributed.run" in words and not is_shim and "RANK" not in process.environ():
                found.append(process.pid)
    return found


@pytest.mark.fault(row=25)
@pytest.mark.ranks
def test_a_commit_that_was_given_up_is_refused_after_a_thaw_and_may_be_asked_for_anew(
    agents: list[RunningAgent], tmp_path: Path
) -> None:
    agent = agents[0]
    (tmp_path / "train.py").write_text("")
    spec = make_local_spec(tmp_path)
    assert isinstance(agent.ask(Prepare(spec)), Accepted)
    given_up_s = time.monotonic() + 0.5
    with agent.connect() as waiting:
        os.kill(agent.process.pid, signal.SIGSTOP)
        try:
            waiting.sendall(encode_command(Commit("train", within_s=0.5)))
            until(lambda: time.monotonic() > given_up_s, 10, "the console gives up")
        finally:
            os.kill(agent.process.pid, signal.SIGCONT)
        with measure(25, "told", "after the thaw"), waiting.makefile("rb") as replies:
            refused = decode_reply(replies.readline())

    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.TOO_LATE
    assert "was given up" in refused.message
    assert [job.state for job in agent.report().jobs] == [JobState.PREPARED]
    assert launchers(agent) == [], "I2: nothing of what was given up runs"
    assert isinstance(agent.ask(Prepare(spec)), Accepted)
    for _ in range(2):
        assert isinstance(agent.ask(Commit("train", within_s=30.0)), Accepted)
    agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES or bool(launchers(agent)), 30, "it has begun")
    assert len(launchers(agent)) <= 1, "I1: it was started twice"


class FreezingChannel(StreamChannel):
    """A channel to a host that freezes as a commit comes, and is not reached any more."""

    def __init__(self, agent: RunningAgent) -> None:
        super().__init__("n1", agent.directory)
        self._agent = agent
        self._is_frozen = False

    async def request(self, command: Command) -> Reply:
        if self._is_frozen:
            raise AgentUnreachableError("n1", "the host does not answer")
        if isinstance(command, Commit):
            self._is_frozen = True
            os.kill(self._agent.process.pid, signal.SIGSTOP)
        return await super().request(command)


@pytest.mark.fault(row=25)
async def test_a_host_that_was_frozen_while_its_commit_waited_does_not_begin_alone(
    agents: list[RunningAgent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.commands.REPLY_TIMEOUT_S", 5.0)
    fleet = Fleet({"n0": StreamChannel("n0", agents[0].directory), "n1": FreezingChannel(agents[1])})
    try:
        with pytest.raises(AgentUnreachableError, match="n1"):
            await fleet.start({f"n{number}": spec_of(tmp_path, number) for number in (0, 1)})
    finally:
        os.kill(agents[1].process.pid, signal.SIGCONT)
        await fleet.close()

    agents[1].wait_until(lambda report: report.report_seq > 10, 30, "it has looked round")
    assert [job.state for job in agents[1].report().jobs] == [JobState.PREPARED]
    assert launchers(agents[1]) == []
    with measure(25, "left", "on the other host"):
        until(lambda: launchers(agents[0]) == [], 30, "I2: what had begun on the other host has ended")
