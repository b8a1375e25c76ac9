"""Where evidence is kept: `$XDG_STATE_HOME/rankdeck/evidence`, for this user alone, the newest files only."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import tempfile
from pathlib import Path

from app.errors import SessionError
from app.state_home import state_directory

MAX_FILES = 20
MAX_BYTES = 2**30
"""Of all files together; the newest one is kept whatever its size."""
_NAME = re.compile(r"-\d{8}-\d{6}(-\d+)?\.zip\Z")
"""What `bundle_name` makes, and `write_evidence` of it."""


def default_directory() -> Path:
    """Return where evidence goes unless a person says otherwise."""
    return state_directory() / "evidence"


def check_directory(directory: Path) -> None:
    """Make a directory for evidence, or see that it can be written.

    Raises:
        SessionError: It cannot.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise SessionError(
            f"evidence cannot be kept in {directory}: {error.strerror}", "name another place with --evidence"
        ) from error


def write_evidence(path: Path, content: bytes) -> Path:
    """Write a file whole or not at all, beside one of the same name if there is one; return where it is.

    Raises:
        SessionError: It cannot be written; nothing is left of it.
    """
    made = place = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd, made = tempfile.mkstemp(prefix=".evidence-", dir=path.parent)  # 0600
        with os.fdopen(fd, "wb") as file:
            file.write(content)
        place = _reserved(path)
        Path(made).replace(place)
    except OSError as error:
        if place is not None:
            place.unlink(missing_ok=True)
        raise SessionError(
            f"evidence cannot be written to {path}: {error.strerror}", "name another place: --output, --evidence"
        ) from error
    finally:
        if made is not None:
            Path(made).unlink(missing_ok=True)
    return place


def prune(directory: Path) -> None:
    """Remove the oldest evidence of a directory, so that it stays within its bounds; what has another name stays."""
    found = (path for path in directory.glob("*.zip") if _NAME.search(path.name) and not path.is_symlink())
    files = [(path.stat(), path) for path in found if path.is_file()]
    files.sort(key=lambda one: one[0].st_mtime, reverse=True)
    num_bytes = 0
    for index, (status, path) in enumerate(files):
        num_bytes += status.st_size
        if index and (index >= MAX_FILES or num_bytes > MAX_BYTES):
            with contextlib.suppress(OSError):
                path.unlink()


def _reserved(path: Path) -> Path:
    """Take a name, or the next one that is free, and return it: evidence never takes another file's place."""
    for number in range(1, 1000):
        free = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        with contextlib.suppress(FileExistsError):
            free.touch(mode=0o600, exist_ok=False)
            return free
    raise FileExistsError(errno.EEXIST, "there are a thousand of that name", str(path))
