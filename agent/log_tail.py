"""Follows what ranks print: their files by offset, line by line, the newest lines kept in memory.

The files are the truth and lose nothing. In memory there is a ring, bounded in lines and in characters, from which a
console pulls what it lacks.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from typing import TYPE_CHECKING

from agent.process import LAUNCHER_LOG
from agent.wire import LogLine

if TYPE_CHECKING:
    from pathlib import Path

MAX_LINE_CHARS = 4096
MAX_KEPT_LINES = 20_000
MAX_KEPT_CHARS = 8_000_000
MAX_PULLED_CHARS = 150_000
"""In one reply: a character takes at most 6 bytes of JSON, and a reply at most 1 MiB."""
READ_BYTES = 65_536
"""Of one file in one poll; five polls a second follow 0.3 MB/s of each file."""
MAX_BACKLOG_BYTES = 1_048_576
"""A file further ahead than this is skipped to its last `READ_BYTES`: an old line is worth less than a new one."""
ERROR_TAIL_BYTES = 65_536

LAUNCHER_RANK = -1

_MAX_HELD_BYTES = 4 * MAX_LINE_CHARS
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:\s?")
"""torch puts it before each line of an uncaught exception's traceback."""
_TRACEBACK = "Traceback (most recent call last):"
_NATIVE_END = re.compile(r"^\s*(what\(\): |Fatal Python error: )")


class LineSplitter:
    """Turns bytes, as they come, into lines of text.

    A carriage return goes back to the line's start, as on a terminal: of a progress bar only the last state is kept.
    """

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes."""
        *whole, rest = data.split(b"\n")
        lines = []
        for piece in whole:
            self._hold(piece)
            lines.append(self.flush())
        self._hold(rest)
        return lines

    def flush(self) -> str:
        """Return the unfinished line and begin a new one."""
        text = self._held.removesuffix(b"\r").decode(errors="replace")[:MAX_LINE_CHARS]
        self._held = b""
        return text

    @property
    def is_empty(self) -> bool:
        """True when no unfinished line is held."""
        return not self._held

    def _hold(self, piece: bytes) -> None:
        joined = self._held + piece
        # A return at the very end may be the first half of a line end.
        joined = joined[joined.rfind(b"\r", 0, max(0, len(joined) - 1)) + 1 :]
        if len(joined) > _MAX_HELD_BYTES:
            joined = joined[: _MAX_HELD_BYTES - 1] + (b"\r" if joined.endswith(b"\r") else b"")
        self._held = joined


class _Tail:
    """One file, followed."""

    def __init__(self, path: Path, rank: int, stream: str) -> None:
        self.path = path
        self.rank = rank
        self.stream = stream
        self._fd = -1
        self._offset = 0
        self._splitter = LineSplitter()

    def poll(self) -> list[str]:
        """Return the lines that have been completed since the last call, as far as one read goes."""
        lines: list[str] = []
        self._read(lines)
        return lines

    def finish(self) -> list[str]:
        """Return the last lines of a file that nobody writes any more, and let go of it."""
        lines: list[str] = []
        while self._read(lines):
            pass
        if not self._splitter.is_empty:
            lines.append(self._splitter.flush())
        self.close()
        return lines

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self, lines: list[str]) -> bool:
        """Read once, add what became lines, and return whether there was anything."""
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return False  # nobody has written yet
        data = os.pread(self._fd, READ_BYTES, self._offset)
        self._offset += len(data)
        if data:
            lines += self._splitter.feed(data)
        if len(data) == READ_BYTES:
            self._skip_backlog(lines)
        return bool(data)

    def _skip_backlog(self, lines: list[str]) -> None:
        num_left = os.fstat(self._fd).st_size - self._offset
        if num_left > MAX_BACKLOG_BYTES:
            num_skipped = num_left - READ_BYTES
            self._splitter.flush()
            self._offset += num_skipped
            lines.append(f"({num_skipped} bytes are not shown here; all of them are in {self.path})")


class LogTail:
    """The log lines of a node: numbered from 1 over all jobs and ranks, the newest kept."""

    def __init__(self) -> None:
        self._tails: dict[str, list[_Tail]] = {}
        self._lines: deque[LogLine] = deque()
        self._num_chars = 0
        self.log_seq = 0
        """Number of the newest line."""

    @property
    def first_seq(self) -> int:
        """Number of the oldest line kept; one more than `log_seq` when there is none."""
        return self.log_seq - len(self._lines) + 1

    def follow(self, job_id: str, job_dir: Path, ranks: range) -> None:
        """Start to follow the files of a job; they need not exist yet."""
        self._tails[job_id] = [
            _Tail(job_dir / LAUNCHER_LOG, LAUNCHER_RANK, "stderr"),
            *(
                _Tail(job_dir / f"rank-{rank}.{stream}.log", rank, stream)
                for rank in ranks
                for stream in ("stdout", "stderr")
            ),
        ]

    def poll(self) -> None:
        """Read what has been written, a bounded piece of each file."""
        for tails in self._tails.values():
            for tail in tails:
                self._append(tail, tail.poll())

    def unfollow(self, job_id: str) -> None:
        """Read the rest of an ended job's files and let go of them."""
        for tail in self._tails.pop(job_id, ()):
            self._append(tail, tail.finish())

    def close(self) -> None:
        """Let go of all files."""
        for tails in self._tails.values():
            for tail in tails:
                tail.close()
        self._tails.clear()

    def since(self, seq: int, limit: int) -> list[LogLine]:
        """Return the oldest kept lines after `seq`: at most `limit`, and at most `MAX_PULLED_CHARS` characters."""
        num_newer = min(self.log_seq - seq, len(self._lines))
        if num_newer <= 0:
            return []
        newer = list(itertools.islice(reversed(self._lines), num_newer))[::-1]
        budget = MAX_PULLED_CHARS
        taken = []
        for line in newer[:limit]:
            budget -= len(line.text)
            if budget < 0:
                break
            taken.append(line)
        return taken

    def _append(self, tail: _Tail, lines: list[str]) -> None:
        for text in lines:
            self.log_seq += 1
            self._lines.append(LogLine(self.log_seq, tail.rank, tail.stream, text))
            self._num_chars += len(text)
        while len(self._lines) > MAX_KEPT_LINES or self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= len(self._lines.popleft().text)


def find_error(path: Path) -> str:
    """Return the last exception line at the end of a log file; empty when there is none or no file."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - ERROR_TAIL_BYTES))
            data = file.read(ERROR_TAIL_BYTES)
    except OSError:
        return ""
    return last_exception_line(data.decode(errors="replace"))


def last_exception_line(text: str) -> str:
    """Return the line that names the exception of the last traceback or native abort; empty without one."""
    found = ""
    is_in_traceback = False
    for raw_line in text.splitlines():
        line = _RANK_PREFIX.sub("", raw_line)
        if line == _TRACEBACK:
            is_in_traceback = True
        elif is_in_traceback and line and not line[0].isspace():
            is_in_traceback = False
            found = line
        elif _NATIVE_END.match(line):
            found = line.strip()
    return found[:MAX_LINE_CHARS]
