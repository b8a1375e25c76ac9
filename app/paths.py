"""The console's directories, its limit of open files, and safe reading of a user's files.

`state_directory` is for files that stay: `$XDG_STATE_HOME/rankdeck`. `TunnelDir` and `runtime_directory` are for files
that live as long as the console: directories that only its user can enter.

`make_room_for_nodes` raises this process's limit of open files. `read_regular_file` refuses a file that is not regular,
is too large, or would block.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Self

from app.errors import SessionError


def state_directory() -> Path:
    """Return the state directory; it need not exist. Source: XDG base directory specification.

    Raises:
        SessionError: This user has no home.
    """
    home = os.environ.get("XDG_STATE_HOME", "")
    if home.startswith("/"):
        return Path(home) / "rankdeck"
    try:
        return Path.home() / ".local" / "state" / "rankdeck"
    except RuntimeError as error:
        raise SessionError("this user has no home", "set HOME, or XDG_STATE_HOME") from error


MAX_SOCKET_PATH_BYTES = 107
"""Bytes of `sun_path` without its closing zero. Source: unix(7)."""
_PREFIX = "rankdeck-ssh-"
_LOCK = "lock"
_LONGEST_NAME = f"/{_PREFIX}12345678/4095/control.sock"


def runtime_directory(longest_name: str) -> Path:
    """Return the directory for sockets and other short-lived files: $XDG_RUNTIME_DIR, else the temporary directory.

    Args:
        longest_name: The longest path of a socket below the directory, from its first slash.

    Raises:
        SessionError: Neither directory is writable, or their names are too long.
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
    """A 0700 directory for the local ends of tunnels. The next console removes what a killed one left."""

    def __init__(self) -> None:
        """Create the directory.

        Raises:
            SessionError: No directory can hold it.
        """
        parent = runtime_directory(_LONGEST_NAME)
        try:
            _sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = self.path / "new"
            self._lock_fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)  # locked before another console can find it
        except OSError as error:
            raise SessionError(f"cannot make a directory in {parent}: {error.strerror}", "set TMPDIR") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory with its content; safe to call twice, from two threads at once, too."""
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(lock_fd)


def _sweep(parent: Path) -> None:
    """Remove this user's directories whose lock nobody holds: their consoles were killed."""
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


FILES_A_NODE = 12
"""Open files per node: its report socket and its agent connection; over SSH the connection, two listeners and their
connections."""
SPARE_FILES = 256
LEAST_FILES_A_NODE, LEAST_FILES = 6, 28
"""Open files below which a console is refused. With two hosts it was seen to work from 40 on; with fewer an import or
libzmq gets none. Source: libzmq's epoll.cpp ends the process then."""


def make_room_for_nodes(num_nodes: int, least_a_node: int = LEAST_FILES_A_NODE) -> None:
    """Raise the limit of open files for so many nodes, as far as this user may: it is often 1,024.

    Args:
        num_nodes: Number of hosts.
        least_a_node: Files without which a console cannot work, for each node.

    Raises:
        SessionError: The limit that this user may have is too low for them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_A_NODE * num_nodes + SPARE_FILES
    if resource.RLIM_INFINITY in (soft, hard) or soft >= wanted:
        return
    limit, needed = min(wanted, hard), least_a_node * num_nodes + LEAST_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        reason = f"at most {limit} open files are allowed here, and {num_nodes} hosts need {needed}"
        raise SessionError(reason, f"ulimit -n {wanted}, or ask the administrator for a higher limit")


class NotRegularError(ValueError):
    """The file is a directory, a pipe or a device."""


class TooLargeError(ValueError):
    """The file is larger than `max_bytes`."""


class ForeignFileError(ValueError):
    """Another user owns or can write the file."""


def read_regular_file(path: Path, max_bytes: int, *, is_own: bool = False) -> bytes:
    """Return the content of a file; never blocks on a pipe.

    Args:
        path: The file.
        max_bytes: Limit; a larger file is refused.
        is_own: Whether a file that others than this user and root can write is refused.

    Raises:
        OSError: The file cannot be read.
        NotRegularError: The file is a directory, a pipe or a device.
        TooLargeError: The file is larger than `max_bytes`.
        ForeignFileError: Another user owns or can write the file.
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
