"""A rank whose program is over is named before its process has ended, and nobody else is."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from app.diagnosis.causes import Cause
from tests.support.examples import few_and_many
from tests.support.sim import SimCluster
from tests.support.sim_program import Training

SOON_S = 2.0
STEP = 20


def ending(seed: int = 0, *, hangs_on_death: bool = False, delay_s: float = 0.01, drop: float = 0.0) -> SimCluster:
    sim = SimCluster(seed=seed, hangs_on_death=hangs_on_death, delay_s=delay_s, drop=drop)
    sim.run_to_step(STEP)
    return sim


def ever_told(sim: SimCluster) -> set[tuple[Cause, tuple[int, ...]]]:
    return {(cause, culprits) for _, cause, culprits in sim.told}


@pytest.mark.parametrize("hangs_on_death", [False, True])
def test_an_exception_is_told_while_its_process_still_ends(*, hangs_on_death: bool) -> None:
    sim = ending(hangs_on_death=hangs_on_death)
    sim.fail(1, teardown_s=8.0, at_step=STEP + 5)

    sim.run_until(lambda: bool(sim.told), SOON_S, "the verdict")
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits) == (Cause.EXITED, [1])
    assert "fails after step" in verdict.text
    assert "ValueError: boom" in verdict.text
    assert "bytegpt.py:139" in verdict.text

    sim.run(14)
    (verdict,) = sim.verdicts()
    assert ever_told(sim) == {(Cause.EXITED, (1,))}
    assert "exited with code 1" in verdict.text


@pytest.mark.parametrize("code", [0, 1])
def test_a_rank_that_leaves_is_told_with_the_call_that_it_never_makes(code: int) -> None:
    sim = ending()
    sim.leave(2, teardown_s=6.0, at_step=STEP + 5, code=code)

    sim.run_until(lambda: bool(sim.told), SOON_S, "the verdict")
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.op) == (Cause.FEWER_CALLS, [2], "all_reduce")
    assert "is about to end" in verdict.text
    assert "wait for it in all_reduce" in verdict.text

    sim.run(14)
    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits) == (Cause.EXITED if code else Cause.FEWER_CALLS, [2])
    assert all(culprits == (2,) for _, culprits in ever_told(sim)), sim.told


def test_the_last_one_is_not_blamed_where_all_others_left_its_call_alone() -> None:
    sim = ending()
    for rank in (0, 2, 3):
        sim.leave(rank, teardown_s=1.0 + rank, at_step=STEP + 5)
    sim.run(20)

    assert sim.causes() == {(Cause.FEWER_CALLS, (0, 2, 3))}
    assert all(1 not in culprits for _, culprits in ever_told(sim)), sim.told


def test_ranks_that_end_well_at_different_times_are_no_alarm() -> None:
    sim = SimCluster(program=Training(num_steps=30))
    sim.run_to_step(30)
    for rank in range(4):
        sim.leave(rank, teardown_s=0.3 + 2.0 * rank)

    sim.run(15)

    assert ever_told(sim) == set()


@few_and_many(
    10,
    40,
    st.integers(0, 1000),
    st.integers(0, 3),
    st.sampled_from(["fail", "leave", "leave with 1"]),
    st.floats(0.1, 9.0),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
)
def test_however_long_processes_take_to_end_only_the_first_is_named(
    seed: int, culprit: int, how: str, teardown_s: float, hangs_on_death: bool, drop: float
) -> None:
    sim = ending(seed, hangs_on_death=hangs_on_death, drop=drop)
    if how == "fail":
        sim.fail(culprit, teardown_s, STEP + 3)
    else:
        sim.leave(culprit, teardown_s, STEP + 3, code=int(how.endswith("1")))
    sim.run(teardown_s + 16.0)

    causes = {Cause.EXITED} if how == "fail" else {Cause.FEWER_CALLS, Cause.EXITED}
    assert {culprits for _, culprits in ever_told(sim)} == {(culprit,)}, sim.told
    # Its last report may be among those that get lost: it is mute then.
    assert {cause for cause, _ in ever_told(sim)} <= causes | ({Cause.SILENT} if drop else set()), sim.told
    assert sim.verdicts()
