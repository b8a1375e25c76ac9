"""What a rank waits, from when it and the node's last rank have called what; microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent.node_state.waits import Call, CallWaits, Waited

if TYPE_CHECKING:
    from collections.abc import Sequence

MS = 1000
STEP = 300 * MS


def counted(
    calls: Sequence[tuple[int, int | None] | tuple[int, int | None, bool]],
    step_ends_us: list[int] | None = None,
    *,
    overlap_frac: float = 0.0,
) -> Waited:
    waits = CallWaits()
    waits.take([Call(*call) for call in calls], step_ends_us or [], overlap_frac)
    return waits.total


def steps(num_steps: int, lags_ms: list[int], apart_ms: int) -> tuple[list[tuple[int, int | None]], list[int]]:
    """Return calls and ends of steps that begin every `STEP`, with calls `apart_ms` apart that the last one lags."""
    calls: list[tuple[int, int | None]] = []
    for step in range(num_steps):
        first_us = step * STEP + 50 * MS
        calls += [
            (first_us + place * apart_ms * MS, first_us + (place * apart_ms + lag_ms) * MS)
            for place, lag_ms in enumerate(lags_ms)
        ]
    return calls, [(step + 1) * STEP - MS for step in range(num_steps)]


def test_a_rank_waits_from_its_call_to_the_last_one_of_the_node() -> None:
    total = counted(steps(11, [60], 0)[0])
    assert total.waited_s == pytest.approx(10 * 0.06)
    assert total.spanned_s == pytest.approx(10 * 0.3)
    assert total.num_pieces == 10
    assert total.squared_s2 == pytest.approx(10 * 0.06**2)


def test_one_that_has_called_the_next_collective_did_not_wait_for_this_one() -> None:
    total = counted(steps(11, [60, 60, 60], 10)[0])
    assert total.waited_s == pytest.approx(10 * 0.06)


def test_each_collective_that_is_waited_in_counts() -> None:
    total = counted(steps(11, [20, 20, 20], 50)[0])
    assert total.waited_s == pytest.approx(10 * 0.06)


def test_a_lead_that_lasts_from_a_broadcast_to_the_next_collective_was_waited_for_there() -> None:
    calls = [(*call, place % 2 == 0) for place, call in enumerate(steps(11, [40, 40], 80)[0])]
    assert counted(calls).waited_s == pytest.approx(10 * 0.04, abs=0.01)
    held_up = [(*call, place % 2 == 0) for place, call in enumerate(steps(11, [40, 10], 80)[0])]
    assert counted(held_up).waited_s == pytest.approx(10 * 0.04, abs=0.01)


def test_where_all_goes_one_way_each_rank_waits_for_its_source() -> None:
    calls = [(*call, True) for call in steps(11, [40], 0)[0]]
    assert counted(calls).waited_s == pytest.approx(10 * 0.04)


def test_behind_backward_only_the_last_reduction_of_a_step_holds_the_rank_up() -> None:
    calls, ends = steps(11, [20, 30, 40], 50)
    # What is left of the first step is no step.
    assert counted(calls, ends, overlap_frac=1.0).waited_s == pytest.approx(9 * 0.04)
    assert counted(calls, [], overlap_frac=1.0).waited_s == pytest.approx(10 * 0.09, abs=0.05)


def test_a_lead_that_is_lost_within_a_step_was_waited_for() -> None:
    calls, ends = steps(11, [60, 1, 1], 70)
    assert counted(calls, ends, overlap_frac=1.0).waited_s == pytest.approx(9 * 0.06, abs=0.001)


def test_from_the_last_call_of_the_node_to_the_end_of_the_step_other_nodes_are_waited_for() -> None:
    calls, ends = steps(11, [60], 0)
    total = counted(calls, ends)
    assert total.stepped_s == pytest.approx(9 * 0.3)
    assert total.beyond_s == pytest.approx(9 * (0.3 - 0.001 - 0.05 - 0.06))


def test_between_calls_in_a_row_the_node_waits_for_others_as_much_as_it_does_not_work() -> None:
    calls, ends = steps(11, [60, 60], 40)
    burst_s = 0.04
    waiting, half, working = (counted(calls, ends, overlap_frac=frac) for frac in (0.0, 0.5, 1.0))
    assert waiting.stepped_s == half.stepped_s == working.stepped_s == pytest.approx(9 * 0.3)
    assert waiting.beyond_s - working.beyond_s == pytest.approx(9 * burst_s)
    assert waiting.beyond_s - half.beyond_s == pytest.approx(9 * burst_s / 2)


def test_calls_that_are_told_again_count_once() -> None:
    calls = [Call(*call) for call in steps(30, [60], 0)[0]]
    run_parallel, again = CallWaits(), CallWaits()
    run_parallel.take(calls, [])
    for newest in range(1, 31):
        again.take(calls[max(0, newest - 8) : newest], [])
    assert again.total == run_parallel.total


def test_what_is_not_known_of_a_call_is_not_counted() -> None:
    assert counted([(0, 0), (STEP, None), (2 * STEP, 2 * STEP), (3 * STEP, 3 * STEP)]).spanned_s == pytest.approx(0.6)


moments = st.integers(0, 2**63 - 1)


@given(
    st.lists(
        st.tuples(st.lists(st.tuples(moments, st.none() | moments)), st.lists(moments), st.floats(0.0, 1.0)), max_size=5
    )
)
def test_whatever_ranks_say_the_parts_are_no_more_than_the_whole(
    beats: list[tuple[list[tuple[int, int | None]], list[int], float]],
) -> None:
    waits = CallWaits()
    for calls, ends, overlap_frac in beats:
        told = [Call(at_us, None if last_us is None else max(at_us, last_us)) for at_us, last_us in calls]
        told.sort(key=lambda call: call.called_us)
        waits.take(told, ends, overlap_frac)
        total = waits.total
        assert 0.0 <= total.waited_s <= total.spanned_s * (1 + 1e-9)
        assert 0.0 <= total.beyond_s <= total.stepped_s * (1 + 1e-9)
        assert total.squared_s2 >= 0.0
