"""Processes of this agent's jobs that nobody watches over any more: found by descent and by environment, and killed.

An orphan of a killed shim is reparented to the agent that started the shim, or to nobody of ours if that agent is gone
too. But launcher, ranks and what they start carry the agent's inbox and the job's id in their environment.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from agent import shim
from ddpcore.wire import ENV_ATTEMPT, ENV_INBOX, ENV_JOB_ID

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet


class Watch:
    """What is well cared for: the jobs whose shims live."""

    def __init__(
        self,
        inbox_path: str,
        shim_pids: AbstractSet[int],
        attempts: AbstractSet[tuple[str, int]],
        sampler_pids: AbstractSet[int] = frozenset(),
    ) -> None:
        """`attempts` are (job id, attempt) of those jobs; `sampler_pids` are children that serve no job."""
        self.inbox_path = inbox_path
        self.shim_pids = shim_pids
        self.attempts = attempts
        self.own_pids = frozenset(shim_pids | sampler_pids)
        """Children that somebody else collects."""


def sweep(watch: Watch) -> bool:
    """Kill what nobody watches over; return whether there was anything."""
    found = {**shim.descendants(os.getpid(), watch.own_pids), **_by_environment(watch)}
    for pid, started_ticks in found.items():
        shim.send_signal(pid, started_ticks, signal.SIGKILL)
    while ended := _next_ended_child():
        if ended in watch.own_pids:
            break  # whoever started it collects it
        os.waitpid(ended, 0)
    return bool(found)


def _by_environment(watch: Watch) -> dict[int, int]:
    """Return start time in ticks by pid."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a path object for each process is waste
        if not name.isdigit() or int(name) in watch.shim_pids:
            continue
        pid = int(name)
        fields = shim.stat_fields(pid)
        if not fields or fields[0] in b"ZX":
            continue
        environ = _environ(pid)
        if environ.get(ENV_INBOX.encode()) != os.fsencode(watch.inbox_path):
            continue
        attempt = environ.get(ENV_ATTEMPT.encode(), b"")
        job_id = environ.get(ENV_JOB_ID.encode(), b"").decode(errors="replace")
        if attempt.isdigit() and (job_id, int(attempt)) not in watch.attempts:
            found[pid] = int(fields[19])
    return found


def _environ(pid: int) -> dict[bytes, bytes]:
    """Return a process's environment; empty if it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as above
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def _next_ended_child() -> int:
    """Return the pid of a child that has ended and is not collected yet, 0 if there is none."""
    try:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return ended.si_pid if ended else 0
