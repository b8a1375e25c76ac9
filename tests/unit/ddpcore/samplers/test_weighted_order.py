"""Weighted draws: in proportion, without those of weight 0, and never from weights that make no sense."""

from __future__ import annotations

import pickle
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.order import ShuffledOrder
from ddpcore.samplers.weighted_order import WeightedOrder, drawn_by

WEIGHTS = [0.5, 0.0, 1.0, 3.0, 0.0]


def test_with_replacement_samples_come_in_proportion_to_their_weights() -> None:
    num = 90_000
    drawn = WeightedOrder(WEIGHTS, num, seed=3).indices(0, 0, num)

    shares = np.bincount(drawn, minlength=5) / num
    assert np.abs(shares - np.array(WEIGHTS) / 4.5).max() < 0.006  # four standard deviations
    assert shares[1] == shares[4] == 0


def test_the_lowest_and_the_highest_word_choose_samples_that_have_a_weight() -> None:
    words = np.array([0, 2**64 - 1], np.uint64)

    assert drawn_by(words, np.cumsum([0.0, 1.0, 0.0, 2.0, 0.0])).tolist() == [1, 3]
    assert drawn_by(words, np.cumsum([0.0, 5e-324, 0.0])).tolist() == [1, 1]


def test_draws_with_replacement_are_independent_of_their_neighbours() -> None:
    drawn = WeightedOrder([1.0, 1.0], 100_000).indices(4, 0, 100_000)

    assert abs((drawn[1:] == drawn[:-1]).mean() - 0.5) < 0.0065  # four standard deviations


def test_without_replacement_an_epoch_is_what_drawing_one_after_the_other_gives() -> None:
    weights, num_epochs = np.array([1.0, 2.0, 5.0]), 20_000
    order = WeightedOrder(weights, seed=1, replacement=False)
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(num_epochs):
        drawn = tuple(order.indices(epoch, 0, 3).tolist())
        counts[drawn] = counts.get(drawn, 0) + 1

    for drawn in permutations(range(3)):
        first, second = weights[drawn[0]], weights[drawn[1]]
        expected = first / 8 * second / (8 - first)
        assert abs(counts[drawn] / num_epochs - expected) < 4 * np.sqrt(expected / num_epochs)


def test_without_replacement_an_epoch_has_each_sample_that_has_a_weight_once() -> None:
    order = WeightedOrder(WEIGHTS, replacement=False)

    assert order.num_samples == 3
    assert sorted(order.indices(0, 0, 3).tolist()) == [0, 2, 3]
    assert len(WeightedOrder(WEIGHTS, 2, replacement=False).indices(0, 0, 2)) == 2


def test_weights_of_any_size_are_told_apart() -> None:
    tiny = WeightedOrder([5e-324, 1e300, 1e-300], replacement=False)

    assert tiny.indices(0, 0, 3).tolist() == [1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    for replacement in (True, False):
        drawn = {
            tuple(WeightedOrder(np.ones(50), seed=seed, replacement=replacement).indices(epoch, 0, 50).tolist())
            for seed in (0, 1)
            for epoch in (0, 1)
        }
        assert len(drawn) == 4


def test_it_is_dealt_out_and_resumed_like_any_order() -> None:
    order = WeightedOrder(np.arange(1, 41), num_samples=60, seed=2)
    straight = list(ElasticBatchSampler(order, 10))
    before = ElasticBatchSampler(order, 10, rank=0, num_replicas=2)
    iterator = iter(before)
    for _ in range(3):
        next(iterator)
        before.finish_step()

    shares = []
    for rank in range(3):
        after = ElasticBatchSampler(pickle.loads(pickle.dumps(order)), 10, rank=rank, num_replicas=3)
        after.load_state_dict(before.state_dict())
        shares.append(list(after))

    assert [list(chain.from_iterable(batch)) for batch in zip(*shares, strict=True)] == straight[3:]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, -1.0, -2.0], "2 weights are negative or not finite, such as -1.0 of sample 1"),
        ([1.0, float("nan")], "such as nan of sample 1"),
        ([float("inf"), 1.0], "such as inf of sample 0"),
        ([0.0, 0.0], "add up to 0.0: at least one must be above 0"),
        ([1e308, 1e308], "add up to inf"),
        ([], r"shape \(0,\)"),
        ([[1.0], [2.0]], r"shape \(2, 1\)"),
        (["heavy"], "weights are numbers, one for each sample"),
        (None, "shape|negative or not finite|numbers"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_weights_that_make_no_sense_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        WeightedOrder(weights)


def test_more_draws_without_replacement_than_samples_are_refused() -> None:
    with pytest.raises(SamplerArgumentError, match="4 draws without replacement from 3 samples with a weight above 0"):
        WeightedOrder(WEIGHTS, 4, replacement=False)
    with pytest.raises(SamplerArgumentError, match="0 samples"):
        WeightedOrder(WEIGHTS, 0)


def test_positions_beyond_the_epoch_are_refused() -> None:
    with pytest.raises(IndexError):
        WeightedOrder(WEIGHTS).indices(0, 0, 6)


def test_equal_weights_without_replacement_are_as_good_as_a_shuffle() -> None:
    order = WeightedOrder(np.ones(1000), replacement=False)

    drawn = order.indices(0, 0, 1000)

    assert sorted(drawn.tolist()) == sorted(ShuffledOrder(1000).indices(0, 0, 1000).tolist())
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.13
