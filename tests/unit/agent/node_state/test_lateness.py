from __future__ import annotations

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from agent.node_state.waits import Lateness
from ddpcore.wire import WIRE_VERSION, ArrivalsReport, Phase, RankReport


def report(rank: int, tick: int, on_gpu_us: dict[int, int] | None = None, **called_us: dict[int, int]) -> RankReport:
    return RankReport(
        wire_version=WIRE_VERSION,
        rank=rank,
        local_rank=rank,
        world_size=4,
        pid=100 + rank,
        job_id="train",
        attempt=0,
        report_seq=1,
        phase=Phase.BACKWARD,
        tick=tick,
        arrivals=[
            ArrivalsReport(group[1:], [*calls], [*calls.values()], on_gpu_us=[*(on_gpu_us or {}).values()])
            for group, calls in called_us.items()
        ],
    )


def told(lateness: Lateness, rank: int) -> tuple[int, int]:
    found = lateness.of(rank)
    return (0, 0) if found is None else (found.num_compared, found.num_last)


def test_who_comes_last_is_counted_once_the_next_beat_begins() -> None:
    lateness = Lateness()
    lateness.take(report(0, 5, g0={7: 100, 8: 200}))
    lateness.take(report(1, 5, g0={7: 130, 8: 190}))
    lateness.take(report(2, 5, g0={7: 110, 8: 240}))
    assert lateness.of(0) is None

    lateness.take(report(0, 6, g0={20: 900}))

    assert told(lateness, 0) == (2, 0)
    assert told(lateness, 1) == (2, 1)
    assert told(lateness, 2) == (2, 1)


def test_once_all_have_told_there_is_nothing_to_wait_for() -> None:
    lateness = Lateness()
    for rank in range(3):
        lateness.take(report(rank, 5, g0={7: 100 + rank}))
    lateness.take(report(0, 6, g0={8: 210}))
    lateness.take(report(1, 6, g0={8: 220}))
    assert told(lateness, 2) == (1, 1), "one is awaited still"

    lateness.take(report(2, 6, g0={8: 200}))

    assert told(lateness, 2) == (2, 1)
    assert told(lateness, 1) == (2, 1)


def test_one_that_tells_no_more_is_awaited_for_a_beat_only() -> None:
    lateness = Lateness()
    for rank in range(3):
        lateness.take(report(rank, 5, g0={7: 100 + rank}))
    for tick in (6, 7):
        lateness.take(report(0, tick, g0={tick: 210}))
        lateness.take(report(1, tick, g0={tick: 220}))
    assert told(lateness, 1) == (3, 2), "the last beat's calls are compared as soon as both have told them"


def test_a_report_that_comes_again_within_its_beat_counts_once() -> None:
    lateness = Lateness()
    for _ in range(5):
        lateness.take(report(0, 5, g0={7: 100}))
        lateness.take(report(1, 5, g0={7: 130}))
    lateness.take(report(0, 6, g0={20: 900}))
    lateness.take(report(1, 5, g0={7: 130}))
    assert told(lateness, 1) == (1, 1)


def test_only_what_all_have_called_is_compared() -> None:
    lateness = Lateness()
    lateness.take(report(0, 5, g0={7: 100, 8: 200}))
    lateness.take(report(1, 5, g0={8: 210, 9: 300}))
    lateness.take(report(0, 6, g0={20: 900}))
    assert told(lateness, 1) == (1, 1)


def test_groups_are_compared_among_their_own_members() -> None:
    lateness = Lateness()
    lateness.take(report(0, 5, g0={7: 100}, g1={3: 10}))
    lateness.take(report(1, 5, g0={7: 130}))
    lateness.take(report(2, 5, g0={7: 90}, g1={3: 20}))
    lateness.take(report(3, 5, g9={1: 5}))
    lateness.take(report(0, 6, g0={20: 900}))
    assert told(lateness, 2) == (2, 1)
    assert told(lateness, 1) == (1, 1)
    assert told(lateness, 3) == (0, 0)


def test_two_that_come_together_are_not_last() -> None:
    lateness = Lateness()
    lateness.take(report(0, 5, g0={7: 100}))
    lateness.take(report(1, 5, g0={7: 100}))
    lateness.take(report(0, 6, g0={20: 900}))
    assert told(lateness, 0) == told(lateness, 1) == (1, 0)


def test_calls_that_are_told_again_at_the_next_beat_count_once() -> None:
    lateness = Lateness()
    for tick in range(5, 9):
        lateness.take(report(0, tick, g0={7: 100, 8: 200}))
        lateness.take(report(1, tick, g0={7: 130, 8: 260}))
    assert told(lateness, 1) == (2, 2)


def test_a_clock_that_is_set_back_begins_anew_and_a_lead_of_years_is_nobody_s() -> None:
    lateness = Lateness()
    for seq, tick in enumerate((900, 100, 101)):
        lateness.take(report(0, tick, g0={seq + 1: 100}))
        lateness.take(report(1, tick, g0={seq + 1: 130 if tick == 100 else 2**63 - 1}))
    lateness.take(report(0, 102, g0={999: 1}))
    assert told(lateness, 1) == (3, 1)


def test_a_group_that_was_made_anew_is_compared_from_its_first_call_on() -> None:
    lateness = Lateness()
    for tick, seq in enumerate((1298, 1299, 1, 2, 3)):
        lateness.take(report(0, tick, g0={seq: 100}))
        lateness.take(report(1, tick, g0={seq: 130}))
    lateness.take(report(0, 9, g0={999: 1}))
    assert told(lateness, 1) == (5, 5)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(0, 4),
            st.dictionaries(st.integers(0, 6), st.integers(0, 2**63 - 1), max_size=5),
        ),
        max_size=40,
    )
)
def test_whatever_ranks_say_the_counts_hold_together(said: list[tuple[int, int, dict[int, int]]]) -> None:
    lateness = Lateness()
    for rank, tick, calls in said:
        lateness.take(report(rank, tick, g0=calls))
    found = [lateness.of(rank) for rank in range(4)]
    known = [one for one in found if one is not None]
    assert all(one.num_last <= one.num_compared for one in known)
    assert sum(one.num_last for one in known) <= max((one.num_compared for one in known), default=0) * 4


def test_a_rank_that_passes_a_broadcast_waits_in_the_next_collective_alone() -> None:
    lateness = Lateness()
    calls = {seq: 100_000 * seq for seq in range(1, 40)}
    for rank, late_us in ((0, 0), (1, 60_000)):
        told = report(rank, 5, g0={seq: called_us + late_us for seq, called_us in calls.items()})
        one_way = [msgspec.structs.replace(told.arrivals[0], one_way_seqs=[seq for seq in calls if seq % 2])]
        lateness.take(msgspec.structs.replace(told, arrivals=one_way))
    lateness.take(report(0, 6, g0={41: 100}))

    found = lateness.of(0)
    assert found is not None
    assert found.waited_s == pytest.approx(0.06 / 0.2 * found.spanned_s, rel=0.1)


@pytest.mark.parametrize("is_timed", [False, True])
def test_a_slow_gpu_is_late_though_all_threads_call_at_one_time(*, is_timed: bool) -> None:
    lateness = Lateness()
    for tick in range(1, 9):
        for rank in range(4):
            called_us = {seq: 1_000_000_000 + 100_000 * seq + rank for seq in range(10 * tick, 10 * tick + 10)}
            on_gpu_us = dict.fromkeys(called_us, 100 if rank == 2 else 30_000) if is_timed else None
            lateness.take(report(rank, tick, on_gpu_us, g0=called_us))

    found = [one for rank in range(4) if (one := lateness.of(rank)) is not None]
    waited = [one.waited_s / one.spanned_s for one in found]
    if is_timed:
        assert [one.num_last > 0 for one in found] == [False, False, True, False]
        assert waited == pytest.approx([0.299, 0.299, 0.0, 0.299], abs=0.01)
    else:
        assert max(waited) < 0.001
