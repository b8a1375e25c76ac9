"""The console's audit log: which actions on jobs and agents were taken from this machine, by whom and when.

`audit_line` formats an action (`AuditedAction`) as one line of ASCII JSON.

`AuditLog` appends to `$XDG_STATE_HOME/rankdeck/audit.jsonl`: the actions of this user from this machine; only this user
may read it. Several consoles write it at the same time: each line is one append, and only the holder of the lock of a
full file renames it. A log that cannot be written is reported once, and blocks no action.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import shlex
import socket
import stat
import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.secret_mask import masked_argv, masked_text
from app.errors import AppError
from app.paths import state_directory
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

MAX_SENTENCE_CHARS = 1024
MAX_HOSTS = 64
"""Hosts named in one line; `num_hosts` counts all of them."""


class AuditedAction(NamedTuple):
    """One action.

    Attributes:
        action: `start`, `stop`, `kill`, `restart`, `fault`, `signal`, `up`, `down` or `install`.
        hosts: Where it is taken.
        job_id: Empty where it concerns an agent.
        program: Command that a start runs.
    """

    action: str
    hosts: tuple[str, ...]
    job_id: str = ""
    program: tuple[str, ...] = ()


def audit_line(audited: AuditedAction, sentence: str, *, is_done: bool, who: str, at: datetime) -> bytes:
    """Return a line with its newline; what looks like a secret is masked.

    Args:
        audited: The action, and where it was taken.
        sentence: Its outcome, for users.
        is_done: False if some or all of it failed.
        who: `user@host`.
        at: When, in UTC.
    """
    entry = {
        "time": at.isoformat(timespec="milliseconds"),
        "who": who,
        "action": audited.action,
        "hosts": [clean(host) for host in audited.hosts[:MAX_HOSTS]],
        "num_hosts": len(audited.hosts),
    }
    if audited.job_id:
        entry["job_id"] = clean(audited.job_id)
    if audited.program:
        entry["program"] = clean(shlex.join(masked_argv(audited.program)))
    entry["outcome"] = "done" if is_done else "failed"
    entry["sentence"] = clean(masked_text(sentence), MAX_SENTENCE_CHARS)
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


MAX_AUDIT_BYTES = 4 * 2**20
"""Size limit of the file, some ten thousand lines; a full file becomes `audit.jsonl.1`."""
_UNDONE = "left before it was known how it went"


def default_path() -> Path:
    """Return the path of this user's audit log."""
    return state_directory() / "audit.jsonl"


class AuditLog:
    """Appends the actions of a user; may be called from any thread."""

    def __init__(self, path: Path | None) -> None:
        """`path` None writes nothing."""
        self._path = path
        self._notices: list[str] = []
        self._has_warned = False
        self._lock = threading.Lock()

    def add(self, audited: AuditedAction, sentence: str, *, is_done: bool = True) -> None:
        """Append an action and its outcome."""
        if self._path is None:
            return
        line = audit_line(audited, sentence, is_done=is_done, who=_who(), at=datetime.now(UTC))
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _append(self._path, line)
        except OSError as error:
            with self._lock:
                if not self._has_warned:
                    problem = f"what is done is not written down: {self._path}: {error.strerror}"
                    self._notices.append(clean(problem, LINE_LIMIT))
                self._has_warned = True

    async def kept(self, audited: AuditedAction, doing: Awaitable[str]) -> str:
        """Await an action, log its outcome, and return the sentence about it.

        Raises:
            AppError: As `doing` does.
        """
        outcome, is_done = _UNDONE, False
        try:
            outcome = await doing
            is_done = True
        except AppError as error:
            outcome = error.whole
            raise
        finally:
            self.add(audited, outcome, is_done=is_done)
        return outcome

    def drain_notices(self) -> list[str]:
        """Return why the log cannot be written, once."""
        notices, self._notices = self._notices, []
        return notices


def _who() -> str:
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # a container's user may have none
        name = str(uid)
    return f"{name}@{socket.gethostname()}"


def _append(path: Path, line: bytes) -> None:
    """Append a line, to a new file if this one is full.

    Raises:
        OSError: The disk takes nothing more, or the path is no file.
    """
    fd = _opened(path)
    try:
        if os.fstat(fd).st_size + len(line) > MAX_AUDIT_BYTES and _make_room(path, fd):
            os.close(fd)
            fd = _opened(path)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # a full disk, or the end of a machine, has cut the last one
        if os.write(fd, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    # O_NONBLOCK: opening a pipe at this path must not block.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def _make_room(path: Path, fd: int) -> bool:
    """Rename a full file, unless another console is faster; return whether the path now has another file."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # the lock's holder renames it; lines appended until then go along
    try:
        is_here = os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        is_here = False
    if is_here:
        path.replace(path.with_name(f"{path.name}.1"))
    return True
