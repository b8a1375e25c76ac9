"""One log file, followed by offset: across rotation, truncation, holes, and bursts faster than it is read.

A file that is replaced is read to its end through its descriptor before the new one is begun. Offsets count bytes of
the file that is open.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from typing import TYPE_CHECKING

from agent.files import open_regular
from agent.logs.line_splitter import LineSplitter

if TYPE_CHECKING:
    from pathlib import Path

MAX_BACKLOG_BYTES = 1_048_576
"""A file further ahead than this is skipped to its last piece: an old line is worth less than a new one."""


class LogFile:
    """A file that somebody appends to, from its first byte to `close`; it need not exist yet."""

    def __init__(self, path: Path, rank: int, stream: str, job_id: str = "") -> None:
        self.path = path
        self.job_id = job_id
        self.checksum = zlib.crc32(os.fsencode(path))
        self.rank = rank
        self.stream = stream
        self.dropped_bytes = 0
        """Bytes that were not made into lines."""
        self.is_finished = False
        """Nothing more will be read."""
        self._fd = -1
        self._offset = 0
        self._line_offset = 0
        """Where the unfinished line began."""
        self._is_mid_line = False
        """The offset was moved into the midst of a line, which is of no use."""
        self._splitter = LineSplitter()
        self._was_replaced = False
        self._notes: list[str] = []

    def look(self) -> int:
        """Find out what has become of the file, and return how many of its bytes wait to be read."""
        if self.is_finished or (self._fd < 0 and not self._open()):
            return 0
        pending = self._pending()
        if pending:
            self._was_replaced = False
        elif self._is_replaced():
            # Whoever held the old file open may still have been writing: it had the time between two looks.
            if self._was_replaced:
                self._begin_new_file()
                return self.look()
            self._was_replaced = True
        return pending

    def read(self, max_bytes: int, max_lines: int) -> list[str]:
        """Return the next lines, and before them the notes about the file; blocks on the disk alone."""
        if self._fd < 0:
            return self._take_notes()
        try:
            data = self._next_bytes(max_bytes)
        except OSError as error:
            self._notes.append(f"(this log can no longer be read: {error.strerror}; it is {self.path})")
            return self.finish()
        if data.count(b"\n") > max_lines:
            data = data[: len(data) - len(data.split(b"\n", max_lines)[-1])]
        self._offset += len(data)
        lines = self._feed(data)
        lines = self._take_notes() + lines
        if self._pending() > MAX_BACKLOG_BYTES:
            self._skip_backlog(max_bytes)
        return lines + self._take_notes()

    def finish(self) -> list[str]:
        """Return the unfinished line of a file that nobody writes any more, and let go of the file."""
        lines = self._unfinished()
        self.is_finished = True
        self.close()
        return self._take_notes() + lines

    @property
    def unfinished(self) -> str:
        """The line that is still being written, as far as it goes."""
        return "" if self._is_mid_line else self._splitter.unfinished

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> bool:
        try:
            self._fd = open_regular(self.path)
        except OSError:
            return False  # nobody has written yet
        self._offset = self._line_offset = 0
        return True

    def _pending(self) -> int:
        size = os.fstat(self._fd).st_size
        # A file that is cut and grows past the offset between two looks is not noticed, as with `tail -F`.
        if size < self._offset:
            self._notes += self._unfinished()
            self._notes.append(f"(the file was cut from {self._offset} bytes to {size}: it is read from its start)")
            self._offset = self._line_offset = 0
        return size - self._offset

    def _is_replaced(self) -> bool:
        """Return whether another file has this one's name; while there is none, this one is still the one."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        own = os.fstat(self._fd)
        return stat.S_ISREG(found.st_mode) and (found.st_ino, found.st_dev) != (own.st_ino, own.st_dev)

    def _begin_new_file(self) -> None:
        self._notes += self._unfinished()
        self._was_replaced = False
        self.close()

    def _unfinished(self) -> list[str]:
        """Return the line that will never be finished, and forget where it began."""
        if self._is_mid_line:
            self._drop_line(self._offset)
        return [] if self._splitter.is_empty else [self._splitter.flush()]

    def _feed(self, data: bytes) -> list[str]:
        if self._is_mid_line:
            # A carriage return begins the line anew, but for one that may be half of a line's end.
            end = data.find(b"\n") + 1 or data.find(b"\r", 0, -1) + 1
            if not end:
                return []
            self._drop_line(self._offset - len(data) + end)
            data = data[end:]
        last_end = data.rfind(b"\n") + 1
        if last_end:
            self._line_offset = self._offset - len(data) + last_end
        return self._splitter.feed(data)

    def _skip_backlog(self, max_bytes: int) -> None:
        self._splitter.flush()
        self._is_mid_line = True
        self._offset += self._pending() - max_bytes

    def _drop_line(self, end: int) -> None:
        """Count what lies between the last whole line and `end`, where the next one begins."""
        num_dropped, start = end - self._line_offset, self._line_offset
        self.dropped_bytes += num_dropped
        self._notes.append(
            f"({num_dropped} bytes are not shown here, from offset {start} on; all of them are in {self.path})"
        )
        self._line_offset = end
        self._is_mid_line = False

    def _next_bytes(self, max_bytes: int) -> bytes:
        data = os.pread(self._fd, max_bytes, self._offset)
        return self._skip_hole(data, max_bytes) if data[:1] == b"\0" else data

    def _skip_hole(self, data: bytes, max_bytes: int) -> bytes:
        """Return what comes behind a hole: a writer goes on at its old offset after its file was truncated.

        Source: lseek(2), SEEK_DATA; holes are whole pages, so that zeros are left in the last one.
        """
        try:
            start = os.lseek(self._fd, self._offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                return data  # this file system knows no holes
            start = os.fstat(self._fd).st_size
        if start == self._offset:
            return data
        behind = os.pread(self._fd, max_bytes, start)
        data = behind.lstrip(b"\0")
        self._offset = start + len(behind) - len(data)
        if self._splitter.is_empty:
            self._line_offset = self._offset
        return data

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes
