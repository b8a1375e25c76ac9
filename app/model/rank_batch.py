"""The digests of several nodes as one set of records: the model takes them as columns, a few operations for all.

An operation on an array costs a microsecond however short the array is, so the ranks of many nodes are taken together.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from agent.wire.digest import (
    COUNTS,
    HISTORY_FIELDS,
    HISTORY_RECORD,
    PHASES,
    PROCESSES,
    PROGRESS_FIELDS,
    PROGRESS_RECORD,
    RANK_FIELDS,
    RANK_RECORD,
    SECONDS,
    STANDING_FIELDS,
    STANDING_RECORD,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agent.wire.digest import NodeFrame

MAX_S = 1e10
"""Longest time accepted, in seconds, as everywhere on the wire; NaN is refused as well."""


def _dtype(fields: Sequence[tuple[str, str]], size: int) -> np.dtype[np.void]:
    """Return the numpy type of a record that `struct` packs without gaps."""
    codes = {"d": "f8", "q": "i8", "I": "u4", "H": "u2", "B": "u1", "?": "u1"}
    formats = [("<" + codes[code[-1]], (int(code[:-1]),) if code[:-1] else ()) for _, code in fields]
    offsets = [struct.calcsize("<" + "".join(code for _, code in fields[:place])) for place in range(len(fields))]
    return np.dtype({"names": [name for name, _ in fields], "formats": formats, "offsets": offsets, "itemsize": size})


RANKS = _dtype(RANK_FIELDS, RANK_RECORD.size)
STANDINGS = _dtype(STANDING_FIELDS, STANDING_RECORD.size)
HISTORIES = _dtype(HISTORY_FIELDS, HISTORY_RECORD.size)
PROGRESS = _dtype(PROGRESS_FIELDS, PROGRESS_RECORD.size)
SECOND = {name: place for place, name in enumerate(SECONDS)}
COUNT = {name: place for place, name in enumerate(COUNTS)}


class RankBatch:
    """Rank records of some nodes, from one report of each.

    Attributes:
        nodes: Index of each node.
        frames: Frame of each node.
        records: Records of all ranks, node by node; invalid ones belong to no job.
        place: Node of each record: an index into `nodes`.
        at_s: When each record came.
    """

    def __init__(self, reports: Sequence[tuple[int, NodeFrame, float]]) -> None:
        self.nodes = np.array([node for node, _, _ in reports], np.int64)
        self.frames = np.empty(len(reports), np.object_)
        self.frames[:] = [frame for _, frame, _ in reports]
        packed = [frame.digest.ranks if frame.digest else b"" for _, frame, _ in reports]
        self.records, sizes = _unpacked(packed, RANKS)
        self.place = np.repeat(np.arange(len(reports)), sizes)
        self.at_s = np.repeat(np.array([at_s for _, _, at_s in reports]), sizes)
        self._first_row = np.cumsum([0, *sizes])

    @property
    def is_sound(self) -> NDArray[np.bool_]:
        """Which records hold valid values."""
        records = self.records
        seconds, counts, process = records["seconds"], records["counts"], records["process"]
        is_sound = ((seconds >= 0.0) & (seconds <= MAX_S)).all(axis=1) & (counts >= -1).all(axis=1)
        is_sound &= (process > 0) & (process <= len(PROCESSES)) & (records["phase"] < len(PHASES))
        is_sound &= counts[:, COUNT["rss_bytes"]] >= 0
        lateness = records["lateness"]
        is_sound &= ((lateness >= 0.0) & (lateness <= MAX_S**2)).all(axis=1)
        return is_sound

    def standings(self) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ranks' positions in groups; for each its record, and its call in all frames' `calls` as one list.

        Invalid ones are left out.
        """
        found, row, call, is_sound = self._records_of("standings", STANDINGS)
        waiting_s, counts = found["waiting_s"], found["counts"]
        is_sound &= (waiting_s >= 0.0) & (waiting_s <= MAX_S) & (counts >= -1).all(axis=1)
        return (found, row, call) if is_sound.all() else (found[is_sound], row[is_sound], call[is_sound])

    def histories(self) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
        """Return the ranks' last calls in groups, as `standings` does."""
        found, row, call, is_sound = self._records_of("histories", HISTORIES)
        is_sound &= (found["counts"] >= -1).all(axis=1)
        return (found, row, call) if is_sound.all() else (found[is_sound], row[is_sound], call[is_sound])

    def progress(self) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """Return how ranks have come to their steps, and the rank record of each; invalid ones are left out."""
        found, row, place = self._rows_of("progress", PROGRESS)
        is_sound = (row < self._first_row[place + 1]) & (found["loss_step"] >= -1)
        return found[is_sound], row[is_sound]

    def _records_of(
        self, name: str, dtype: np.dtype[np.void]
    ) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the records of one kind, the rank record and call that each belongs to, and whether these exist."""
        found, row, place = self._rows_of(name, dtype)
        call = self._first_call[place] + found["call"]
        return found, row, call, (row < self._first_row[place + 1]) & (call < self._first_call[place + 1])

    @cached_property
    def _first_call(self) -> NDArray[np.int64]:
        return np.cumsum([0, *[len(frame.digest.calls) for frame in self.frames]])

    def _rows_of(
        self, name: str, dtype: np.dtype[np.void]
    ) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
        """Return the records of one kind, the rank record that each belongs to, and its node's place."""
        found, sizes = _unpacked([getattr(frame.digest, name) for frame in self.frames], dtype)
        place = np.repeat(np.arange(len(sizes)), sizes)
        return found, self._first_row[place] + found["row"], place


def _unpacked(packed: list[bytes], dtype: np.dtype[np.void]) -> tuple[NDArray[np.void], list[int]]:
    """Return the records of all nodes, and how many each has; what is left of a node's bytes is none."""
    size = dtype.itemsize
    sizes, joined = [len(part) // size for part in packed], b"".join(packed)
    if sum(sizes) * size != len(joined):
        joined = b"".join(part[: num * size] for part, num in zip(packed, sizes, strict=True))
    return np.frombuffer(joined, dtype), sizes
