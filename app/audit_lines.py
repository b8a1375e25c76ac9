"""What is written down of a thing that a person has done to jobs or agents: one line of ASCII JSON. Pure."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.secret_mask import masked_argv, masked_text
from app.safe_text import clean

if TYPE_CHECKING:
    from datetime import datetime

MAX_SENTENCE_CHARS = 1024
MAX_HOSTS = 64
"""In one line; of more the number is told."""


class Act(NamedTuple):
    """One thing that is done.

    Attributes:
        action: `start`, `stop`, `kill`, `restart`, `fault`, `up`, `down` or `install`.
        hosts: Where.
        job_id: Empty where it is about an agent.
        program: What a start starts.
    """

    action: str
    hosts: tuple[str, ...]
    job_id: str = ""
    program: tuple[str, ...] = ()


def audit_line(act: Act, sentence: str, *, is_done: bool, who: str, at: datetime) -> bytes:
    """Return a line, its newline included; what looks like a secret is masked.

    Args:
        act: What, and where.
        sentence: How it went, for people.
        is_done: False if some or all of it failed.
        who: `user@host`.
        at: When, in UTC.
    """
    entry = {
        "time": at.isoformat(timespec="milliseconds"),
        "who": who,
        "action": act.action,
        "hosts": [clean(host) for host in act.hosts[:MAX_HOSTS]],
        "num_hosts": len(act.hosts),
    }
    if act.job_id:
        entry["job_id"] = clean(act.job_id)
    if act.program:
        entry["program"] = clean(shlex.join(masked_argv(act.program)))
    entry["outcome"] = "done" if is_done else "failed"
    entry["sentence"] = clean(masked_text(sentence), MAX_SENTENCE_CHARS)
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"
