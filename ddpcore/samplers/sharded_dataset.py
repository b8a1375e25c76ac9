"""Shards that can only be read forward, as a data set with samples by number."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from torch.utils.data import Dataset

from ddpcore.arguments import check_has, check_whole, refuse
from ddpcore.errors import SamplerArgumentError, SamplerIndexError
from ddpcore.samplers.order import checked_int
from ddpcore.samplers.sharded_order import checked_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Shard = TypeVar("Shard")
Shard_contra = TypeVar("Shard_contra", contravariant=True)


class Reader(Protocol[Shard_contra]):
    """Reads a shard from its sample number `start` on, in the same order each time."""

    def __call__(self, shard: Shard_contra, start: int, /) -> Iterable[Any]:
        """Return the samples."""


class _Open(NamedTuple):
    """A shard that is being read; `position` is that of the next sample."""

    shard: int
    position: int
    samples: Iterator[Any]


class ShardedDataset(Dataset[Any], Generic[Shard]):
    """Files, or other shards, whose samples are numbered one shard after the other; each is read forward.

        def read(path, start):
            with open(path, "rb") as file:
                file.seek(start * RECORD_BYTES)
                while record := file.read(RECORD_BYTES):
                    yield decode(record)

        dataset = ShardedDataset(paths, lengths, read)
        order = ShardedOrder(dataset.lengths, global_batch_size=256, num_streams=8)
        batches = engine.loader(dataset, global_batch_size=256, order=order)

    With that order training is exact and resumes by position, at any number of ranks: each sample counts once an epoch.
    It asks `read` to begin in the middle of a shard where a run goes on, and where a piece of `ShardedOrder` begins; a
    reader that cannot seek skips: `itertools.islice(samples, start, None)`, at the price of reading what lies before.

    What has to hold, and cannot be found out here: the lengths are known before and stay, and a shard has the same
    samples in the same order each time. Streams without an end, or of a length that nobody knows, have no position that
    another number of ranks could go on from: keep those in a loop of your own, with `parallel.joined`.

    Every process, a DataLoader's worker too, reads for itself. Workers take turns in batches, so each skips what the
    others take: with n workers a shard is read n times, where `read` does not seek.

    Args:
        shards: What `read` is given: paths, for one. The same on every rank.
        lengths: Samples of each shard.
        read: See `Reader`.
        max_open: Shards that are kept open in each process, at least as many as streams that a rank reads.
        max_skip: Samples that are read and dropped rather than a shard opened again: as many as the other workers take
            of a stream in between, or more.

    Raises:
        SamplerArgumentError: The arguments do not fit each other.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        lengths: Sequence[int],
        read: Reader[Shard],
        *,
        max_open: int = 16,
        max_skip: int = 1024,
    ) -> None:
        check_has(SamplerArgumentError, "shards", shards, ("__len__", "__getitem__"), "a list of what read is given")
        if isinstance(shards, str | bytes | dict):
            raise refuse(SamplerArgumentError, "shards", shards, "a list of what read is given")
        if isinstance(read, type) or not callable(read):
            raise refuse(SamplerArgumentError, "read", read, "a function of a shard and a number of samples to skip")
        check_whole(SamplerArgumentError, "max_open", max_open, most=1 << 16)
        check_whole(SamplerArgumentError, "max_skip", max_skip, least=0, most=1 << 40)
        array = checked_lengths(lengths)
        if len(shards) != array.size:
            raise SamplerArgumentError(f"{len(shards)} shards and {array.size} lengths: give a length for each shard")
        self.lengths: list[int] = array.tolist()
        self._shards = shards
        self._read = read
        self._max_open = max_open
        self._max_skip = max_skip
        self._ends = np.cumsum(array)
        self._open: list[_Open] = []
        self._pid = os.getpid()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its number.

        Raises:
            SamplerIndexError: There is no such sample.
            SamplerArgumentError: This is no number, or the shard has fewer samples than in `lengths`.
        """
        if not 0 <= checked_int("index", index) < len(self):
            raise SamplerIndexError(f"there is no sample {index}, there are {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        offset = int(index - self._ends[shard]) + self.lengths[shard]
        _, position, samples = self._reader(shard, offset)
        for sample in samples:
            if position == offset:
                self._open.append(_Open(shard, offset + 1, samples))
                del self._open[: -self._max_open]
                return sample
            position += 1
        raise SamplerArgumentError(
            f"shard {self._shards[shard]!r} ends after {position} samples, and lengths has {self.lengths[shard]} for it"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: what is open stays here."""
        return {**self.__dict__, "_open": []}

    def _reader(self, shard: int, offset: int) -> _Open:
        """Take the nearest open reader before a sample, or begin a new one there."""
        if self._pid != os.getpid():
            # A forked worker has its parent's files, and with them their positions.
            self._open, self._pid = [], os.getpid()
        near = [one for one in self._open if one.shard == shard and 0 <= offset - one.position <= self._max_skip]
        if not near:
            return _Open(shard, offset, iter(self._read(self._shards[shard], offset)))
        best = max(near, key=lambda one: one.position)
        self._open.remove(best)
        return best
