"""Batches of similar length: less padding, no rank or stretch of the epoch with only long samples."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.length_order import LengthGroupedOrder
from ddpcore.samplers.order import Order, ShuffledOrder

if TYPE_CHECKING:
    from pathlib import Path

NUM, BATCH = 20_000, 64
LENGTHS = np.random.default_rng(0).lognormal(4, 1, NUM).astype(np.int64) + 1


def batches(order: Order) -> npt.NDArray[np.int64]:
    """Return the lengths of each full batch of the first epoch."""
    num = NUM // BATCH * BATCH
    return LENGTHS[order.indices(0, 0, num)].reshape(-1, BATCH)


def padding_frac(order: Order) -> float:
    of_batches = batches(order)
    return 1 - float(of_batches.sum() / (of_batches.max(axis=1) * BATCH).sum())


def test_padding_falls_from_most_of_a_batch_to_a_quarter() -> None:
    assert padding_frac(ShuffledOrder(NUM)) > 0.7
    assert padding_frac(LengthGroupedOrder(LENGTHS, BATCH)) < 0.26


def test_long_and_short_batches_are_mixed_over_the_epoch() -> None:
    means = batches(LengthGroupedOrder(LENGTHS, BATCH)).mean(axis=1)

    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.25


def test_no_rank_has_always_the_longest_samples_of_a_batch() -> None:
    by_place = batches(LengthGroupedOrder(LENGTHS, BATCH)).mean(axis=0)

    assert by_place.std() / by_place.mean() < 0.05


def test_an_order_of_equal_lengths_is_still_shuffled() -> None:
    samples = LengthGroupedOrder(np.ones(1000), 10).indices(0, 0, 1000)

    assert sorted(samples.tolist()) == list(range(1000))
    assert abs(np.corrcoef(samples[1:], samples[:-1])[0, 1]) < 0.13


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(LengthGroupedOrder(LENGTHS[:200], 10, seed).indices(epoch, 0, 200).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
    }

    assert len(orders) == 4


def test_of_a_small_data_set_each_epoch_leaves_out_others_and_batches_have_others_in_them() -> None:
    order = LengthGroupedOrder(np.arange(115), 10)

    epochs = [order.indices(epoch, 0, 115).tolist() for epoch in range(20)]

    left_out = {sample for samples in epochs for sample in samples[110:]}
    assert (len(left_out) > 50, min(left_out) < 10) == (True, True)
    assert len({frozenset(samples[begin : begin + 10]) for samples in epochs for begin in range(0, 110, 10)}) > 210


def test_lengths_may_lie_in_a_file(tmp_path: Path) -> None:
    LENGTHS.tofile(tmp_path / "lengths")
    mapped = LengthGroupedOrder(np.memmap(tmp_path / "lengths", np.int64, "r"), BATCH)

    in_memory = LengthGroupedOrder(LENGTHS.tolist(), BATCH)

    assert mapped.indices(1, 500, 900).tolist() == in_memory.indices(1, 500, 900).tolist()
    assert mapped.fingerprint() == in_memory.fingerprint()


def test_other_lengths_have_another_fingerprint() -> None:
    order = LengthGroupedOrder([1, 2, 3], 2)

    assert order.fingerprint() != LengthGroupedOrder([1, 2, 4], 2).fingerprint()
    assert order.fingerprint()["kind"] == "length-grouped-v2"
    assert pickle.loads(pickle.dumps(order)).fingerprint() == order.fingerprint()


@pytest.mark.parametrize(
    ("lengths", "batch_size", "message"),
    [
        ([], 4, "0 samples"),
        ([[1], [2]], 4, r"shape \(2, 1\)"),
        (["long"], 4, "give one number a sample"),
        ([True, False], 4, "type bool"),
        (None, 4, "give one number a sample"),
        ([1, 2], 0, "1 at least"),
        ([1, 2], 1.5, "global_batch_size=1.5 is not an integer"),
    ],
)
def test_lengths_that_make_no_sense_are_refused(lengths: Any, batch_size: int, message: str) -> None:
    with pytest.raises(SamplerArgumentError, match=message):
        LengthGroupedOrder(lengths, batch_size)


def test_positions_beyond_the_epoch_are_refused() -> None:
    with pytest.raises(IndexError):
        LengthGroupedOrder([1, 2, 3], 2).indices(0, 0, 4)
