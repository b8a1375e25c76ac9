"""Whether a file is still what it was when it was read: what many hosts need of it is worked out once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

SETTLED_S = 2.0
"""A file that was changed less long ago may change again without its times and its size telling."""


class FileState(NamedTuple):
    """What changes with a file's contents."""

    path: str
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @property
    def is_settled(self) -> bool:
        """True when a later change will show."""
        return self.inode == 0 or time.time_ns() - self.changed_ns > SETTLED_S * 1e9


def state_of(path: str) -> FileState:
    """Return how a file is now; zeros where there is none, or none that can be looked at."""
    try:
        seen = Path(path).stat()
    except OSError:
        return FileState(path, 0, 0, 0, 0, 0)
    return FileState(path, seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns)
