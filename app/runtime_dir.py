"""Where a console keeps what lives as long as itself: directories that only its user can enter."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from app.errors import SessionError

MAX_SOCKET_PATH_BYTES = 107
"""Of `sun_path`, its closing zero aside. Source: unix(7)."""
_PREFIX = "rankdeck-ssh-"
_LOCK = "lock"
_LONGEST_NAME = f"/{_PREFIX}12345678/4095/telemetry.sock"


def runtime_directory(longest_name: str) -> Path:
    """Return where sockets and other short-lived files go: $XDG_RUNTIME_DIR, else the temporary directory.

    Args:
        longest_name: The longest path of a socket below it, from its first slash.

    Raises:
        SessionError: Neither can be written, or their names are too long.
    """
    candidates = [Path(text) for text in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir()) if text]
    for candidate in candidates:
        length = len(os.fsencode(candidate)) + len(longest_name)
        if os.access(candidate, os.W_OK | os.X_OK) and length <= MAX_SOCKET_PATH_BYTES:
            return candidate
    raise SessionError(
        f"no directory for sockets: {', '.join(map(str, candidates))} cannot be written or has too long a name",
        "set TMPDIR to a writable directory with a short name, such as /tmp",
    )


class TunnelDir:
    """A 0700 directory for the near ends of tunnels. A console that was killed leaves it; the next one removes it."""

    def __init__(self) -> None:
        """Make it.

        Raises:
            SessionError: There is no place for it.
        """
        parent = runtime_directory(_LONGEST_NAME)
        try:
            _sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = self.path / "new"
            self._lock_fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)  # held before anybody can find it
        except OSError as error:
            raise SessionError(f"cannot make a directory in {parent}: {error.strerror}", "set TMPDIR") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it with all it holds; safe to call twice."""
        if self._lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _sweep(parent: Path) -> None:
    """Remove what killed consoles of this user have left: nobody holds its lock."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid != os.geteuid():
                continue
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(fd)
