"""`audit.jsonl`: what was done to this node's jobs and to its agent, by whom and when; for this user alone, bounded.

A log that cannot be written hinders no command: that is said once, and the next line that can be written is preceded by
one that says how many are missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import stat
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent.roads.audit_lines import audit_line, changes_something
from agent.saying import say

if TYPE_CHECKING:
    from pathlib import Path

    from agent.roads.peer import Peer
    from agent.wire.commands import Command
    from agent.wire.replies import Reply

AUDIT_FILE = "audit.jsonl"
MAX_AUDIT_BYTES = 4 * 2**20
"""Some ten thousand commands; what is full becomes `audit.jsonl.1`."""


class AuditLog:
    """Appends to a file that nobody else writes: the agent's directory is locked."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node
        self._uid = os.geteuid()
        self._user = ""
        with contextlib.suppress(KeyError):  # a container's user may have no name
            self._user = pwd.getpwuid(self._uid).pw_name
        self.num_lost = 0
        """Lines that could not be written since the last one that could."""

    def add(self, command: Command, reply: Reply | None, peer: Peer) -> None:
        """Write a command down if it changes something; `reply` None is one that nobody answers any more."""
        if not changes_something(command):
            return
        now = datetime.now(UTC)
        line = audit_line(command, reply, peer, self._user if peer.uid == self._uid else "", self._node, now)
        if self.num_lost:
            lost = {"time": now.isoformat(timespec="milliseconds"), "num_lost": self.num_lost}
            line = json.dumps(lost, separators=(",", ":")).encode() + b"\n" + line
        try:
            append(self._path, line)
        except OSError as error:
            if not self.num_lost:
                say(f"what is done here is not written down: {self._path}: {error.strerror}: make room")
            self.num_lost += 1
        else:
            self.num_lost = 0


def append(path: Path, line: bytes) -> None:
    """Append to a file all of a line or nothing, after it has made room for a new one when it is full.

    Raises:
        OSError: The disk takes nothing more, or the path is no file of ours.
    """
    with contextlib.suppress(FileNotFoundError):
        if path.lstat().st_size + len(line) > MAX_AUDIT_BYTES:
            path.replace(path.with_name(f"{path.name}.1"))
    # Ranks run as this user: what they may have put there is not followed, and not waited for.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        if os.write(fd, line) < len(line):
            os.ftruncate(fd, before.st_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(fd)
