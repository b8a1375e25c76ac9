"""The stacks of real ranks, however they are stuck: by their probes, by py-spy, or not at all."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from agent.processes.py_spy import find_py_spy
from agent.wire.commands import Accepted, InjectFault, RefusalReason, Refused
from agent.wire.reports import ProcessState
from agent.wire.stacks import GetStacks, RankStacks, Stacks, StackSource
from app.stacks.groups import NodeStacks, picture_of
from ddpcore.wire import FaultKind
from ddpcore.wire_stacks import stack_file
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport
    from ddpcore.wire import RankReport

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_py_spy(sys.executable) is None, reason="needs py-spy: pip install 'rankdeck[stacks]'"),
]

START_S = 60.0
STUCK_S = 60.0
LONG_WAIT_S = 0.5
"""Longer than ranks that get on wait for each other: whoever waits so long is held up."""

LOOP = """
import ctypes, sys, time
import torch, torch.distributed as dist

def meet():
    dist.all_reduce(torch.ones(4))

def linger():
    time.sleep(600)

def hold_the_lock():
    print("held", flush=True)
    ctypes.PyDLL(None).sleep(600)  # PyDLL calls with the interpreter's lock in hand

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(1_000_000):
    if step == 100 and rank == 2 and "linger" in sys.argv:
        linger()
    if step == 100 and rank == 1 and "hold" in sys.argv:
        hold_the_lock()
    meet()
    time.sleep(0.01)
"""
NO_TORCH = """
import time

def serve():
    time.sleep(600)

serve()
"""
OTHER = """
import os
os.execvp("sleep", ["sleep", "600"])
"""


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "no_torch.py").write_text(NO_TORCH)
    (tmp_path / "other.py").write_text(OTHER)
    return make_local_spec(tmp_path, command=["loop.py"])


def with_ranks(spec: JobSpec, num_ranks: int, *command: str) -> JobSpec:
    return msgspec.structs.replace(spec, command=list(command), local_world_size=num_ranks, world_size=num_ranks)


def start(agent: RunningAgent, spec: JobSpec) -> NodeReport:
    """Start a job and return the first report in which all its ranks are at work."""
    agent.start_job(spec)
    return agent.wait_until(lambda report: are_at_work(report, spec.world_size), START_S, "all ranks are at work")


def are_at_work(report: NodeReport, num_ranks: int) -> bool:
    reports = [worker.report for worker in report.workers if worker.report]
    return len(reports) == num_ranks and all(any(group.enqueued_seq for group in one.groups) for one in reports)


def function_of(report: NodeReport, rank: int) -> str:
    """Return the function in which a rank stands, as its newest report has it."""
    told = next((worker.report for worker in report.workers if worker.rank == rank), None)
    return told.place.function if told and told.place else ""


def wait_for(agent: RunningAgent, *ranks: int, others: Callable[[NodeReport], bool] = lambda _: True) -> None:
    """Wait until these ranks are held up in a collective, and the others are where they stay.

    A busy machine holds ranks up as well, for a while.
    """

    def is_held_up(rank: RankReport) -> bool:
        return any(group.is_waiting and group.waiting_s > LONG_WAIT_S for group in rank.groups)

    def do_they_wait(report: NodeReport) -> bool:
        found = [worker.report for worker in report.workers if worker.rank in ranks and worker.report]
        return len(found) == len(ranks) and all(is_held_up(one) for one in found) and others(report)

    agent.wait_until(do_they_wait, STUCK_S, f"ranks {ranks} wait")


def taken(agent: RunningAgent, *, is_native: bool = False) -> Stacks:
    reply = agent.ask(GetStacks("train", is_native))
    assert isinstance(reply, Stacks), reply
    return reply


def taken_by_probes(agent: RunningAgent, *ranks: int) -> Stacks:
    """Return stacks for which the probes of these ranks have answered: a busy machine may let one miss its second."""

    def answered() -> Stacks | None:
        stacks = taken(agent)
        return stacks if all(stacks.ranks[rank].source is StackSource.PROBE for rank in ranks) else None

    stacks = until(answered, STUCK_S, f"the probes of ranks {ranks} answer")
    assert stacks is not None
    return stacks


def functions(one: RankStacks) -> list[str]:
    """Return the functions on a rank's main thread, without their classes."""
    return [frame.function.rpartition(".")[2] for frame in one.threads[0].frames]


def groups_of(stacks: Stacks) -> list[list[int]]:
    return [group.ranks for group in picture_of([NodeStacks("here", stacks)]).groups]


def test_ranks_that_wait_stand_together_behind_the_one_that_does_not(agent: RunningAgent, spec: JobSpec) -> None:
    start(agent, with_ranks(spec, 4, "loop.py", "linger"))
    wait_for(agent, 0, 1, 3, others=lambda report: function_of(report, 2) == "linger")

    stacks = taken_by_probes(agent, 0, 1, 2, 3)

    assert [one.rank for one in stacks.ranks] == [0, 1, 2, 3]
    assert {one.source for one in stacks.ranks} == {StackSource.PROBE}
    assert {one.note for one in stacks.ranks} == {""}
    assert groups_of(stacks) == [[2], [0, 1, 3]]
    lingering, waiting = stacks.ranks[2], stacks.ranks[0]
    assert functions(lingering)[:2] == ["linger", "<module>"]
    assert [frame.is_own for frame in lingering.threads[0].frames[:2]] == [True, True]
    assert lingering.pending == []
    assert functions(waiting)[-2:] == ["meet", "<module>"]
    assert not waiting.threads[0].frames[0].is_own
    assert [(call.group, call.op) for call in waiting.pending] == [("0", "all_reduce")]
    assert waiting.kernel
    assert (waiting.kernel.state, waiting.pid > 0) == ("S", True)
    path = next(agent.directory.rglob(stack_file(0)))
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_a_frozen_rank_is_seen_from_outside_and_stays_frozen(agent: RunningAgent, spec: JobSpec) -> None:
    start(agent, with_ranks(spec, 3, "loop.py"))
    assert agent.ask(InjectFault("train", FaultKind.FREEZE, 1)) == Accepted()
    wait_for(agent, 0, 2, others=lambda report: report.workers[1].process is ProcessState.FROZEN)

    usual, native = taken_by_probes(agent, 0, 2), taken(agent, is_native=True)
    for stacks in (usual, native):
        frozen = stacks.ranks[1]
        assert frozen.source is StackSource.PY_SPY
        assert frozen.note.startswith("its process is stopped")
        assert "<module>" in functions(frozen)
        assert frozen.kernel
        assert frozen.kernel.is_stopped
        assert groups_of(stacks) == [[1], [0, 2]]
        assert psutil.Process(frozen.pid).status() == psutil.STATUS_STOPPED
    assert usual.ranks[0].source is StackSource.PROBE
    assert native.ranks[0].source is StackSource.PY_SPY
    assert any(frame.is_native for frame in native.ranks[0].threads[0].frames)
    assert [call.op for call in native.ranks[0].pending] == ["all_reduce"]

    assert agent.ask(InjectFault("train", FaultKind.THAW, 1)) == Accepted()
    until(lambda: taken(agent).ranks[1].source is StackSource.PROBE, STUCK_S, "it answers again")


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreters_lock_is_seen_from_outside(agent: RunningAgent, spec: JobSpec) -> None:
    start(agent, with_ranks(spec, 2, "loop.py", "hold"))
    (printed,) = agent.directory.rglob("rank-1.stdout.log")
    # As good as in C: the print is the last that its probe could see of it.
    wait_for(agent, 0, others=lambda report: bool(printed.read_text()) and report.workers[1].report_age_s > 1.0)

    stacks = taken_by_probes(agent, 0)

    held = stacks.ranks[1]
    assert held.source is StackSource.PY_SPY
    assert held.note == "its probe has not answered in 1 s: C code may hold the interpreter's lock"
    assert functions(held)[:2] == ["hold_the_lock", "<module>"]
    assert held.threads[0].frames[0].is_own
    assert stacks.ranks[0].source is StackSource.PROBE
    assert groups_of(stacks) == [[1], [0]]
    assert 1.0 <= stacks.took_s < 10.0, "a console waits ten seconds"


@pytest.mark.slow
def test_a_program_without_torch_is_seen_from_outside(agent: RunningAgent, spec: JobSpec) -> None:
    agent.start_job(with_ranks(spec, 2, "no_torch.py"))
    agent.wait_until(lambda report: len(report.workers) == 2, START_S, "both ranks are found")

    def both_serve() -> Stacks | None:
        stacks = taken(agent)
        return stacks if all(one.threads and "serve" in functions(one) for one in stacks.ranks) else None

    stacks = until(both_serve, START_S, "both serve")

    assert stacks is not None
    assert {one.source for one in stacks.ranks} == {StackSource.PY_SPY}
    assert {one.note for one in stacks.ranks} == {"no probe listens: the rank is ending, or has not imported torch"}
    assert groups_of(stacks) == [[0, 1]]


@pytest.mark.slow
def test_a_hostile_answer_is_refused_and_the_rank_is_seen_from_outside(agent: RunningAgent, spec: JobSpec) -> None:
    start(agent, with_ranks(spec, 2, "loop.py"))
    directory = next(agent.directory.rglob("rank-1.sock")).parent
    # A directory in its place can neither be removed nor be replaced by the probe.
    (directory / stack_file(1)).mkdir()
    (directory / stack_file(1) / "x").touch()

    stacks = taken_by_probes(agent, 0)

    assert stacks.ranks[1].source is StackSource.PY_SPY
    assert stacks.ranks[1].note.startswith("its probe's answer cannot be read: rank-1.stacks.json")


@pytest.mark.slow
def test_of_a_process_that_is_no_python_the_kernel_says_something(agent: RunningAgent, spec: JobSpec) -> None:
    agent.start_job(with_ranks(spec, 1, "other.py"))
    agent.wait_until(lambda report: len(report.workers) == 1, START_S, "the rank is found")
    pid = agent.report().workers[0].pid
    until(lambda: psutil.Process(pid).name() == "sleep", START_S, "it is another program")

    (rank,) = taken(agent).ranks

    assert (rank.source, rank.threads) == (StackSource.KERNEL, [])
    assert rank.note.startswith("no probe listens: the rank is ending, or has not imported torch; py-spy: ")
    assert rank.kernel
    assert rank.kernel.state in {"R", "S"}


@pytest.mark.slow
def test_the_verb_prints_what_the_agent_answers(agent: RunningAgent, spec: JobSpec) -> None:
    unknown = agent.ask(GetStacks("nobody"))
    assert isinstance(unknown, Refused)
    assert unknown.reason is RefusalReason.UNKNOWN_JOB
    start(agent, with_ranks(spec, 2, "loop.py"))

    def sources() -> list[str]:
        done = run_agent_verb("stacks", "--dir", str(agent.directory), "--job", "train")
        assert done.returncode == 0, done.stderr
        return [one["source"] for one in json.loads(done.stdout)["ranks"]]

    until(lambda: sources() == ["probe", "probe"], STUCK_S, "both probes answer in time")
