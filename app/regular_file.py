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


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file; never waits for a pipe.

    Raises:
        OSError: It cannot be read.
        NotRegularError: See there.
        TooLargeError: See there.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise NotRegularError
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise TooLargeError
    return content
