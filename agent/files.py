"""Opens and locks files with care: flock as a sign of life, and regular files that hostile ranks may have made.

`try_lock` and `is_locked`: a lock shows that its holder lives; it is held by an open description and gone with its last
holder.

`open_regular` and `read_regular`: what a rank leaves in its directory is as hostile as its program.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def try_lock(fd: int) -> bool:
    """Take the lock of an open file if nobody holds it; return whether it was taken."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether anybody holds the lock of a file; it is nobody's while there is no such file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def open_regular(path: Path) -> int:
    """Open a regular file to read it and return its descriptor, else raise OSError.

    A planted link leads nowhere, a planted pipe is not waited for.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the beginning of a regular file, else raise OSError."""
    fd = open_regular(path)
    try:
        return os.pread(fd, max_bytes, 0)
    finally:
        os.close(fd)
