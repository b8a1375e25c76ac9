"""Sampling with weights, by position: any place of any epoch is known without drawing what comes before it.

torch's WeightedRandomSampler draws an epoch from a generator, each rank for itself: it can neither be resumed in the
middle nor shared out. Here it is an order like the others, except that it takes 16 bytes a sample, and that weights
decide how often a sample comes.
"""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddpcore.arguments import check_flag
from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import (
    OrderByPositions,
    checked_epoch,
    checked_num_samples,
    checked_positions,
    checked_seed,
    key_of,
    random_bits,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from ddpcore.samplers.order import Indices, RandomBits


class WeightedOrder(OrderByPositions):
    """Samples are drawn in proportion to weights, in another way each epoch.

        order = WeightedOrder(1.0 / class_sizes[labels], seed=0)
        loader = DataLoader(dataset, batch_sampler=ElasticBatchSampler(order, global_batch_size=256))

    With replacement (torch's default) the draws are independent; one of a million costs 250 ns. Without, an epoch is
    what drawing one after the other from those that are left gives; the first request of each epoch sorts all samples.

    Args:
        weights: One for each sample, finite and 0 or more; need not add up to 1. Copied as float64.
        num_samples: Draws of an epoch; None means as many as there are weights, or without replacement as many as are
            above 0.
        seed: 0 to 2^64 - 1; the same on every rank.
        replacement: Whether a sample may come several times in an epoch.

    Raises:
        SamplerArgumentError: A weight is negative, infinite or not a number, all are 0, or there are fewer samples than
            draws without replacement.

    Source: drawing without replacement as the order of E_i / w_i with exponential E_i: P. Efraimidis and P. Spirakis,
    Weighted random sampling with a reservoir, Information Processing Letters 97, 2006.
    """

    def __init__(
        self, weights: npt.ArrayLike, num_samples: int | None = None, seed: int = 0, *, replacement: bool = True
    ) -> None:
        check_flag(SamplerArgumentError, "replacement", replacement)
        self._weights = _checked_weights(weights)
        self.replacement = replacement
        self.seed = checked_seed(seed)
        num_drawable = int(np.count_nonzero(self._weights))
        default = self._weights.size if replacement else num_drawable
        self.num_samples = checked_num_samples(default if num_samples is None else num_samples)
        if not replacement and self.num_samples > num_drawable:
            raise SamplerArgumentError(
                f"{self.num_samples} draws without replacement from {num_drawable} samples with a weight above 0: "
                "draw fewer, or draw with replacement"
            )
        self._epoch = -1
        self._of_epoch = np.empty(0, np.int64)

    @property
    def num_weights(self) -> int:
        """Samples that are drawn from."""
        return self._weights.size

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of an epoch."""
        checked_positions(positions, self.num_samples)
        epoch = checked_epoch(epoch)
        if not self.replacement:
            drawn: Indices = self._draws_without_replacement(epoch)[positions]
            return drawn
        bits = random_bits(key_of(self.seed, epoch), positions)
        return drawn_by(bits, self._cumulated)

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match, the weights as their checksum."""
        return {
            "kind": "weighted-replaced-v1" if self.replacement else "weighted-v1",
            "num_samples": self.num_samples,
            "seed": self.seed,
            "weights_crc32": self._crc32,
        }

    @cached_property
    def _crc32(self) -> int:
        return zlib.crc32(self._weights.tobytes())

    @cached_property
    def _cumulated(self) -> npt.NDArray[np.float64]:
        return np.cumsum(self._weights)

    def _draws_without_replacement(self, epoch: int) -> Indices:
        if epoch != self._epoch:
            drawable = np.flatnonzero(self._weights)
            bits = random_bits(key_of(self.seed, epoch), drawable)
            # Within (0, 1), so that the logarithm is finite; in logarithms no weight is too small to divide by.
            uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            log_arrivals = np.log(-np.log(uniform)) - np.log(self._weights[drawable])
            self._of_epoch = drawable[np.argsort(log_arrivals, kind="stable")[: self.num_samples]]
            self._epoch = epoch
        return self._of_epoch


def drawn_by(bits: RandomBits, cumulated: npt.NDArray[np.float64]) -> Indices:
    """Return the samples that 64-bit numbers choose: each is a point, each sample an interval as wide as its weight.

    `cumulated` are sums of the weights up to and including each sample's.
    """
    points = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53 * cumulated[-1]
    # Intervals contain their beginning: that of a sample of weight 0 is empty.
    samples: Indices = np.searchsorted(cumulated, points, side="right").astype(np.int64)
    # Rounding may put a point on the very end, beyond all intervals.
    last = np.searchsorted(cumulated, cumulated[-1], side="left")
    np.minimum(samples, last, out=samples)
    return samples


def _checked_weights(weights: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        checked = np.array(weights, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplerArgumentError(f"weights are numbers, one for each sample: {error}") from error
    if checked.ndim != 1 or not checked.size:
        raise SamplerArgumentError(f"weights have shape {checked.shape}: give one for each sample, in one row")
    wrong = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if wrong.size:
        raise SamplerArgumentError(
            f"{wrong.size} weights are negative or not finite, such as {checked[wrong[0]]} of sample {wrong[0]}"
        )
    if not 0 < checked.sum() < np.inf:
        raise SamplerArgumentError(f"the weights add up to {checked.sum()}: at least one must be above 0")
    return checked
