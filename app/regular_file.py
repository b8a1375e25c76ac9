"""Files of a person, read with care: what is none, is too large or would keep us waiting is refused."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NotRegularError(ValueError):
    """It is a directory, a pipe or a device."""


class TooLargeError(ValueError):
    """It holds more than it may."""


class ForeignFileError(ValueError):
    """Somebody else may write it."""


def read_regular_file(path: Path, max_bytes: int, *, is_own: bool = False) -> bytes:
    """Return the content of a file; never waits for a pipe.

    Args:
        path: Where it is.
        max_bytes: A larger one is refused.
        is_own: So is one that others than this user and root may write.

    Raises:
        OSError: It cannot be read.
        NotRegularError: See there.
        TooLargeError: See there.
        ForeignFileError: See there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularError
        if is_own and (status.st_uid not in {0, os.geteuid()} or status.st_mode & stat.S_IWOTH):
            raise ForeignFileError
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TooLargeError
    return content
