"""An order for data that is read forward: shards in random order, each from its beginning to its end. Pure."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from ddpcore.errors import SamplerArgumentError
from ddpcore.samplers.order import OrderByPositions, ShuffledOrder, checked_epoch, checked_int, checked_positions
from ddpcore.samplers.shares import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.samplers.order import Indices


MAX_STREAMS = 1 << 20


class ShardedOrder(OrderByPositions):
    """Every sample once an epoch, in as many streams as are asked for, each of which reads shards forward.

        dataset = ShardedDataset(paths, lengths, read)
        order = ShardedOrder(dataset.lengths, global_batch_size=256, num_streams=8)
        batches = engine.loader(dataset, global_batch_size=256, order=order)

    The shards come in another order in each epoch; the samples of a shard come as they lie in it: mix them when it is
    written. One behind the other, the shards are cut into `num_streams` equal pieces, and every global batch takes
    equally many samples from each piece. With 8 streams 1, 2, 4 or 8 ranks read different shards, each forward, and all
    numbers of ranks see the same batches. What does not fill a batch comes last.

    Args:
        lengths: Samples of each shard. A sample's number counts through the shards as they are given here.
        global_batch_size: Samples of a step over all ranks. Training with another size stays exact, but reads less
            evenly.
        num_streams: Pieces that are read at once, at most `global_batch_size`: best a multiple of the number of ranks.
        seed: 0 to 2^64 - 1; the same on every rank.

    Raises:
        SamplerArgumentError: There is no sample, or a number is out of range.

    Source: pieces whose number does not depend on that of the ranks are mosaicml-streaming's canonical nodes.
    """

    def __init__(self, lengths: Sequence[int], global_batch_size: int, num_streams: int = 1, seed: int = 0) -> None:
        self._lengths = checked_lengths(lengths)
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        self.global_batch_size = checked_int("global_batch_size", global_batch_size)
        self.num_streams = checked_int("num_streams", num_streams)
        if not 1 <= self.num_streams <= min(self.global_batch_size, MAX_STREAMS) or self.global_batch_size > 1 << 62:
            raise SamplerArgumentError(
                f"num_streams={num_streams} with global_batch_size={global_batch_size}: each stream gives a sample of "
                "every batch, and there is one at least"
            )
        self._shuffled = ShuffledOrder(self._lengths.size, seed)
        self._bounds = np.array(split(self.global_batch_size, [1] * self.num_streams), np.int64)
        self._epoch: tuple[int, Indices, Indices] | None = None

    @property
    def num_samples(self) -> int:
        """Positions of an epoch."""
        return int(self._starts[-1])

    def take(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at these positions of an epoch."""
        flat = checked_positions(positions, self.num_samples).reshape(-1)
        shards, ends = self._shards_of(checked_epoch(epoch))
        places = self._places(flat)
        turns = np.searchsorted(ends, places, side="right")
        found = shards[turns]
        begins = ends[turns] - self._lengths[found]
        taken: Indices = (self._starts[found] + places - begins).reshape(positions.shape)
        return taken

    def fingerprint(self) -> dict[str, int | str]:
        """Return what a saved cursor must match, the lengths as their checksum."""
        return {
            **self._shuffled.fingerprint(),
            "kind": "sharded-v1",
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "num_streams": self.num_streams,
            "lengths_crc32": zlib.crc32(self._lengths.tobytes()),
        }

    def _shards_of(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the shards in an epoch's order, and where each ends when they lie one behind the other."""
        if self._epoch is None or self._epoch[0] != epoch:
            shards = self._shuffled.indices(epoch, 0, self._lengths.size)
            self._epoch = epoch, shards, np.cumsum(self._lengths[shards])
        return self._epoch[1:]

    def _places(self, positions: Indices) -> Indices:
        """Return where in the shards, one behind the other, the samples at these positions lie."""
        num_steps = self.num_samples // self.global_batch_size
        steps, offsets = np.divmod(positions, self.global_batch_size)
        streams = np.searchsorted(self._bounds, offsets, side="right") - 1
        begins, widths = self._bounds[streams], np.diff(self._bounds)[streams]
        places = num_steps * begins + steps * widths + offsets - begins
        rest: Indices = np.where(positions < num_steps * self.global_batch_size, places, positions)
        return rest


def checked_lengths(lengths: Sequence[int]) -> Indices:
    """Return the lengths of shards as int64; raise SamplerArgumentError for what is no list of sizes, or no sample."""
    array = np.asarray(lengths if not isinstance(lengths, str | bytes | dict) else None)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any() or not array.any():
        raise SamplerArgumentError("lengths make no sense: give the number of samples of each shard, in a list")
    return array.astype(np.int64)
