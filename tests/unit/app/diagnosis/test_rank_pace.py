"""How ranks spend their time: shares, costs, and the order in which they are shown."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.rank_facts import STATES
from app.diagnosis.rank_pace import (
    MIN_COMPARED,
    MIN_OBSERVED_S,
    NUM_SAMPLED_ROWS,
    PHASES,
    SAMPLES_HZ,
    Recent,
    chance_frac,
    habit_of,
    lost_time,
    rank_pace,
)
from app.diagnosis.slow_ranks import MIN_COST
from app.text import percent_text
from ddpcore.wire import Phase
from tests.support.sim import SimCluster
from tests.support.sim_program import Call

if TYPE_CHECKING:
    from collections.abc import Callable


def window(waited: list[float], observed_s: float = 10.0, compared: float = 100.0) -> np.ndarray:
    """Return a window in which each rank waits some seconds, goes forward in the rest, and comes last to none."""
    made = np.zeros((4 + len(PHASES), len(waited)), np.float32)
    made[0], made[1], made[2] = observed_s, waited, compared
    made[4 + PHASES.index(Phase.FORWARD)] = observed_s - np.array(waited)
    return made


@given(st.lists(st.floats(0, 10, width=32), min_size=2, max_size=9))
def test_a_rank_costs_what_the_others_in_the_middle_wait_more(waited: list[float]) -> None:
    pace = rank_pace(window(waited), 12.0)
    for rank, own in enumerate(waited):
        others = [share for other, share in enumerate(waited) if other != rank]
        assert math.isclose(pace.cost_frac[rank], max(0.0, (np.median(others) - own) / 10), abs_tol=1e-5)
        assert math.isclose(pace.wait_frac[rank] + pace.phase_frac[:, rank].sum(), 1.0, abs_tol=1e-5)
    order = pace.slowest_first().tolist()
    assert sorted(order) == list(range(len(waited)))
    costs = pace.cost_frac[order]
    assert (np.diff(costs) <= 0.05 + 1e-6).all(), "but for what sampling moves, the costliest come first"


def test_of_a_rank_that_was_hardly_observed_nothing_is_said() -> None:
    made = window([1.0, 5.0, 5.0])
    made[0, 0] = MIN_OBSERVED_S / 2
    made[2, 1] = MIN_COMPARED / 2
    pace = rank_pace(made, 12.0)
    assert np.isnan([pace.wait_frac[0], pace.cost_frac[0], pace.last_frac[0]]).all()
    assert np.isnan(pace.phase_frac[:, 0]).all()
    assert np.isnan(pace.last_frac[1]), "few collectives may have the same last rank by chance"
    assert pace.last_frac[2] == 0.0
    assert pace.slowest_first().tolist() == [1, 2]
    assert pace.usual_frac[PHASES.index(Phase.FORWARD)] == 0.5


def test_alone_nobody_costs_anybody_anything() -> None:
    pace = rank_pace(window([3.0]), 12.0)
    assert np.isnan(pace.cost_frac).all()
    assert pace.slowest_first().tolist() == []
    assert rank_pace(np.zeros((4 + len(PHASES), 3), np.float32), 0.0).usual_frac.tolist() == [0.0] * len(PHASES)


def test_chance_does_less_the_longer_one_looks() -> None:
    short, long = (float(chance_frac(np.array(0.3), observed_s)) for observed_s in (10.0, 40.0))
    assert 0.2 < short < 0.25
    assert math.isclose(long, short / 2, rel_tol=0.01)


@pytest.mark.parametrize(
    ("num_samples", "in_phase", "is_habit"),
    [(24, {Phase.FORWARD: (2, 0)}, False), (240, {Phase.FORWARD: (20, 0)}, True), (24, {Phase.DATA: (11, 3)}, True)],
)
def test_a_habit_is_more_than_a_few_samples(
    num_samples: int, in_phase: dict[Phase, tuple[int, int]], *, is_habit: bool
) -> None:
    whole = np.zeros((NUM_SAMPLED_ROWS, 4), np.float32)
    whole[0] = num_samples / SAMPLES_HZ
    for phase, (own, others) in in_phase.items():
        whole[4 + PHASES.index(phase)] = np.array([others, others, own, others]) / SAMPLES_HZ

    habit = habit_of(whole, [2])

    assert (habit is not None) is is_habit
    assert habit is None or habit.phase in in_phase


def test_a_slow_rank_is_the_first_row_and_a_sentence_says_what_it_costs() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(400)
    before = sim.view().pace
    assert before is not None
    assert before.summary().severity is Severity.OK
    assert before.summary().text.startswith("nobody holds the others up: a typical rank waits ")

    sim.slow(6, 3.0)
    sim.run(20)

    pace = sim.view().pace
    assert pace is not None
    summary, (first, *others) = pace.summary(), pace.rows(range(8))
    assert (summary.severity, summary.num_rows) == (Severity.WARNING, 8)
    assert summary.text.startswith("rank 6 costs the others ")
    assert (first.rank, first.node, first.severity) == (6, "demo-1", Severity.WARNING)
    assert {row.severity for row in others} == {Severity.OK}
    assert first.cost_frac is not None
    assert first.cost_frac > 0.4
    assert first.last_frac is not None
    assert first.last_frac > 0.9
    assert "backward" in first.more_of
    assert first.where.startswith("bytegpt.py:")
    assert summary.phases[:4] == ["data", "forward", "backward", "optimizer"]
    assert all(sum(row.phases.values()) + (row.wait_frac or 0) < 1.0 + 1e-6 for row in (first, *others))
    assert sim.causes() == {(Cause.STRAGGLER, (6,))}


HOLDS, BEFORE = r"rank 3 holds the others up for 1\d s now", "before this, nobody held the others up"


@pytest.mark.parametrize(
    ("strike", "severity", "text"),
    [
        pytest.param(lambda sim: sim.freeze(3), Severity.CRITICAL, HOLDS, id="frozen"),
        pytest.param(lambda sim: sim.hold_gil(3), Severity.CRITICAL, HOLDS, id="silent"),
        pytest.param(lambda sim: sim.lose_node(1), Severity.QUIET, BEFORE, id="node lost"),
        pytest.param(lambda sim: sim.cut_network(), Severity.QUIET, BEFORE, id="network"),
        pytest.param(
            lambda sim: sim.mismatch(3, Call("broadcast", 99, "f", sizes=((10,),))),
            *(Severity.QUIET, BEFORE),
            id="mismatch",
        ),
        pytest.param(
            lambda sim: sim.exit(3),
            *(Severity.QUIET, rf"{BEFORE}: a typical rank waited \d+ % of the time"),
            id="left early",
        ),
    ],
)
def test_nobody_holds_the_others_up_is_not_said_in_a_hang(
    strike: Callable[[SimCluster], None], severity: Severity, text: str
) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(400)
    strike(sim)
    sim.run(15)

    view = sim.view()
    assert view.headline().severity is Severity.CRITICAL
    assert view.pace is not None
    summary = view.pace.summary()
    assert summary.severity is severity
    assert re.fullmatch(text, summary.text)


def test_what_slow_ranks_cost_is_one_figure_in_verdict_sentence_and_row() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(400)
    for slow, culprits in ((5, (5,)), (6, (5, 6))):
        sim.slow(slow, 2.5)
        sim.run(25)
        for _ in range(8):
            sim.run(0.5)
            (verdict,), view = sim.diagnosis.verdicts, sim.view()
            assert verdict.culprits == culprits
            assert view.pace is not None
            costs = [row.cost_frac or 0.0 for row in view.pace.rows(range(8))]
            assert max(costs) == costs[0] == verdict.cost_frac
            assert len(culprits) > 1 or view.pace.rows([0])[0].last_frac == verdict.last_frac
            cost = percent_text(verdict.cost_frac)
            assert f" the others {cost} of the step time" in view.pace.summary().text
            assert f" the others about {cost} of the step time" in view.headline().text


def test_a_running_rank_that_a_verdict_names_as_slow_is_slow_until_the_verdict_is_over() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(400)
    sim.slow(6, 3.0)
    sim.run_until(lambda: bool(sim.verdicts()), 40, "a verdict")
    seen = {rank: set[str]() for rank in range(8)}
    for _ in range(20):
        sim.run(0.1)
        table = sim.view().rank_table
        assert table is not None
        for row in sim.view().ranks():
            seen[row.rank].add(row.state)
            assert STATES[table.states[row.rank]] is row.state
            assert row.state is not RankState.SLOW or row.severity is Severity.WARNING
    assert RankState.SLOW in seen.pop(6) <= {RankState.SLOW, RankState.WAITING}
    assert set().union(*seen.values()) <= {RankState.RUNNING, RankState.WAITING}

    sim.slow(6, 1.0)
    sim.run_until(lambda: not sim.verdicts(), 40, "no verdict")
    assert RankState.SLOW not in {row.state for row in sim.view().ranks()}


def test_a_rank_that_waits_less_without_a_verdict_is_told_as_that() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(400)
    sim.slow(6, 3.0)

    def is_told() -> bool:
        pace = sim.view().pace
        return pace is not None and pace.summary().text.startswith("rank 6 waits ")

    sim.run_until(is_told, 10, "it is told before there is a verdict")
    pace = sim.view().pace
    assert pace is not None
    assert sim.causes() == set()
    assert pace.summary().severity is Severity.OK
    assert pace.summary().text.endswith(" less than the others: not long or not surely enough for a verdict")
    assert pace.rows([0])[0].rank == 6
    assert (pace.rows([0])[0].cost_frac or 0.0) > MIN_COST


def test_before_there_is_a_job_there_is_no_pace_and_before_it_trains_nothing_to_say() -> None:
    sim = SimCluster()
    sim.run(0.3)
    pace = sim.view().pace
    assert pace is None or pace.summary().num_rows == 0
    sim.run(2)
    pace = sim.view().pace
    assert pace is not None
    assert pace.summary().text == "not enough undisturbed training has been seen yet"
    assert pace.rows(range(10)) == []


def test_nodes_that_report_their_steps_at_different_times_are_compared_all_the_same() -> None:
    num_slots, slot_s, waits = 12, 1.2, np.array([0.4, 0.4, 0.0])
    steps = np.zeros((2, num_slots, 3))
    steps[0, 0::2, 0] = steps[0, 1::2, 1:] = 2 * slot_s  # each node every other slot, not all in the same
    steps[1] = steps[0] * waits
    samples = np.broadcast_to(np.array([np.full(3, slot_s), waits * slot_s])[:, None], (2, num_slots, 3))
    whole_s = num_slots * slot_s
    lateness = [np.full(3, whole_s), np.zeros(3), np.zeros(3), np.full(3, 40.0), *steps.sum(axis=1)]
    total = np.array([np.full(3, whole_s), waits * whole_s, np.zeros(3), np.zeros(3), *lateness])

    recent = Recent(total.astype(np.float32), steps.astype(np.float32), samples.astype(np.float32))
    lost = lost_time(recent, np.arange(3))

    assert lost is not None
    assert lost.by_calls == pytest.approx([0.4, 0.4, 0.0], abs=0.01)
    assert lost.node_doubt < 0.1
