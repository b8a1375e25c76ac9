"""Steps a second, by the nodes' clocks: however late reports come, and however long a step takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.wire.reports import decode_node_report
from app.model.cluster import Cluster
from app.model.steps import HISTORY_S, StepRate
from tests.support.sim import SimCluster


def told(*marks: tuple[float, int]) -> StepRate:
    """Return what is known after these moments of the node's clock."""
    rate = StepRate()
    for clock_s, step in marks:
        rate.put(clock_s, step)
        rate.validate()
    return rate


def test_nothing_is_known_before_two_steps_were_seen_a_second_apart() -> None:
    assert StepRate().per_s() is None
    assert told((0.0, 7), (0.5, 7), (1.0, 8)).per_s() is None
    assert told((0.0, 7), (0.5, 8), (1.0, 9)).per_s() is None
    assert told((0.0, 7), (0.5, 8), (1.0, 9), (1.5, 10)).per_s() == pytest.approx(2.0)


def test_a_gap_in_what_is_heard_is_not_a_burst_of_steps() -> None:
    steady = [(second / 2, 10 * second) for second in range(20)]
    after = [(clock_s + 30.0, step + 600) for clock_s, step in steady[:4]]

    assert told(*steady).per_s() == pytest.approx(20.0)
    for count in range(1, 5):
        assert told(*steady, *after[:count]).per_s() == pytest.approx(20.0)


def test_long_steps_have_a_rate_that_does_not_flicker() -> None:
    rate, seen = StepRate(), []
    for tick in range(400):
        rate.put(tick / 2, tick // 20)
        seen.append(rate.per_s())
    known = [value for value in seen if value is not None]

    assert len(known) > 300
    assert known == [pytest.approx(0.1, rel=0.06)] * len(known)


def test_a_rank_that_stands_falls_to_nothing_and_begins_afresh() -> None:
    moving = [(tick / 2, 5 * tick) for tick in range(20)]
    (last_s, step) = moving[-1]
    standing = [(last_s + tick / 2, step) for tick in range(1, 40)]
    rates = [told(*moving, *standing[:count]).per_s() or 0.0 for count in range(1, len(standing))]

    assert rates == sorted(rates, reverse=True)
    assert rates[int(2 * HISTORY_S) + 1] == 0.0
    again = [(standing[-1][0] + tick / 2, step + 5 * tick) for tick in range(1, 5)]
    assert told(*moving, *standing, *again[:2]).per_s() is None
    assert told(*moving, *standing, *again).per_s() == pytest.approx(10.0)


def test_a_rank_that_stands_soon_after_its_first_steps_is_known_to_stand() -> None:
    assert told((0.0, 1), (0.5, 9), (5.5, 9)).per_s() is None
    assert told((0.0, 1), (0.5, 9), (6.0, 9)).per_s() == 0.0
    assert told((0.0, 1), (60.0, 1)).per_s() is None, "its first step may take so long"


@pytest.mark.parametrize("back", [(4.0, 9), (12.0, 3)], ids=["another process", "an older checkpoint"])
def test_a_clock_or_a_step_that_goes_back_begins_a_new_history(back: tuple[float, int]) -> None:
    steady = [(second / 2, second) for second in range(20)]

    assert told(*steady, back).per_s() is None
    assert told(*steady, back, *((back[0] + n, back[1] + 3 * n) for n in (1, 2, 3))).per_s() == pytest.approx(3.0)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(-3, 40)), max_size=60))
def test_whatever_comes_the_rate_is_a_rate_and_memory_is_bounded(moves: list[tuple[float, int]]) -> None:
    rate, clock_s, step = StepRate(), 0.0, 0
    for later_s, further in moves:
        clock_s, step = clock_s + later_s, max(0, step + further)
        rate.put(clock_s, step)
        rate.validate()
        found = rate.per_s()
        assert found is None or 0.0 <= found <= 41 * len(moves)


def test_a_console_that_was_stopped_for_20_s_shows_no_burst() -> None:
    sim = SimCluster(delay_s=0.0)
    sim.run(60)
    cluster = Cluster([node.name for node in sim.nodes])
    stopped_s, woken_s = sim.heard[0][0] + 25.0, sim.heard[0][0] + 45.0
    rates = []
    for at_s, node, frame in sim.heard:
        # What comes meanwhile waits in the socket's buffer and is read in one go.
        now_s = at_s if at_s < stopped_s else max(at_s, woken_s + (at_s - stopped_s) / 100)
        cluster.apply(node, decode_node_report(frame), now_s)
        rates.append((at_s, cluster.jobs["demo"].steps_per_s(now_s)))
    before = [rate for at_s, rate in rates if stopped_s - 5.0 < at_s < stopped_s and rate is not None]
    after = [rate for at_s, rate in rates if at_s > stopped_s and rate is not None]

    assert len(after) > 50
    assert max(after) < 1.5 * max(before)


def test_the_rate_goes_on_with_those_that_are_heard_when_a_node_is_lost() -> None:
    sim = SimCluster()
    sim.run(20)
    sim.lose_node(0)
    sim.run(12)
    job = sim.view().job()

    assert job is not None
    assert job.steps_per_s == 0.0, "the ranks of the other node wait"
    sim.lose_node(1)
    sim.run(4)
    job = sim.view().job()
    assert job is not None
    assert job.steps_per_s is None


def test_a_console_that_comes_while_ranks_stand_knows_at_once_that_they_make_no_steps() -> None:
    sim = SimCluster()
    sim.run(20)
    sim.freeze(2)
    sim.run(60)
    late = Cluster([node.name for node in sim.nodes])
    for at_s, node, frame in sim.heard:
        if at_s > sim.now_s - 2:
            late.apply(node, decode_node_report(frame), at_s)

    assert late.jobs["demo"].steps_per_s(sim.now_s) == 0.0


def test_ranks_that_have_ended_make_no_steps() -> None:
    sim = SimCluster()
    sim.run(20)
    assert sim.cluster.jobs["demo"].steps_per_s(sim.now_s)
    for rank in range(sim.world_size):
        sim.kill(rank)
    sim.run(1)

    assert sim.cluster.jobs["demo"].steps_per_s(sim.now_s) is None
