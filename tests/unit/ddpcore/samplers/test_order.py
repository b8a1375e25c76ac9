"""The order of samples: frozen numbers, no memory, clear refusals."""

from __future__ import annotations

import pickle
import tracemalloc

import numpy as np
import pytest

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import SequentialOrder, ShuffledOrder, random_bits, sample_seed

FROZEN = [
    # (num_samples, seed, epoch, begin, samples): what checkpoints with the tag "xm8-v1" rely on.
    (10, 0, 0, 0, [9, 2, 5, 0, 3, 7, 1, 6, 4, 8]),
    (10, 0, 1, 0, [9, 5, 7, 8, 0, 3, 1, 4, 6, 2]),
    (10, 1, 0, 0, [3, 8, 7, 6, 1, 2, 0, 5, 4, 9]),
    (1000, 42, 3, 0, [97, 511, 660, 485, 490, 198]),
    (65_537, 7, 0, 65_531, [43501, 59066, 31805, 43503, 8842, 22039]),
    (10**9, 2**64 - 1, 0, 10**9 - 4, [532364479, 1704702, 948395384, 848683604]),
    (10**12, 0, 5, 0, [907793941785, 47291055399, 202999217228, 520279337214]),
    (2**62, 123, 9, 2**62 - 3, [2241222652592327013, 2253206121844519806, 4484437038950849699]),
]


@pytest.mark.parametrize(("num_samples", "seed", "epoch", "begin", "samples"), FROZEN)
def test_the_order_of_a_saved_run_never_changes(
    num_samples: int, seed: int, epoch: int, begin: int, samples: list[int]
) -> None:
    order = ShuffledOrder(num_samples, seed)

    assert order.indices(epoch, begin, begin + len(samples)).tolist() == samples
    assert order.fingerprint() == {"kind": "xm8-v1", "num_samples": num_samples, "seed": seed}


def test_seeds_of_samples_never_change() -> None:
    assert sample_seed(0, 0, 0) == 1279368494785126216
    assert sample_seed(2**64 - 1, 10**6, 10**12) == 8328307725372542882


def test_seeds_of_neighbouring_samples_epochs_and_runs_differ() -> None:
    seeds = {sample_seed(*numbers) for numbers in np.ndindex(8, 8, 64)}

    assert len(seeds) == 8 * 8 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_random_words_are_those_of_splitmix64() -> None:
    # Source: the first outputs of the reference implementation, https://prng.di.unimi.it/splitmix64.c, for state 0.
    assert random_bits(0, np.arange(3)).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("num_samples", [10**9, 10**12, 2**39 + 1, 2**62])
def test_a_trillion_samples_take_no_memory(num_samples: int) -> None:
    tracemalloc.start()
    try:
        order = ShuffledOrder(num_samples)
        order.indices(0, num_samples // 2, num_samples // 2 + 4096)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 400_000
    assert len(pickle.dumps(order)) < 200


def test_epochs_and_seeds_and_lengths_give_different_orders() -> None:
    orders = [
        tuple(ShuffledOrder(num_samples, seed).indices(epoch, 0, 50).tolist())
        for num_samples in (50, 51)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]

    assert len(set(orders)) == 8


def test_a_sequential_epoch_is_the_data_set_s_own_order() -> None:
    order = SequentialOrder(7)

    assert order.indices(3, 2, 6).tolist() == [2, 3, 4, 5]
    assert order.fingerprint() == {"kind": "sequential-v1", "num_samples": 7}


@pytest.mark.parametrize("order", [ShuffledOrder(10), SequentialOrder(10)])
@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_the_epoch_are_refused(order: ShuffledOrder | SequentialOrder, position: int) -> None:
    with pytest.raises(IndexError, match="within 0 to 9"):
        order.take(0, np.array([0, position]))


def test_an_empty_request_is_answered_with_nothing() -> None:
    assert ShuffledOrder(10).indices(0, 10, 10).tolist() == []


def test_positions_of_any_shape_keep_it() -> None:
    order = ShuffledOrder(100)

    assert order.take(0, np.arange(100).reshape(4, 25)).tolist() == order.indices(0, 0, 100).reshape(4, 25).tolist()


@pytest.mark.parametrize(
    ("num_samples", "message"),
    [
        (0, "nothing to iterate over"),
        (-3, "nothing to iterate over"),
        (2**62 + 1, "beyond 2\\^62"),
        (1.5, "num_samples=1.5 is not an integer"),
        ("10", "num_samples='10' is not an integer"),
        (True, "num_samples=True is not an integer"),
        (None, "num_samples=None is not an integer"),
    ],
)
def test_a_data_set_of_no_length_is_refused(num_samples: int, message: str) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        ShuffledOrder(num_samples)
    with pytest.raises(SamplerArgumentError, match=message):
        SequentialOrder(num_samples)


@pytest.mark.parametrize("seed", [-1, 2**64, 0.0, "seed"])
def test_a_seed_that_is_none_is_refused(seed: int) -> None:
    with pytest.raises(SamplerArgumentError, match="seed="):
        ShuffledOrder(10, seed)


def test_numpy_s_integers_are_integers() -> None:
    order = ShuffledOrder(np.int64(10), np.uint64(3))  # type: ignore[arg-type] # what data sets return as lengths

    assert order == ShuffledOrder(10, 3)
