"""What the agent writes down of a command that changes something: one line of ASCII JSON, without a secret.

Of what a command holds only the fields that are named here get into a line, texts cut short: never an environment, and
a command line only masked. A refusal's message stays out, since it may quote other processes' command lines.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from agent.wire.commands import (
    Abort,
    Claim,
    CleanLeftovers,
    Command,
    Commit,
    InjectFault,
    Kill,
    Prepare,
    PrepareAgain,
    Shutdown,
    Stop,
)
from agent.wire.replies import Leftovers, Refused, Reply
from agent.wire.secret_mask import masked_argv

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from agent.roads.peer import Peer

MAX_TEXT_CHARS = 256
MAX_NAMES = 16
"""Of leftovers, in one line."""

_SHARE = ("attempt", "first_rank", "local_world_size", "world_size", "num_nodes", "node_rank")
_FIELDS: dict[type[Command], tuple[str, ...]] = {
    Claim: ("generation", "holder"),
    Prepare: (),
    PrepareAgain: ("job_id", *_SHARE),
    Commit: ("job_id",),
    Abort: ("job_id",),
    Stop: ("job_id", "is_agreed"),
    Kill: ("job_id",),
    InjectFault: ("job_id", "kind", "rank", "at_step", "factor", "duration_s"),
    CleanLeftovers: ("is_confirmed",),
    Shutdown: ("kill_jobs",),
}
_SPEC_FIELDS = ("job_id", *_SHARE, "workdir", "max_restarts", "allow_faults")


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
        **_telling(command),
        **_outcome(reply),
        "node": node,
        "uid": peer.uid,
        "user": user,
        "pid": peer.pid,
        "process": peer.process,
        **({"road": peer.road} if peer.road else {}),
    }
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"


def _telling(command: Command) -> dict[str, Any]:
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
