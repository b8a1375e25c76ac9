"""Faults of a job that runs: they strike real ranks at once, at their next step, or at the step that is named."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.wire.commands import Accepted, InjectFault, RefusalReason, Refused
from agent.wire.jobs import JobSpec, JobState
from agent.wire.reports import ProcessState
from ddpcore.wire import DEFAULT_GROUP, FaultKind
from tests.support.agents import RunningAgent, run_agent_verb
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.wire.reports import NodeReport
    from ddpcore.wire import GroupReport, RankReport

pytestmark = pytest.mark.ranks

START_S = 60.0
END_S = 60.0
HOLD_S = 10.0
"""Of which a fifth is silence enough: the rest is for a machine that is slow to look."""

LOOP = """
import itertools, os, time
import torch, torch.distributed as dist
import ddpcore
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in itertools.count(1):
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0)
    ddpcore.report_step(step)
    time.sleep(0.01)
    if rank == 1 and os.path.exists("hold"):
        with open("held.part", "w") as held:
            held.write(str(step))
        os.rename("held.part", "held")
        while os.path.exists("hold"):
            time.sleep(0.01)
"""


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "loop.py").write_text(LOOP)
    return make_local_spec(tmp_path, command=["loop.py"])


def rank_report(report: NodeReport, rank: int = 1) -> RankReport:
    told = report.workers[rank].report
    assert told is not None
    return told


def default_group(report: NodeReport, rank: int) -> GroupReport:
    return next(group for group in rank_report(report, rank).groups if group.group == DEFAULT_GROUP)


def stepping(agent: RunningAgent, spec: JobSpec) -> None:
    """Start a job and wait until both ranks do steps."""
    agent.start_job(spec)

    def both_step(report: NodeReport) -> bool:
        reports = [worker.report for worker in report.workers if worker.report]
        return len(reports) == 2 and all((one.step or 0) > 5 for one in reports)

    agent.wait_until(both_step, START_S, "both ranks step")


@contextmanager
def held(spec: JobSpec) -> Iterator[int]:
    """Let rank 1 do no more steps meanwhile, and give the last one it has done: those after it are still to come."""
    workdir = Path(spec.workdir)
    (workdir / "held").unlink(missing_ok=True)
    (workdir / "hold").touch()
    until((workdir / "held").exists, START_S, "rank 1 holds")
    try:
        yield int((workdir / "held").read_text())
    finally:
        (workdir / "hold").unlink()


@pytest.mark.slow
def test_a_rank_holds_its_interpreter_freezes_at_a_step_and_slows_at_another(
    agent: RunningAgent, spec: JobSpec
) -> None:
    stepping(agent, spec)

    assert agent.ask(InjectFault("train", FaultKind.GIL, 1, duration_s=HOLD_S)) == Accepted()
    report = agent.wait_until(lambda report: report.workers[1].report_age_s > HOLD_S / 5, END_S, "rank 1 is silent")
    assert [worker.process for worker in report.workers] == [ProcessState.RUNNING] * 2
    agent.wait_until(lambda report: report.workers[1].report_age_s < 0.5, END_S, "rank 1 speaks again")

    with held(spec) as done:
        step = done + 20
        assert agent.ask(InjectFault("train", FaultKind.FREEZE, 1, at_step=step)) == Accepted()
    report = agent.wait_until(
        lambda report: report.workers[1].process is ProcessState.FROZEN, END_S, "rank 1 is frozen at its step"
    )
    assert rank_report(report).step == step
    refused = agent.ask(InjectFault("train", FaultKind.FREEZE, 1, at_step=step))
    assert isinstance(refused, Refused)
    assert refused.message.startswith(f"rank 1 has done step {step} already")

    assert agent.ask(InjectFault("train", FaultKind.SLOW, 1, factor=3.0, at_step=step + 50)) == Accepted()
    assert agent.ask(InjectFault("train", FaultKind.THAW, 1)) == Accepted()
    report = agent.wait_until(lambda report: rank_report(report).slow_factor == 3.0, END_S, "rank 1 is slow")
    assert (rank_report(report).step or 0) >= step + 50


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        pytest.param(FaultKind.SKIP_BARRIER, "broadcast", id="skip"),
        pytest.param(FaultKind.MISMATCH, "barrier", id="mismatch"),
    ],
)
def test_ranks_that_no_longer_call_the_same_wait_in_two_operations_at_one_seq(
    agent: RunningAgent, spec: JobSpec, kind: FaultKind, op: str
) -> None:
    stepping(agent, spec)
    with held(spec) as done:
        step = done + 20
        assert agent.ask(InjectFault("train", kind, 1, at_step=step)) == Accepted()

    def both_wait(report: NodeReport) -> bool:
        return all(default_group(report, rank).waiting_s > 1.0 for rank in (0, 1))

    report = agent.wait_until(both_wait, END_S, "both ranks wait")

    first, second = default_group(report, 0), default_group(report, 1)
    assert (first.op, second.op) == ("all_reduce", op)
    assert first.enqueued_seq == second.enqueued_seq
    assert rank_report(report).step == step


def ended(agent: RunningAgent) -> NodeReport:
    return agent.wait_until(lambda report: report.jobs[0].state is JobState.FAILED, END_S, "the job has failed")


@pytest.mark.slow
def test_a_rank_that_runs_out_of_memory_fails_with_torch_s_own_words(agent: RunningAgent, spec: JobSpec) -> None:
    stepping(agent, spec)
    done = run_agent_verb(
        *("fault", "--dir", str(agent.directory), "--job", "train", "--kind", "oom", "--rank", "1"),
    )
    assert done.returncode == 0, done.stderr

    report = ended(agent)

    cause = report.jobs[0].root_cause
    assert cause is not None
    assert cause.rank == 1
    assert "DefaultCPUAllocator: can't allocate memory" in cause.exception
    end = report.workers[1].exit
    assert end is not None
    assert end.code == 1


@pytest.mark.slow
def test_a_rank_that_leaves_ends_with_code_0_and_the_other_is_left_behind(agent: RunningAgent, spec: JobSpec) -> None:
    stepping(agent, spec)
    with held(spec) as done:
        step = done + 20
        assert agent.ask(InjectFault("train", FaultKind.LEAVE, 1, at_step=step)) == Accepted()

    report = ended(agent)

    ends = [worker.exit for worker in report.workers]
    assert ends[1] is not None
    assert (ends[1].code, ends[1].signal) == (0, None)
    assert ends[0] is not None
    assert ends[0].code != 0
    assert rank_report(report).step == step


@pytest.mark.slow
def test_a_job_that_does_not_allow_faults_lets_itself_only_be_healed(agent: RunningAgent, spec: JobSpec) -> None:
    stepping(agent, msgspec.structs.replace(spec, allow_faults=False))

    for kind in set(FaultKind) - {FaultKind.THAW}:
        refused = agent.ask(InjectFault("train", kind, 1))
        assert isinstance(refused, Refused)
        assert refused.reason is RefusalReason.NOT_PERMITTED
    assert agent.ask(InjectFault("train", FaultKind.THAW, 1)) == Accepted()
    assert agent.ask(InjectFault("train", FaultKind.SLOW, 1, factor=1.0)) == Accepted()
    done = run_agent_verb(
        *("fault", "--dir", str(agent.directory), "--job", "train", "--kind", "kill", "--rank", "1", "--at-step", "9"),
    )
    assert done.returncode == 4
    assert "job train does not allow faults: start it with" in done.stderr
    assert not agent.report().jobs[0].allow_faults
