"""Batches of samples that are about equally long, in an order that is still random and complete."""

from __future__ import annotations

import zlib
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import (
    OrderByPositions,
    ShuffledOrder,
    checked_epoch,
    checked_int,
    checked_positions,
    key_of,
    random_bits,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from ddpcore.samplers.order import Indices

_MAX_CACHED = 4
"""Blocks kept sorted: neighbouring requests fall into the same one."""


class LengthGroupedOrder(OrderByPositions):
    """Every sample once an epoch; batches hold samples of similar length, so that padding wastes little.

        order = LengthGroupedOrder([len(text) for text in texts], global_batch_size=256, seed=0)
        loader = DataLoader(texts, batch_sampler=ElasticBatchSampler(order, global_batch_size=256), collate_fn=pad)

    The shuffled order is cut into blocks of `batches_per_block` batches. The samples of a block are sorted by length
    and dealt into its batches, which then come in random order, each of them shuffled: no stretch of the epoch has only
    short samples, and no rank always the longest. The last batch of the epoch, if it is not full, takes what is left: a
    random choice, so that no sample is always what `drop_last` leaves out.

    Nothing is sorted before it is needed, and only a block at a time.

    Args:
        lengths: One number a sample. Kept, not copied: may be a numpy memory map.
        global_batch_size: Samples of a step over all ranks. Training with another size, after a resume, stays exact and
            is only less well grouped.
        seed: 0 to 2^64 - 1; the same on every rank.
        batches_per_block: More make batches more alike, and epochs less random. A block is a quarter of the epoch at
            most, so that samples meet others each time; an epoch of less than 8 batches is only shuffled.

    Raises:
        SamplerArgumentError: The lengths are not one number a sample, or a number is out of range.

    Source: blocks of batches sorted by length, as in HuggingFace Transformers' LengthGroupedSampler.
    """

    def __init__(
        self, lengths: npt.ArrayLike, global_batch_size: int, seed: int = 0, batches_per_block: int = 50
    ) -> None:
        self._lengths = np.asanyarray(lengths)
        if self._lengths.ndim != 1 or self._lengths.dtype.kind not in "iuf":
            raise SamplerArgumentError(
                f"lengths have shape {self._lengths.shape} and type {self._lengths.dtype}: give one number a sample"
            )
        self.global_batch_size = checked_int("global_batch_size", global_batch_size)
        self.batches_per_block = checked_int("batches_per_block", batches_per_block)
        if self.global_batch_size < 1 or self.batches_per_block < 1:
            raise SamplerArgumentError(f"{global_batch_size=} and {batches_per_block=} are 1 at least")
        self._shuffled = ShuffledOrder(self._lengths.size, seed)
        num_batches = max(1, min(self.batches_per_block, self._lengths.size // (4 * self.global_batch_size)))
        self._block_size = self.global_batch_size * num_batches
        self._blocks: dict[tuple[int, int], Indices] = {}

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return self._shuffled.num_samples

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of an epoch; sorts the blocks they fall into."""
        flat = checked_positions(positions, self.num_samples).reshape(-1)
        epoch, taken = checked_epoch(epoch), np.empty_like(flat)
        numbers, offsets = np.divmod(flat, self._block_size)
        for number in np.unique(numbers).tolist():
            is_here = numbers == number
            taken[is_here] = self._block(epoch, number)[offsets[is_here]]
        return taken.reshape(positions.shape)

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match, the lengths as their checksum."""
        return {
            **self._shuffled.fingerprint(),
            "kind": "length-grouped-v2",
            "global_batch_size": self.global_batch_size,
            "batches_per_block": self.batches_per_block,
            "lengths_crc32": self._crc32,
        }

    @cached_property
    def _crc32(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self._lengths).data)

    def _block(self, epoch: int, number: int) -> Indices:
        """Return the samples of a block in their order."""
        block = self._blocks.pop((epoch, number), None)
        if block is None:
            block = self._grouped(epoch, number)
        self._blocks[epoch, number] = block
        if len(self._blocks) > _MAX_CACHED:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _grouped(self, epoch: int, number: int) -> Indices:
        begin = number * self._block_size
        samples = self._shuffled.indices(epoch, begin, min(begin + self._block_size, self.num_samples))
        num_full = samples.size // self.global_batch_size
        in_batches = samples[: num_full * self.global_batch_size]
        by_length = np.argsort(self._lengths[in_batches], kind="stable")
        bits = random_bits(key_of(self._shuffled.seed, epoch, number), np.arange(num_full, dtype=np.int64))
        turn_of_batch = np.argsort(bits, kind="stable").argsort(kind="stable")
        turn = np.empty(in_batches.size, np.int64)
        turn[by_length] = np.repeat(turn_of_batch, self.global_batch_size)
        # Stable: within its batch a sample keeps its place in the shuffled order.
        in_batches[:] = in_batches[np.argsort(turn, kind="stable")]
        return samples
