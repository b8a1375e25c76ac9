"""What was heard in the last minutes, within a bound of memory: the oldest goes first."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from app.recording.records import size_bytes

if TYPE_CHECKING:
    from app.recording.records import Record

MAX_AGE_S = 120.0
MAX_BYTES = 16 * 2**20
"""Two minutes of three nodes with eight ranks and GPUs, seconds of hundreds: the agents themselves keep ten minutes."""


class Past:
    """Records in the order of their time, which is of the console's monotonic clock."""

    def __init__(self, max_age_s: float = MAX_AGE_S, max_bytes: int = MAX_BYTES) -> None:
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._records: deque[Record] = deque()
        self._num_bytes = 0

    def add(self, record: Record) -> None:
        """Keep a record, and let go of what is too old or too much."""
        self._records.append(record)
        self._num_bytes += size_bytes(record)
        oldest_s = record.at_s - self._max_age_s
        while self._records and (self._num_bytes > self._max_bytes or self._records[0].at_s < oldest_s):
            self._num_bytes -= size_bytes(self._records.popleft())

    def records(self) -> list[Record]:
        """Return what is kept, the oldest first."""
        return list(self._records)
