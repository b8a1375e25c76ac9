"""The node's own reports of the past, on disk, for a console that attaches later.

Two rings of files in `history/`: `recent` has every regular report of the last ten minutes, `day` one in ten seconds of
the last day. A file holds some reports in a row of one agent; those that are older go when a new one begins. A report
that was cut short by a crash is the last of its file and is dropped when that is read.

Reports are dated by a clock that the first agent of a boot has set by the wall clock (`epoch`), and that nobody sets
again: whoever sets the wall clock changes no age, whichever agent asks.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import struct
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from agent.processes.shim import write_record
from agent.wire.commands import Tier
from agent.wire.relay import MAX_REPORT_BYTES
from agent.wire.reports import READABLE_VERSIONS, WIRE_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_FRAME_BYTES = MAX_REPORT_BYTES
MAX_FILES = 100
"""Files of a tier: an agent that is often restarted leaves many short ones."""
_EPOCH_FILE = "epoch"

_HEAD = struct.Struct("<Id")
"""Size of a report in bytes, wall time at which it was made."""


class _Shape(NamedTuple):
    """How a tier is kept."""

    period_s: float
    """The least time between two reports."""
    file_s: float
    """What one file spans."""
    num_files: int
    """Files of that length that are kept, the one under way included."""


_SHAPES = {Tier.RECENT: _Shape(0.15, 60.0, 11), Tier.DAY: _Shape(9.9, 3600.0, 25)}


class PastFrame(NamedTuple):
    """One report of the past, encoded as it was published."""

    seq: int
    age_s: float
    frame: bytes


class PastFrames:
    """Both tiers of a node."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        """`directory` need not exist; `boot_id` is that of this run of the machine.

        Raises:
            OSError: It cannot be made or read.
        """
        directory.mkdir(mode=0o700, exist_ok=True)
        epoch_s = _epoch_s(directory, boot_id)
        self._rings = {tier: _Ring(directory, tier, epoch_s) for tier in Tier}

    def is_due(self, now_s: float) -> bool:
        """Return whether some tier would keep a report made now."""
        return any(ring.is_due(now_s) for ring in self._rings.values())

    def append(self, frame: bytes, now_s: float, *, is_last: bool = False) -> None:
        """Keep a report where it is due, the last one everywhere.

        Raises:
            OSError: The disk is full, or the directory is gone.
        """
        for ring in self._rings.values():
            if is_last or ring.is_due(now_s):
                ring.append(frame, now_s)

    def since(
        self, tier: Tier, seq: int, max_bytes: int, max_age_s: float | None = None, period_s: float = 0.0
    ) -> list[PastFrame]:
        """Return the oldest reports after `seq`, as many as fit; the first one may have a higher number than asked.

        Args:
            tier: Which of the two.
            seq: The number of the last one that is known.
            max_bytes: Bytes of all of them together; the first one is returned whatever its size.
            max_age_s: Older ones are left out.
            period_s: Seconds of the wall clock of which only the first report is returned, and an agent's last; 0
                returns all.
        """
        return self._rings[tier].since(seq, max_bytes, math.inf if max_age_s is None else max_age_s, period_s)

    def close(self) -> None:
        """Let go of the files."""
        for ring in self._rings.values():
            ring.close()


class _Ring:
    """The files of one tier, `TIER-FIRST_SEQ.reports`."""

    def __init__(self, directory: Path, tier: Tier, epoch_s: float) -> None:
        self._directory = directory
        self._epoch_s = epoch_s
        self._tier = tier
        self._shape = _SHAPES[tier]
        paths = self._paths()
        for path in {*directory.glob(f"{tier}-*.reports")}.difference(paths):
            path.unlink(missing_ok=True)  # of an agent whose reports this one cannot read
        self._fd = -1
        self._due_at_s = self._file_ends_at_s = float("-inf")
        self._next_seq = max(1, _first_seq(paths[-1]) + sum(1 for _ in _read(paths[-1]))) if paths else 1

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._due_at_s

    def append(self, frame: bytes, now_s: float) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            return
        self._due_at_s = now_s + self._shape.period_s
        if now_s >= self._file_ends_at_s:
            self._begin_file(now_s)
        # One call, so that a kill leaves all of it or none.
        whole = _HEAD.pack(len(frame), _steady_wall_time(self._epoch_s)) + frame
        num_written = os.write(self._fd, whole)
        if num_written < len(whole):
            os.ftruncate(self._fd, os.lseek(self._fd, -num_written, os.SEEK_CUR))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._next_seq += 1

    def since(self, seq: int, max_bytes: int, max_age_s: float, period_s: float) -> list[PastFrame]:
        now = _steady_wall_time(self._epoch_s)
        found: list[PastFrame] = []
        before: float | None = None
        paths = self._paths()
        for index, path in enumerate(paths):
            if index + 1 < len(paths) and _first_seq(paths[index + 1]) <= seq + 1:
                continue
            whole = list(_read(path))
            for number, (wall_time, frame) in enumerate(whole, _first_seq(path)):
                is_thin = bool(period_s) and before is not None and wall_time // period_s == before // period_s
                is_thin &= frame is not whole[-1][1]  # an agent's last words are at a file's end
                before = wall_time
                if is_thin or number <= seq or now - wall_time > max_age_s:
                    continue
                max_bytes -= len(frame)
                if max_bytes < 0 and found:
                    return found
                found.append(PastFrame(number, max(0.0, now - wall_time), frame))
        return found

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin_file(self, now_s: float) -> None:
        self.close()
        path = self._directory / f"{self._tier}-{WIRE_VERSION}-{self._next_seq:012d}.reports"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._file_ends_at_s = now_s + self._shape.file_s
        oldest_s = _steady_wall_time(self._epoch_s) - self._shape.file_s * (self._shape.num_files - 1)
        paths = self._paths()
        for place, (old, next_path) in enumerate(pairwise(paths)):
            if _began_s(next_path) <= oldest_s or place < len(paths) - MAX_FILES:
                old.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        names = (f"{self._tier}-{version}-*.reports" for version in READABLE_VERSIONS)
        return sorted((path for name in names for path in self._directory.glob(name)), key=_first_seq)


def _epoch_s(directory: Path, boot_id: str) -> float:
    """Return the wall time at which this machine booted, as the first agent since then has seen it."""
    with contextlib.suppress(OSError, ValueError):
        kept_boot_id, kept_s = (directory / _EPOCH_FILE).read_text(encoding="ascii").split()
        if kept_boot_id == boot_id:
            return float(kept_s)
    epoch_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # noqa: TID251 - reports outlive the boot
    with contextlib.suppress(OSError):  # a full disk: the next agent has an epoch of its own
        write_record(str(directory), _EPOCH_FILE, f"{boot_id} {epoch_s!r}\n".encode())
    return epoch_s


def _steady_wall_time(epoch_s: float) -> float:
    return epoch_s + time.clock_gettime(time.CLOCK_BOOTTIME)


def _first_seq(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _began_s(path: Path) -> float:
    """Return the wall time of the first report in a file; infinity where there is none."""
    with contextlib.suppress(FileNotFoundError, struct.error), path.open("rb") as file:
        wall_time: float = _HEAD.unpack(file.read(_HEAD.size))[1]
        return wall_time
    return math.inf


def _read(path: Path) -> Iterator[tuple[float, bytes]]:
    """Yield (wall time, frame) of each whole report in a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return  # its turn to go has come
    at = 0
    while at + _HEAD.size <= len(content):
        size, wall_time = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        if at + size > len(content):
            return
        yield wall_time, content[at : at + size]
        at += size
