"""Opens files that ranks may have made: what a rank leaves in its directory is as hostile as its program."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def open_regular(path: Path) -> int:
    """Open a file to read it and return its descriptor: a planted link leads nowhere, a planted pipe is not waited for.

    Raises:
        OSError: It cannot be opened, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a file", str(path))
