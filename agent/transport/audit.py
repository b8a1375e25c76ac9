"""The agent's audit log: which commands changed this node's jobs or its agent, by whom and when.

`audit_line` makes one line of ASCII JSON without a secret, for each command that changes something. Only the fields of
a command that are named here get into a line, texts cut short: never an environment, and a command line only masked. A
refusal's message stays out, since it may quote other processes' command lines.

`AuditLog` appends the lines to `audit.jsonl`, which is bounded and for this user alone. A log that cannot be written
hinders no command: that is reported once, and the next line that can be written is preceded by one that holds how many
are missing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import shlex
import stat
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from agent.errors import log_line
from agent.wire.commands import (
    Abort,
    Claim,
    CleanLeftovers,
    Command,
    Commit,
    InjectFault,
    Kill,
    Leftovers,
    Prepare,
    PrepareAgain,
    Refused,
    Reply,
    Shutdown,
    Stop,
)
from agent.wire.secret_mask import masked_argv

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from agent.transport.command_socket import Peer

MAX_TEXT_CHARS = 256
MAX_NAMES = 16
"""Names of leftovers in one line."""

_ASSIGNMENT = ("attempt", "first_rank", "local_world_size", "world_size", "num_nodes", "node_rank")
_FIELDS: dict[type[Command], tuple[str, ...]] = {
    Claim: ("generation", "holder"),
    Prepare: (),
    PrepareAgain: ("job_id", *_ASSIGNMENT),
    Commit: ("job_id",),
    Abort: ("job_id",),
    Stop: ("job_id", "is_agreed"),
    Kill: ("job_id",),
    InjectFault: ("job_id", "kind", "rank", "at_step", "factor", "duration_s"),
    CleanLeftovers: ("is_confirmed",),
    Shutdown: ("kill_jobs",),
}
_SPEC_FIELDS = ("job_id", *_ASSIGNMENT, "workdir", "max_restarts", "allow_faults")


def changes_something(command: Command) -> bool:
    """Return whether a command is written down; those that only look are not."""
    return type(command) in _FIELDS


def audit_line(command: Command, reply: Reply | None, peer: Peer, user: str, node: str, at: datetime) -> bytes:
    """Return the line of a command that changes something, its newline included.

    Args:
        command: What was asked.
        reply: What was answered; None where the agent ended before it knew.
        peer: Who asked.
        user: The name of the peer's uid; empty if it has none.
        node: What consoles call this node.
        at: When it was answered, in UTC.
    """
    entry = {
        "time": at.isoformat(timespec="milliseconds"),
        "command": command.__struct_config__.tag,
        **_details(command),
        **_outcome(reply),
        "node": node,
        "uid": peer.uid,
        "user": user,
        "pid": peer.pid,
        "process": peer.process,
        **({"road": peer.channel} if peer.channel else {}),
    }
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


def _details(command: Command) -> dict[str, Any]:
    fields = _picked(command, _FIELDS[type(command)])
    if isinstance(command, Prepare):
        program = shlex.join(masked_argv(command.spec.command))
        return {**_picked(command.spec, _SPEC_FIELDS), "program": program[:MAX_TEXT_CHARS]}
    if isinstance(command, CleanLeftovers):
        fields["names"] = _few(command.names)
    return fields


def _picked(source: object, names: Iterable[str]) -> dict[str, Any]:
    found = ((name, getattr(source, name)) for name in names)
    return {
        name: value[:MAX_TEXT_CHARS] if isinstance(value, str) else value for name, value in found if value is not None
    }


def _outcome(reply: Reply | None) -> dict[str, Any]:
    if reply is None:
        return {"outcome": "unknown"}
    if isinstance(reply, Refused):
        return {"outcome": "refused", "reason": reply.reason}
    if isinstance(reply, Leftovers):
        return {"outcome": "accepted", "num_cleaned": len(reply.items), "cleaned": _few(i.name for i in reply.items)}
    return {"outcome": "accepted"}


def _few(names: Iterable[str]) -> list[str]:
    return [name[:MAX_TEXT_CHARS] for name in names][:MAX_NAMES]


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
                log_line(f"what is done here is not written down: {self._path}: {error.strerror}: make room")
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
