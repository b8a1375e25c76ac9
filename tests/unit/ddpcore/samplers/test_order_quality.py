"""Is the shuffled order random? Each statistic is a z-score: within a few units for a random permutation.

The same measures must condemn permutations that are bad, or they would prove nothing: an affine one, and the order's
own construction with two rounds in place of eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations

import numpy as np
import numpy.typing as npt
import pytest

from ddpcore.samplers.order import ShuffledOrder, _rounds, _scramble

Permutation = npt.NDArray[np.int64]
Shuffle = Callable[[int, int], Permutation]
"""From a length and an epoch to a permutation."""

HIGHEST_Z = 4.5
"""Of some dozen statistics: one in 10,000 sound permutations would be above it."""

NUM_EPOCHS = 40


def by_numpy(num: int, epoch: int) -> Permutation:
    return np.random.default_rng([num, epoch]).permutation(num)


def by_order(num: int, epoch: int) -> Permutation:
    return ShuffledOrder(num, seed=20).indices(epoch, 0, num)


def affine(num: int, epoch: int) -> Permutation:
    rng = np.random.default_rng([num, epoch])
    factor = next(factor for factor in rng.integers(num // 3, num, 100).tolist() if math.gcd(factor, num) == 1)
    permuted: Permutation = (factor * np.arange(num) + int(rng.integers(num))) % num
    return permuted


def two_rounds(num: int, epoch: int) -> Permutation:
    num_bits = (num - 1).bit_length()
    values = np.arange(1 << num_bits, dtype=np.uint64)
    _scramble(values, _rounds(20, epoch, num)[:2], num_bits)
    return values[values < num].astype(np.int64)


def chi_square_z(counts: npt.NDArray[np.int64], expected: float | npt.NDArray[np.float64], num_free: int) -> float:
    return float((((counts - expected) ** 2 / expected).sum() - num_free) / math.sqrt(2 * num_free))


def of_all_orders_of_five(shuffle: Shuffle) -> float:
    """Each of the 120 permutations of 5 equally often."""
    number_of = {order: number for number, order in enumerate(permutations(range(5)))}
    counts = np.zeros(120, np.int64)
    for epoch in range(6000):
        counts[number_of[tuple(shuffle(5, epoch).tolist())]] += 1
    return chi_square_z(counts, 50, 119)


def of_places(shuffle: Shuffle) -> float:
    """Each of 32 values equally often at each of 32 places."""
    counts = np.zeros((32, 32), np.int64)
    for epoch in range(3200):
        counts[np.arange(32), shuffle(32, epoch)] += 1
    return chi_square_z(counts, 100, 31 * 31)


def of_differences(num: int) -> Callable[[Shuffle], float]:
    """Differences of neighbours spread evenly."""

    def measure(shuffle: Shuffle) -> float:
        counts = np.zeros(256, np.int64)
        for epoch in range(NUM_EPOCHS):
            differences = np.diff(shuffle(num, epoch)) % num
            counts += np.bincount(differences * 256 // num, minlength=256)
        # All differences but 0, which no permutation has; 256 bins do not hold equally many of them.
        in_bins = np.bincount(np.arange(1, num) * 256 // num, minlength=256)
        return chi_square_z(counts, in_bins / (num - 1) * counts.sum(), 255)

    return measure


def of_correlation(num: int, lag: int) -> Callable[[Shuffle], float]:
    """Values `lag` places apart are not correlated."""

    def measure(shuffle: Shuffle) -> float:
        products = 0.0
        for epoch in range(NUM_EPOCHS):
            values = shuffle(num, epoch) / (num - 1) - 0.5
            products += float((values[lag:] * values[:-lag]).sum() + 1 / 12)
        return products * 12 / math.sqrt(NUM_EPOCHS * num)

    return measure


def of_epochs(num: int) -> Callable[[Shuffle], float]:
    """One epoch says nothing about the next."""

    def measure(shuffle: Shuffle) -> float:
        products = 0.0
        for epoch in range(NUM_EPOCHS):
            values, later = (shuffle(num, number) / (num - 1) - 0.5 for number in (epoch, epoch + 1))
            products += float((values * later).sum())
        return products * 12 / math.sqrt(NUM_EPOCHS * num)

    return measure


def of_kept_neighbours(num: int) -> Callable[[Shuffle], float]:
    """Samples that come one after the other seldom do so again in the next epoch: on average one pair an epoch."""

    def measure(shuffle: Shuffle) -> float:
        num_kept = 0
        for epoch in range(NUM_EPOCHS):
            place = np.argsort(shuffle(num, epoch + 1))
            num_kept += int((np.diff(place[shuffle(num, epoch)]) == 1).sum())
        return (num_kept - NUM_EPOCHS) / math.sqrt(NUM_EPOCHS)

    return measure


def of_ascents(num: int) -> Callable[[Shuffle], float]:
    """Half of the steps go up."""

    def measure(shuffle: Shuffle) -> float:
        num_up = sum(int((np.diff(shuffle(num, epoch)) > 0).sum()) for epoch in range(NUM_EPOCHS))
        return (num_up - NUM_EPOCHS * (num - 1) / 2) / math.sqrt(NUM_EPOCHS * (num + 1) / 12)

    return measure


STATISTICS: dict[str, Callable[[Shuffle], float]] = {
    "all orders of five": of_all_orders_of_five,
    "places": of_places,
    **{f"differences, {num}": of_differences(num) for num in (1000, 65_537, 100_000)},
    **{f"correlation, {num}, lag {lag}": of_correlation(num, lag) for num in (1000, 65_537) for lag in (1, 8)},
    **{f"epochs, {num}": of_epochs(num) for num in (1000, 65_537)},
    **{f"kept neighbours, {num}": of_kept_neighbours(num) for num in (1000, 65_537)},
    **{f"ascents, {num}": of_ascents(num) for num in (1000, 65_537)},
}


@pytest.mark.parametrize("name", STATISTICS)
def test_the_order_looks_like_chance(name: str) -> None:
    assert abs(STATISTICS[name](by_order)) < HIGHEST_Z


def test_what_looks_like_chance_includes_chance() -> None:
    scores = {name: measure(by_numpy) for name, measure in STATISTICS.items()}

    assert {name: score for name, score in scores.items() if abs(score) >= HIGHEST_Z} == {}


@pytest.mark.parametrize("shuffle", [affine, two_rounds])
def test_bad_permutations_are_found_out(shuffle: Shuffle) -> None:
    scores = {name: measure(shuffle) for name, measure in STATISTICS.items()}

    assert sum(abs(score) > 2 * HIGHEST_Z for score in scores.values()) >= 4, scores


@pytest.mark.parametrize("stride", [1, 2**10, 2**20, 10**6])
def test_samples_of_a_trillion_spread_over_all_of_it(stride: int) -> None:
    num = 10**12
    samples = ShuffledOrder(num, seed=4).take(1, np.arange(100_000) * stride)

    highest, lowest = samples * 256 // num, samples % 256
    differences = np.diff(samples) % num * 256 // num
    for values in (highest, lowest, differences):
        counts = np.bincount(values, minlength=256)
        assert abs(chi_square_z(counts, counts.sum() / 256, 255)) < HIGHEST_Z
