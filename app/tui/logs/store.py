"""Keeps the latest log lines of all ranks in little memory: chunks of packed text, the oldest dropped whole.

A line has a number that never changes: the n-th line ever appended. A chunk holds `CHUNK_LINES` lines as one string of
bytes beside three small arrays, which costs about the text itself, and can be searched whole; dropping the oldest chunk
is one deletion. A store that is held still takes lines, and hides them until it is released.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from typing import NamedTuple

import numpy as np

from agent.wire.logs import LAUNCHER_RANK
from app.filters.lines import LogPiece, Source

CHUNK_LINES = 4096
MAX_LINES = 1_048_576
"""Limit of lines kept; about 140 MB of lines of 120 characters."""
MAX_BYTES = 192 * 2**20
"""Limit of bytes kept; fewer lines when they are longer."""


class StoredLine(NamedTuple):
    """A clean log line with its origin."""

    node: str
    rank: int
    """Global rank; -1 for the launcher."""
    is_stderr: bool
    text: str
    job_id: str
    """Job of the line; empty for a line about the node."""

    @property
    def is_mark(self) -> bool:
        """Whether it marks where an attempt begins, as the session's `AttemptMarks`: a launcher prints to stderr."""
        return self.rank == LAUNCHER_RANK and not self.is_stderr


class _Chunk:
    """Up to `CHUNK_LINES` lines, packed."""

    __slots__ = ("_ends", "_ranks", "_sources", "_stderr", "_text")

    def __init__(self) -> None:
        self._text: bytearray | bytes = bytearray()
        self._ends = array("I", [0])
        self._sources = array("I")
        self._ranks = array("i")
        self._stderr = bytearray()

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, without the objects' headers."""
        packed = (self._ends, self._sources, self._ranks)
        return len(self._text) + len(self._stderr) + sum(len(column) * column.itemsize for column in packed)

    def close(self) -> None:
        """Free the memory reserved for growth."""
        self._text = bytes(self._text)

    def append(self, source_index: int, rank: int, text: str, *, is_stderr: bool) -> None:
        self._text += f"{text}\n".encode()
        self._ends.append(len(self._text))
        self._sources.append(source_index)
        self._ranks.append(rank)
        self._stderr.append(is_stderr)

    def line(self, index: int, sources: list[Source]) -> StoredLine:
        text = self._text[self._ends[index] : self._ends[index + 1] - 1].decode()
        node, job_id, _ = sources[self._sources[index]]
        return StoredLine(node, self._ranks[index], bool(self._stderr[index]), text, job_id)

    def stop_within(self, first: int, stop: int, max_bytes: int) -> int:
        """Return where lines from `first` on exceed `max_bytes`; at least one line fits."""
        return max(first + 1, bisect_right(self._ends, self._ends[first] + max_bytes, first, stop + 1) - 1)

    def first_within(self, first: int, stop: int, max_bytes: int) -> int:
        """Return the first line of those before `stop` that fit into `max_bytes`; at least one line fits."""
        return min(stop - 1, bisect_left(self._ends, self._ends[stop] - max_bytes, first, stop))

    def piece(self, first: int, stop: int, sources: list[Source]) -> LogPiece:
        """Return some of the lines; a closed chunk needs no copies, so that this is cheap."""
        begin = self._ends[first]
        ends = np.frombuffer(self._ends, np.uint32)[first + 1 : stop + 1]
        source_indices = np.frombuffer(self._sources, np.uint32)[first:stop]
        ranks = np.frombuffer(self._ranks, np.int32)[first:stop]
        is_stderr = np.frombuffer(self._stderr, np.bool_)[first:stop]
        packed: bytearray | memoryview
        if isinstance(self._text, bytes):
            packed = memoryview(self._text)[begin : self._ends[stop]]
        else:  # a bytearray with a view on it cannot grow
            packed = self._text[begin : self._ends[stop]]
            ends, source_indices, ranks, is_stderr = ends.copy(), source_indices.copy(), ranks.copy(), is_stderr.copy()
        if begin:
            ends = ends - np.uint32(begin)
        return LogPiece(packed, ends, source_indices, ranks, is_stderr, sources)


class LogStore:
    """The latest lines, by number: `max_lines` of them or `max_bytes`, give or take a chunk."""

    def __init__(self, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self._max_chunks = max(1, -(-max_lines // CHUNK_LINES))
        self._max_bytes = max_bytes
        self._num_closed_bytes = 0
        self._chunks: deque[_Chunk] = deque([_Chunk()])
        self._first = 0
        self._sources: list[Source] = []
        self._source_index: dict[Source, int] = {}
        self._jobs: set[str] = set()
        self._marks: list[tuple[str, int]] = []
        """Job and line at which each attempt after a job's first begins."""
        self._held_end: int | None = None

    @property
    def first(self) -> int:
        """Number of the oldest line kept."""
        return self._first

    @property
    def end(self) -> int:
        """Number of the next line: the count of lines ever appended, or appended before the store was held."""
        latest = self._latest_end
        return latest if self._held_end is None else max(self._first, self._held_end)

    def __len__(self) -> int:
        return self.end - self._first

    def has_other_jobs(self, job_id: str) -> bool:
        """Return whether lines of another job have come."""
        return bool(self._jobs - {job_id})

    def first_of_attempt(self, job_id: str) -> int:
        """Return the number of the line that marks a job's latest attempt; the oldest kept line where none does."""
        marks = [number for job, number in self._marks if job == job_id and number < self.end]
        return max([self._first, *marks[-1:]])

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the lines take."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    def hold(self, *, is_held: bool) -> None:
        """Hide lines that come from now on, or show all again."""
        self._held_end = self._latest_end if is_held else None

    @property
    def _latest_end(self) -> int:
        return self._first + (len(self._chunks) - 1) * CHUNK_LINES + len(self._chunks[-1])

    def append(
        self, node: str, rank: int, text: str, *, is_stderr: bool, job_id: str = "", is_stopped: bool = False
    ) -> None:
        """Add a line; `text` is clean and encodable. See `Source` for `is_stopped`."""
        chunk = self._chunks[-1]
        if len(chunk) == CHUNK_LINES:
            chunk.close()
            self._num_closed_bytes += chunk.num_bytes
            self._chunks.append(_Chunk())
            while len(self._chunks) > self._max_chunks or (
                self._num_closed_bytes > self._max_bytes and len(self._chunks) > 1
            ):
                self._num_closed_bytes -= self._chunks.popleft().num_bytes
                self._first += CHUNK_LINES
        source = Source(node, job_id, is_stopped)
        index = self._source_index.get(source)
        if index is None:
            index = self._source_index[source] = len(self._sources)
            self._sources.append(source)
            self._jobs |= {job_id} - {""}
        if rank == LAUNCHER_RANK and not is_stderr:  # see `StoredLine.is_mark`
            self._marks.append((job_id, self._latest_end))
        self._chunks[-1].append(index, rank, text, is_stderr=is_stderr)

    def line(self, number: int) -> StoredLine:
        """Return a kept line.

        Raises:
            IndexError: The line has been dropped, or has not come yet.
        """
        if not self._first <= number < self.end:
            raise IndexError(f"line {number} is not kept: the store has {self._first} to {self.end - 1}")
        chunk, index = divmod(number - self._first, CHUNK_LINES)
        return self._chunks[chunk].line(index, self._sources)

    def piece(self, first: int, max_bytes: int) -> LogPiece:
        """Return kept lines from `first` on, as many of one chunk as fit into `max_bytes`; at least one."""
        chunk, index = divmod(first - self._first, CHUNK_LINES)
        last = min(self.end - self._first - chunk * CHUNK_LINES, CHUNK_LINES)
        packed = self._chunks[chunk]
        return packed.piece(index, packed.stop_within(index, last, max_bytes), self._sources)

    def piece_before(self, stop: int, max_bytes: int) -> LogPiece:
        """Return the kept lines that end before `stop`, chosen likewise."""
        chunk, index = divmod(stop - 1 - self._first, CHUNK_LINES)
        packed = self._chunks[chunk]
        return packed.piece(packed.first_within(0, index + 1, max_bytes), index + 1, self._sources)
