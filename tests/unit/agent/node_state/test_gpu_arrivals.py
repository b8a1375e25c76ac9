"""When ranks come to collectives on their GPUs, from how long each GPU is in them."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from agent.node_state.gpu_arrivals import GpuArrivals, Key


def placed(calls: dict[Key, dict[int, int]], lasted: dict[Key, dict[int, int]]) -> dict[Key, dict[int, int]]:
    GpuArrivals().place(calls, lasted)
    return calls


def test_the_gpu_that_was_in_a_call_for_the_shortest_time_came_last_however_early_its_thread_called() -> None:
    calls = placed({("0", 7): {0: 100, 1: 90, 2: 95}}, {("0", 7): {0: 5_000, 1: 40, 2: 4_000}})
    assert calls == {("0", 7): {0: 100, 1: 5_060, 2: 1_100}}


def test_calls_of_one_group_follow_each_other_and_those_of_two_do_not() -> None:
    calls: dict[Key, dict[int, int]] = {("0", 7): {0: 100}, ("0", 8): {0: 101}, ("1", 3): {0: 102}}
    placed(calls, {("0", 7): {0: 900}, ("0", 8): {0: 50}, ("1", 3): {0: 10}})
    assert calls == {("0", 7): {0: 100}, ("0", 8): {0: 1_000}, ("1", 3): {0: 102}}


def test_a_call_keeps_its_place_where_the_time_of_one_gpu_is_not_known() -> None:
    assert placed({("0", 7): {0: 100, 1: 90}}, {("0", 7): {0: 5_000}}) == {("0", 7): {0: 100, 1: 90}}


def test_a_call_that_a_ring_shows_again_keeps_its_time() -> None:
    arrivals = GpuArrivals()
    earlier: dict[Key, dict[int, int]] = {("0", 7): {0: 100, 1: 100}, ("0", 8): {0: 110, 1: 111}}
    lasted = {("0", 7): {0: 400, 1: 10}, ("0", 8): {0: 5, 1: 90}}
    arrivals.place(earlier, lasted)
    again: dict[Key, dict[int, int]] = {("0", 8): {0: 110, 1: 111}}
    arrivals.place(again, {("0", 8): lasted["0", 8]})
    assert again["0", 8] == earlier["0", 8]


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), min_size=3, max_size=3)),
        min_size=1,
        max_size=20,
    )
)
def test_no_gpu_comes_to_a_call_before_the_one_before_it_is_over(given_calls: list[tuple[int, list[int]]]) -> None:
    ordered = sorted(called_us for called_us, _ in given_calls)
    calls: dict[Key, dict[int, int]] = {("0", seq): dict.fromkeys(range(3), at) for seq, at in enumerate(ordered)}
    lasted: dict[Key, dict[int, int]] = {
        ("0", seq): dict(enumerate(for_us)) for seq, (_, for_us) in enumerate(given_calls)
    }
    placed(calls, lasted)
    end_us = 0
    for key, by_rank in sorted(calls.items()):
        ends = {by_rank[rank] + lasted[key][rank] for rank in by_rank}
        assert len(ends) == 1
        assert min(by_rank.values()) >= end_us
        end_us = ends.pop()
