"""Whether there is room for logs: a rank whose output cannot be written loses it, or ends of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec

from agent.errors import log_line
from agent.logs.traceback_text import FailureText, FoundFailure
from agent.wire.jobs import ENDED_STATES

if TYPE_CHECKING:
    from pathlib import Path

    from agent.wire.jobs import JobStatus

PERIOD_S = 1.0
"""Seconds between looks."""
FULL = "disk full"
LITTLE_BYTES = 64 * 2**20
"""Bytes that leave an operator time: at 1 MB/s, a minute."""
NONE_BYTES = 64 * 1024
"""Less cannot be counted on: file systems keep some blocks to themselves."""


class LogSpace:
    """The room on the disk of the logs, looked at now and then."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at_s = float("-inf")
        self.warning = ""
        """Text for no room, or little; empty when there is enough."""

    def look(self, now_s: float) -> None:
        """Look, if it is time to."""
        if now_s - self._looked_at_s < PERIOD_S or not self._path.exists():
            return
        self._looked_at_s = now_s
        warning = space_text(self._path)
        if warning and not self.warning:
            log_line(warning)
        self.warning = warning

    def failure_of(self, rank: int) -> FoundFailure | None:
        """Return what explains that a rank failed and left no word: there is no room for one; None when there is."""
        if not space_text(self._path).startswith(FULL):
            return None
        return FoundFailure(FailureText(exception="disk full: what it wrote of its end is lost"), rank)

    def with_warning(self, status: JobStatus) -> JobStatus:
        """Return a job's status; of a job that has not ended, with the warning that its logs have no room."""
        if not self.warning or status.state in ENDED_STATES:
            return status
        detail = f"{status.detail}; {self.warning}" if status.detail else self.warning
        return msgspec.structs.replace(status, detail=detail[:4096])


def space_text(path: Path) -> str:
    """Return a text if logs have no room, or soon none; else an empty one."""
    try:
        disk = os.statvfs(path)
    except OSError as error:
        return f"the disk of the logs cannot be looked at ({error.strerror}): {path}"
    free_bytes = disk.f_bavail * disk.f_frsize
    if free_bytes < NONE_BYTES or (disk.f_files and not disk.f_favail):
        return f"{FULL}: what ranks print is lost, and a print may end its rank; make room at {path}"
    if free_bytes < LITTLE_BYTES:
        return f"disk nearly full: {free_bytes / 2**20:.0f} MiB left for logs at {path}"
    return ""
