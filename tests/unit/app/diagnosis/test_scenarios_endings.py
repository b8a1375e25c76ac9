"""The end of a hang: what stood before the ranks died is the cause, and who died of it is never blamed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.jobs import JobState
from app.diagnosis.causes import Cause, Severity
from app.recording.events import EventLog
from app.view.summary import headline_hint
from ddpcore.wire import Phase
from tests.support.long_tests import one_in
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, Call, Training, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from app.view.rows import JobRow, RootCauseRow, VerdictRow

SIGINT, SIGKILL, SIGTERM = 2, 9, 15
GLOO, NCCL = False, True
HANGS: dict[str, tuple[Callable[[SimCluster], None], Cause]] = {
    "asleep": (lambda sim: sim.slow(1, 1e5), Cause.STRAGGLER),
    "frozen": (lambda sim: sim.freeze(1), Cause.FROZEN),
    "gil": (lambda sim: sim.hold_gil(1), Cause.SILENT),
    "mismatch": (lambda sim: sim.mismatch(1, Call("broadcast", 77, "extra")), Cause.MISMATCH),
}


def job_of(sim: SimCluster) -> JobRow:
    job = sim.view().job()
    assert job is not None
    return job


def only_verdict(sim: SimCluster) -> VerdictRow:
    (verdict,) = sim.verdicts()
    return verdict


def root_cause(sim: SimCluster) -> RootCauseRow:
    cause = job_of(sim).root_cause
    assert cause is not None
    return cause


def hung(kind: str, timeout_s: float = float("inf"), *, hangs_on_death: bool = GLOO, seed: int = 0) -> SimCluster:
    sim = SimCluster(hangs_on_death=hangs_on_death, timeout_s=timeout_s, seed=seed)
    sim.run_to_step(20)
    HANGS[kind][0](sim)
    return sim


def blamed(sim: SimCluster) -> set[tuple[Cause, tuple[int, ...]]]:
    """Return every verdict that has ever stood."""
    return {(cause, culprits) for _, cause, culprits in sim.told}


@pytest.mark.parametrize("hangs_on_death", [GLOO, NCCL])
@pytest.mark.parametrize("timeout_s", one_in(2, [5.0, 20.0]))
@pytest.mark.parametrize("kind", HANGS)
def test_what_stood_before_a_time_out_is_the_cause_for_good(
    kind: str, timeout_s: float, *, hangs_on_death: bool
) -> None:
    sim = hung(kind, timeout_s, hangs_on_death=hangs_on_death)
    sim.run(timeout_s + 15)

    verdict, cause = only_verdict(sim), root_cause(sim)
    assert (verdict.cause, verdict.culprits, verdict.severity) == (HANGS[kind][1], [1], Severity.CRITICAL)
    assert (verdict.op, verdict.seq is not None) == ("broadcast" if kind == "mismatch" else "all_reduce", True)
    assert blamed(sim) == {(HANGS[kind][1], (1,))}
    assert (cause.rank, cause.text, cause.is_consequence) == (1, verdict.text, False)
    assert job_of(sim).state == "failed"
    assert f"timed out after {timeout_s:.0f}" in verdict.text.replace(".0 s", " s")


@pytest.mark.parametrize("kind", ["asleep", "frozen"])
def test_from_a_short_time_out_to_the_end_of_the_job_all_is_never_well(kind: str) -> None:
    sim = hung(kind, timeout_s=6.0)
    sim.run_until(lambda: bool(sim.cluster.jobs["demo"].has_raised.any()), within_s=8)
    seen = []
    while job_of(sim).state != "failed":
        seen.append(sim.view().headline())
        sim.run(0.1)

    assert len(seen) > 5
    assert {line.severity for line in seen} <= {Severity.WARNING, Severity.CRITICAL}
    assert not any("nobody waits" in line.text or "training" in line.text for line in seen)
    first = (
        "ranks 0, 2-3 have timed out waiting for rank 1 and are ending"
        if kind == "asleep"
        else "rank 1 on demo-0 is frozen"
    )
    assert seen[0].text.startswith(first)


@pytest.mark.parametrize("kind", HANGS)
def test_what_stood_before_a_launcher_was_told_to_end_is_the_cause(kind: str) -> None:
    for signal in (SIGTERM, SIGKILL):
        sim = hung(kind)
        sim.run(14)
        for node in (0, 1):
            sim.end_launcher(node, signal)
        sim.run(10)

        assert (only_verdict(sim).cause, only_verdict(sim).culprits) == (HANGS[kind][1], [1])
        assert root_cause(sim).rank == 1
        assert blamed(sim) == {(HANGS[kind][1], (1,))}


@pytest.mark.parametrize("signal", [SIGTERM, SIGINT, SIGKILL])
def test_ranks_that_end_with_their_launcher_are_not_blamed(signal: int) -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.end_launcher(1, signal)
    events = EventLog()
    for _ in range(75):
        sim.run(0.2)
        events.observe(sim.view())

    assert blamed(sim) == set()
    roots = [event.text for event in events.latest_first() if event.text.startswith("root cause")]
    assert [root.partition("launcher")[0] for root in roots] == ["root cause: on demo-1 the "]
    cause = root_cause(sim)
    assert (cause.rank, cause.node, cause.is_consequence) == (None, "demo-1", False)
    did = "somebody on demo-1 did it, or a memory guard" if signal == SIGKILL else "somebody on demo-1, or a scheduler"
    assert headline_hint(sim.view()).startswith(did)


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 2), (1, 2), (1, 3)])
@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_a_rank_that_destroys_its_process_group_and_works_on_is_named_not_those_that_lose_it(
    nodes: int, ranks: int, seed: int
) -> None:
    sim = SimCluster(num_nodes=nodes, ranks_per_node=ranks, seed=seed)
    sim.run_to_step(20)
    sim.close_group(0)
    sim.run(15)

    assert blamed(sim) == {(Cause.FEWER_CALLS, (0,))}
    verdict = only_verdict(sim)
    assert "worked on after step" in verdict.text
    assert "lost" in verdict.text
    assert "destroy_process_group" in verdict.hint


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_a_rank_that_somebody_ends_is_not_told_as_one_that_works_on(seed: int) -> None:
    sim = SimCluster(seed=seed)
    sim.run_to_step(20)
    sim.kill(0, signal=SIGTERM)
    sim.run(15)

    assert blamed(sim) == {(Cause.EXITED, (0,))}


def test_a_rank_that_evaluates_while_the_others_time_out_is_the_cause() -> None:
    sim = SimCluster(program=Training(eval_s=0.01, checkpoint_s=60.0, epoch_steps=30), timeout_s=20.0)
    sim.run_to_step(30)
    sim.run(30)

    verdict = only_verdict(sim)
    assert (verdict.cause, verdict.culprits, verdict.severity) == (Cause.CHECKPOINTING, [0], Severity.CRITICAL)


def test_a_rank_that_fails_by_itself_during_another_s_hang_is_the_cause() -> None:
    sim = hung("asleep")
    sim.run(15)
    assert sim.causes() == {(Cause.STRAGGLER, (1,))}
    sim.exit(2, code=1)
    sim.run(10)

    assert sim.causes() == {(Cause.EXITED, (2,))}
    assert root_cause(sim).rank == 2


def test_a_hang_that_was_over_long_before_a_death_is_not_the_cause() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.freeze(1)
    sim.run(12)
    sim.thaw(1)
    sim.run(5)
    for node in (0, 1):
        sim.end_launcher(node, SIGTERM)
    sim.run(10)

    assert sim.causes() == set()
    assert root_cause(sim).rank is None


def test_a_hang_that_a_user_stops_ends_without_a_verdict() -> None:
    sim = hung("asleep")
    sim.run(15)
    sim.stop()
    sim.run(5)

    assert sim.causes() == set()
    assert (job_of(sim).state, job_of(sim).root_cause) == ("stopped", None)


def test_a_stopped_job_of_which_a_host_could_not_be_reached_has_not_failed() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.nodes[1].is_unheard = True
    sim.nodes[0].go(JobState.STOPPING, sim.now_s)
    for rank in sim.nodes[0].ranks:
        rank.end = (None, SIGTERM, "")
    sim.run(5)
    sim.nodes[1].is_unheard = False
    sim.run(5)

    assert (job_of(sim).state, job_of(sim).root_cause) == ("stopped", None)
    assert sim.causes() == set()


def test_a_job_that_a_stop_has_not_ended_everywhere_is_said_to_run_there_still() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.nodes[0].go(JobState.STOPPED, sim.now_s)
    sim.run(1)

    headline = sim.view().headline()
    where = "was stopped on demo-0 and still runs on demo-1"
    assert headline.text == f"job demo {where}: rankdeck stop demo ends the rest"
    assert headline.severity is Severity.WARNING


def test_a_slow_rank_is_no_cause_of_a_signal_to_the_launchers() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.slow(1, 3.0)
    sim.run_until(lambda: (Cause.STRAGGLER, (1,)) in sim.causes(), 40)
    for node in (0, 1):
        sim.end_launcher(node, SIGTERM)
    sim.run(10)

    assert sim.causes() == set()


def test_ranks_that_time_out_in_good_order_are_not_told_as_early_leavers() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main")
        if rank == 1:
            yield Work(Phase.OTHER, 30, "wander", 600.0)
        yield Call("all_reduce", 90, "main")

    sim = SimCluster(program=program)
    sim.run(20)
    assert sim.causes() == {(Cause.STRAGGLER, (1,))}
    sim.exit(2, code=0)
    sim.run(10)

    assert sim.causes() == {(Cause.STRAGGLER, (1,))}


@pytest.mark.parametrize("hangs_on_death", [GLOO, NCCL])
@pytest.mark.parametrize(("stop", "told"), [(SimCluster.freeze, Cause.FROZEN), (SimCluster.hold_gil, Cause.SILENT)])
def test_a_rank_that_is_stopped_in_the_middle_of_a_hang_is_not_its_cause(
    hangs_on_death: bool, stop: Callable[[SimCluster, int], None], told: Cause
) -> None:
    sim = hung("asleep", timeout_s=60.0, hangs_on_death=hangs_on_death)
    sim.run(15)
    stop(sim, 2)
    sim.run(25)

    cause, beside = sim.verdicts()
    assert (cause.cause, cause.culprits, cause.severity) == (Cause.STRAGGLER, [1], Severity.CRITICAL)
    assert (beside.cause, beside.culprits, beside.severity) == (told, [2], Severity.WARNING)
    sim.run(30)

    assert only_verdict(sim).culprits == [1]
    assert "3 waited for it in all_reduce #21 for 1 min" in only_verdict(sim).text
