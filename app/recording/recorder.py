"""Writes what a console receives to a file, as it comes: if the console dies, all but the last second is there.

`Recorder` keeps the latest of it in two files, FILE and before that FILE.1; each can be replayed alone, since reports
are whole.

`Past` keeps the records of the last minutes in memory, within a bound: the oldest goes first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import threading
import time
from collections import deque
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from agent.wire.reports import WIRE_VERSION
from app.errors import SessionError
from app.recording.records import (
    FORMAT_VERSION,
    MAX_LENGTH_S,
    MAX_LINES,
    MAX_RECORD_BYTES,
    MAX_RECORDING_BYTES,
    MAX_RECORDS,
    LinesRecord,
    Opening,
    RecordPacker,
    size_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from app.recording.records import Record

SETTLE_S = 1.0
"""Seconds of records that a crash may cost."""
MAX_WAITING = 10_000
"""Limit of records waiting for the disk; more are lost, and counted."""
MAX_WAITING_BYTES = 64 * 2**20
"""Bytes of all records waiting: ten thousand reports of 60 kB would hold 593 MiB."""
CLOSE_S = 10.0
"""Timeout in seconds for the last of them to be written."""


class Recorder:
    """A file that grows while a session lives; `add` may be called from any thread, and returns immediately.

    Attributes:
        num_lost: Records that came faster than they could be written.
    """

    def __init__(
        self,
        path: Path,
        nodes: Sequence[str],
        mask: Callable[[Record], Record],
        *,
        max_bytes: int = MAX_RECORDING_BYTES - MAX_RECORD_BYTES,
    ) -> None:
        """Begin a recording of these nodes at `path`; `mask` removes secrets from a record before it is kept.

        A file is full at `max_bytes` before packing.

        Raises:
            SessionError: There is a file already, or none can be made.
        """
        self.num_lost = 0
        self._path = path
        self._nodes = list(nodes)
        self._mask = mask
        self._max_bytes = max_bytes
        self._num_waiting_bytes = 0
        self._size_lock = threading.Lock()
        self._waiting: queue.Queue[Record | None] = queue.Queue(MAX_WAITING)
        self._notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._older = path.with_name(f"{path.name}.1")
        try:
            if self._older.exists():
                path = self._older  # an existing file is not ours, and a full file would replace it
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self._file = _Part(path, self._nodes)
        except OSError as error:
            hint = (
                "name another, or remove it" if isinstance(error, FileExistsError) else "name another place: --record"
            )
            raise SessionError(f"{path} cannot be recorded into: {error.strerror}", hint) from error
        self._thread = threading.Thread(target=self._write, name="rankdeck-recorder", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Take a record whose time is of the monotonic clock."""
        with self._size_lock:
            if self._num_waiting_bytes < MAX_WAITING_BYTES:
                with contextlib.suppress(queue.Full):
                    self._waiting.put_nowait(record)
                    self._num_waiting_bytes += size_bytes(record)
                    return
            if not self.num_lost:
                self._notices.put(f"the disk is too slow for the recording {self._path}: not all of it is kept")
            self.num_lost += 1

    def drain_notices(self) -> list[str]:
        """Return sentences about errors since the last call."""
        return [self._notices.get() for _ in range(self._notices.qsize())]

    def close(self) -> None:
        """Write what is left; waits for it, within bounds."""
        with contextlib.suppress(queue.Full):  # a disk that has taken nothing for so long is not waited for
            self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _write(self) -> None:
        try:
            while self._write_some():
                pass
            self._file.finish()
        except (OSError, ValueError, TypeError) as error:  # the last two: a record that cannot be encoded
            self._file.close()
            why = error.strerror if isinstance(error, OSError) else error
            self._notices.put(f"the recording {self._path} has ended: {why}")
            while self._next(None) is not None:
                pass

    def _write_some(self) -> bool:
        """Write a record, or settle what is written; return False at the end."""
        try:
            record = self._next(self._file.settle_in_s())
        except queue.Empty:
            self._file.settle()
            return True
        if record is None:
            return False
        if self._file.is_full(record.at_s, self._max_bytes):
            self._file.finish()
            self._path.replace(self._older)
            self._file = _Part(self._path, self._nodes)
        self._file.write(self._mask(record))
        return True

    def _next(self, timeout_s: float | None) -> Record | None:
        """Return the record that has waited longest; None is the end."""
        record = self._waiting.get(timeout=timeout_s)
        if record is not None:
            with self._size_lock:
                self._num_waiting_bytes -= size_bytes(record)
        return record


class _Part:
    """One file of a recording; it begins with the first record, since that is when its clock does."""

    def __init__(self, path: Path, nodes: list[str]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(fd, "wb", buffering=0)
        self._nodes = nodes
        self._packer = RecordPacker()
        self._begin_s: float | None = None
        self._num_records = 0
        self._num_lines = 0
        self._settled_s = time.monotonic()
        self._is_settled = True

    def write(self, record: Record) -> None:
        if self._begin_s is None:
            self._open()
            self._begin_s = record.at_s
        self._num_records += 1
        self._num_lines += len(record.lines) if isinstance(record, LinesRecord) else 0
        behind_s = max(0.0, record.at_s - self._begin_s)
        self._put(self._packer.pack(msgspec.structs.replace(record, at_s=behind_s)))
        self._is_settled = False
        if self.settle_in_s() == 0.0:
            self.settle()

    def is_full(self, at_s: float, max_bytes: int) -> bool:
        """Return whether a record of this time belongs into the next file: this one could not be replayed whole."""
        is_long = self._begin_s is not None and at_s - self._begin_s > MAX_LENGTH_S - 1.0
        is_much = self._num_records >= MAX_RECORDS or self._num_lines >= MAX_LINES // 2
        return is_long or is_much or self._packer.num_bytes >= max_bytes

    def settle_in_s(self) -> float | None:
        """Return after how many seconds what is written is to be settled; None when it is."""
        return None if self._is_settled else max(0.0, self._settled_s + SETTLE_S - time.monotonic())

    def settle(self) -> None:
        self._put(self._packer.settle())
        self._settled_s, self._is_settled = time.monotonic(), True

    def finish(self) -> None:
        with self._file:
            if self._begin_s is None:
                self._open()
            self._put(self._packer.finish())

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _open(self) -> None:
        made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        opening = Opening(FORMAT_VERSION, WIRE_VERSION, version("rankdeck"), made_at, self._nodes, is_live=True)
        self._put(self._packer.pack(opening))

    def _put(self, packed: bytes) -> None:
        while packed:
            packed = packed[self._file.write(packed) :]


MAX_AGE_S = 120.0
MAX_BYTES = 16 * 2**20
"""Bytes of all records kept: two minutes of three nodes with eight ranks and GPUs, seconds of hundreds. The agents
themselves keep ten minutes.
"""


class Past:
    """Records in the order of their time, which is of the console's monotonic clock."""

    def __init__(self, max_age_s: float = MAX_AGE_S, max_bytes: int = MAX_BYTES) -> None:
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._records: deque[Record] = deque()
        self._num_bytes = 0

    def add(self, record: Record) -> None:
        """Keep a record, and drop those that are too old or too many."""
        self._records.append(record)
        self._num_bytes += size_bytes(record)
        oldest_s = record.at_s - self._max_age_s
        while self._records and (self._num_bytes > self._max_bytes or self._records[0].at_s < oldest_s):
            self._num_bytes -= size_bytes(self._records.popleft())

    def records(self) -> list[Record]:
        """Return the records kept, the oldest first."""
        return list(self._records)
