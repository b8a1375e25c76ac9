"""In whatever order ranks come: the last one alone learns that all are there, and the missing are known exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from ddpcore.barriers.arrivals import ARITY, Arrival, ArrivalCounter, widths

world_sizes = st.integers(1, 200) | st.sampled_from([ARITY, ARITY + 1, ARITY**2, ARITY**2 + 1, 5000])


@given(st.data(), world_sizes)
def test_the_last_to_come_is_told_so_and_until_then_the_missing_are_those_that_have_not(
    data: st.DataObject, world_size: int
) -> None:
    absent = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=5))
    present = [rank for rank in range(world_size) if rank not in absent]
    order = data.draw(st.permutations(present)) if world_size <= 200 else present[::-1]
    latecomers = data.draw(st.permutations(sorted(absent)))
    store = HashStore()
    arrival_counter = ArrivalCounter(0, world_size)

    arrivals = [ArrivalCounter(rank, world_size).arrive(store, "gate") for rank in order]
    assert set(arrivals) <= {Arrival.EARLY}
    assert list(arrival_counter.missing(store, "gate")) == sorted(absent)

    arrivals = [ArrivalCounter(rank, world_size).arrive(store, "gate") for rank in latecomers]
    assert arrivals == [Arrival.EARLY] * (len(latecomers) - 1) + [Arrival.LAST]
    assert list(arrival_counter.missing(store, "gate")) == []


@given(st.data(), st.integers(1, 200))
def test_whoever_comes_to_a_condemned_gate_learns_it(data: st.DataObject, world_size: int) -> None:
    present = data.draw(st.sets(st.integers(0, world_size - 1), max_size=world_size - 1))
    store = HashStore()
    for rank in present:
        ArrivalCounter(rank, world_size).arrive(store, "gate")
    missing = [rank for rank in range(world_size) if rank not in present]

    for _ in range(3):
        ArrivalCounter(0, world_size).mark_failed(store, "gate", missing)

    assert list(ArrivalCounter(0, world_size).missing(store, "gate")) == missing
    assert {ArrivalCounter(rank, world_size).arrive(store, "gate") for rank in missing} == {Arrival.FAILED}


@given(world_sizes, st.integers(1, 10**6))
def test_every_counter_is_deleted_by_one_rank(world_size: int, turn: int) -> None:
    keys = [key for rank in range(world_size) for key in ArrivalCounter(rank, world_size).keys_to_delete("gate", turn)]

    num_counters = sum(-(-width // ARITY) for width in widths(world_size))
    assert len(keys) == len(set(keys)) == num_counters


def test_a_job_of_16_384_ranks_has_a_counter_for_every_60_and_a_few_more() -> None:
    assert widths(16_384) == [16_384, 274, 5]
    assert list(ArrivalCounter(7, 16_384).missing(HashStore(), "gate")) == list(range(16_384))
