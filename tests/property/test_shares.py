"""Shares are whole, in proportion, and as even as memory allows, for any numbers."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.shares import RankMemory, fit_memory, loss_factor, split, suggest_weights

WEIGHTS = st.lists(st.integers(0, 10**6), min_size=1, max_size=20).filter(any)
MEMORIES = st.lists(
    st.builds(RankMemory, st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**4).map(float)),
    min_size=1,
    max_size=6,
)


@given(st.integers(0, 10**15), WEIGHTS)
def test_shares_are_whole_and_less_than_one_from_their_proportion(num: int, weights: list[int]) -> None:
    bounds = split(num, weights)

    assert bounds[0] == 0
    assert bounds[-1] == num
    for (begin, end), weight in zip(pairwise(bounds), weights, strict=True):
        assert abs(end - begin - Fraction(num * weight, sum(weights))) < 1


@given(WEIGHTS)
def test_weights_that_add_up_to_the_batch_are_the_shares(weights: list[int]) -> None:
    bounds = split(sum(weights), weights)

    assert [end - begin for begin, end in pairwise(bounds)] == weights


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_equal_shares_differ_by_one_at_most_and_begin_where_evaluation_says(num: int, num_ranks: int) -> None:
    bounds = split(num, [1] * num_ranks)

    assert bounds == [num * rank // num_ranks for rank in range(num_ranks + 1)]
    sizes = {end - begin for begin, end in pairwise(bounds)}
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=40), WEIGHTS)
def test_the_ranks_mean_of_weighted_losses_is_the_loss_of_the_batch(losses: list[float], weights: list[int]) -> None:
    bounds = split(len(losses), weights)

    of_ranks = []
    for begin, end in pairwise(bounds):
        share = losses[begin:end] or losses[:1]
        of_ranks.append(loss_factor(end - begin, len(losses), len(weights)) * sum(share) / len(share))

    assert sum(of_ranks) / len(weights) == pytest.approx(sum(losses) / len(losses), abs=1e-12)


@given(MEMORIES, st.integers(1, 60), st.data())
def test_suggested_shares_fit_and_no_sample_would_be_done_sooner_elsewhere(
    memory: list[RankMemory], batch: int, data: st.DataObject
) -> None:
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=len(memory), max_size=len(memory)))
    rooms = [
        int((rank.capacity_bytes - rank.fixed_bytes) // rank.bytes_per_sample)
        if rank.bytes_per_sample and rank.capacity_bytes >= rank.fixed_bytes
        else batch * (rank.capacity_bytes >= rank.fixed_bytes)
        for rank in memory
    ]
    if sum(min(room, batch) for room in rooms) < batch:
        with pytest.raises(SamplerArgumentError, match="does not fit"):
            suggest_weights(memory, batch, speeds=speeds, reserve_frac=0.0)
        return

    weights = suggest_weights(memory, batch, speeds=speeds, reserve_frac=0.0)

    assert sum(weights) == batch
    slowest_s = max(weight / speed for weight, speed in zip(weights, speeds, strict=True))
    for weight, room, speed in zip(weights, rooms, speeds, strict=True):
        assert 0 <= weight <= room
        # Where one more sample would fit, it would take at least as long as the slowest rank takes now.
        assert weight == room or (weight + 1) / speed >= slowest_s


@given(st.integers(1, 10**12), st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 64), st.integers(1, 64))
def test_memory_is_read_off_two_measured_peaks(
    capacity_bytes: int, fixed_bytes: int, bytes_per_sample: int, few: int, more: int
) -> None:
    assume(few + more <= 64)
    peaks = [(num, fixed_bytes + num * bytes_per_sample) for num in (few, few + more)]

    memory = fit_memory(capacity_bytes, *peaks)

    assert memory == RankMemory(capacity_bytes, fixed_bytes, bytes_per_sample)
