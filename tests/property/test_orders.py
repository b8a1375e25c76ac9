"""Whatever the length, seed and epoch: an order is a permutation, and any part of it can be asked for alone."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from ddpcore.samplers.length_order import LengthGroupedOrder
from ddpcore.samplers.order import MAX_NUM_SAMPLES, ShuffledOrder
from ddpcore.samplers.weighted_order import WeightedOrder

SEEDS = st.integers(0, 2**64 - 1)
EPOCHS = st.integers(0, 2**40)
MASK_64 = 2**64 - 1


def splitmix64(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK_64
    return state ^ (state >> 31)


def xm8_v1(num_samples: int, seed: int, epoch: int, position: int) -> int:
    """Return one sample by the definition alone, in Python's integers."""
    key = 0
    for word in (seed, epoch, num_samples):
        key = splitmix64(((key ^ word) + 0x9E3779B97F4A7C15) & MASK_64)
    words = [splitmix64((key + number * 0x9E3779B97F4A7C15) & MASK_64) for number in range(1, 17)]
    num_bits = (num_samples - 1).bit_length()
    value = position
    while True:
        for factor, addend in zip(words[::2], words[1::2], strict=True):
            value = (value * (factor | 1) + addend) % 2**num_bits
            value ^= value >> ((num_bits + 1) // 2)
        if value < num_samples:
            return value


@given(st.integers(1, 3000), SEEDS, EPOCHS)
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    samples = ShuffledOrder(num_samples, seed).indices(epoch, 0, num_samples)

    assert sorted(samples.tolist()) == list(range(num_samples))


@given(st.integers(1, MAX_NUM_SAMPLES), SEEDS, EPOCHS, st.data())
def test_of_any_number_of_samples_different_positions_have_different_ones(
    num_samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1, max_size=50))

    samples = ShuffledOrder(num_samples, seed).take(epoch, np.array(sorted(positions), np.int64)).tolist()

    assert len(set(samples)) == len(positions)
    assert all(0 <= sample < num_samples for sample in samples)


@given(st.integers(1, MAX_NUM_SAMPLES), SEEDS, EPOCHS, st.data())
def test_every_sample_is_what_the_definition_says(num_samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, num_samples - 1))

    sample = ShuffledOrder(num_samples, seed).indices(epoch, position, position + 1).tolist()

    assert sample == [xm8_v1(num_samples, seed, epoch, position)]


@settings(max_examples=30)
@given(st.integers(1, 100_000), SEEDS, EPOCHS, st.data())
def test_an_epoch_can_be_cut_anywhere(num_samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = ShuffledOrder(num_samples, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, num_samples), max_size=4)))

    parts = [order.indices(epoch, begin, end) for begin, end in zip([0, *cuts], [*cuts, num_samples], strict=True)]

    assert np.array_equal(np.concatenate(parts), order.indices(epoch, 0, num_samples))


@given(st.integers(30, 3000), SEEDS, EPOCHS)
def test_the_next_epoch_is_another(num_samples: int, seed: int, epoch: int) -> None:
    order = ShuffledOrder(num_samples, seed)

    assert not np.array_equal(order.indices(epoch, 0, num_samples), order.indices(epoch + 1, 0, num_samples))


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=300),
    SEEDS,
    EPOCHS,
    st.integers(1, 20),
    st.integers(1, 6),
    st.data(),
)
def test_grouping_by_length_loses_and_repeats_nothing_and_can_be_cut_anywhere(
    lengths: list[int], seed: int, epoch: int, batch_size: int, num_batches: int, data: st.DataObject
) -> None:
    order = LengthGroupedOrder(lengths, batch_size, seed, num_batches)
    cut = data.draw(st.integers(0, len(lengths)))

    samples = order.indices(epoch, 0, len(lengths)).tolist()

    assert sorted(samples) == list(range(len(lengths)))
    anew = LengthGroupedOrder(lengths, batch_size, seed, num_batches)
    assert [*anew.indices(epoch, cut, len(lengths)), *anew.indices(epoch, 0, cut)] == samples[cut:] + samples[:cut]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50).filter(any), SEEDS, EPOCHS, st.booleans(), st.data())
def test_weighted_draws_are_of_samples_with_weight_and_can_be_cut_anywhere(
    weights: list[float], seed: int, epoch: int, replacement: bool, data: st.DataObject
) -> None:
    order = WeightedOrder(weights, seed=seed, replacement=replacement)
    cut = data.draw(st.integers(0, order.num_samples))

    samples = order.indices(epoch, 0, order.num_samples).tolist()

    assert all(weights[sample] > 0 for sample in samples)
    assert replacement or len(set(samples)) == len(samples)
    anew = WeightedOrder(weights, seed=seed, replacement=replacement)
    assert [*anew.indices(epoch, cut, anew.num_samples), *anew.indices(epoch, 0, cut)] == samples[cut:] + samples[:cut]
