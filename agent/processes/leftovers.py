"""Processes of this agent's jobs that nobody watches over any more: found by descent and by environment, and killed.

An orphan of a killed shim is reparented to the agent that started the shim, or to nobody of ours if that agent is gone
too. But launcher, ranks and what they start carry the agent's inbox and the job's id in their environment. What lives
below a shim is never touched, whatever this agent knows of it.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from agent.processes import shim
from agent.processes.shim_process import is_shim
from ddpcore.wire import ENV_INBOX, ENV_JOB_ID

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

ANYBODYS = ""
"""In the place of a job's id: a process below this agent without a job's mark."""
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
"""Between looks at something that does not die: it sits in a driver, or is another user's by now."""


class Leftovers:
    """What is to be ended, and what of it is still there."""

    def __init__(self, inbox_path: str) -> None:
        """Call it before this process has children of its own."""
        self._inbox_path = inbox_path
        # Below init, or below a shell that became this agent, live others: there only marks count.
        self._owns_all_below = os.getpid() != 1 and not shim.descendants(os.getpid())
        self._suspects: set[str] = set()
        """Jobs that may have left something, until a sweep finds nothing of theirs."""
        self._pause_s = FIRST_PAUSE_S
        self._due_at_s = float("-inf")

    def suspect(self, job_id: str) -> None:
        """Look for what a job may have left, from the next sweep on."""
        self._suspects.add(job_id)
        self._pause_s, self._due_at_s = FIRST_PAUSE_S, float("-inf")

    def may_have(self, job_id: str) -> bool:
        """Return whether something of a job may still live beside or after its shim."""
        return job_id in self._suspects or ANYBODYS in self._suspects

    @property
    def is_clean(self) -> bool:
        """True when there is nothing to look for."""
        return not self._suspects

    def sweep(self, own_pids: AbstractSet[int], now_s: float) -> None:
        """Kill what nobody watches over, if it is time to look and there is reason to.

        Args:
            own_pids: Children of this process that are well cared for: shims and samplers.
            now_s: Of the monotonic clock.
        """
        if not self._suspects or now_s < self._due_at_s:
            return
        found = sweep(self._inbox_path, own_pids, owns_all_below=self._owns_all_below)
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s) if found == self._suspects else FIRST_PAUSE_S
        self._suspects, self._due_at_s = found, now_s + self._pause_s


def sweep(inbox_path: str, own_pids: AbstractSet[int], *, owns_all_below: bool) -> set[str]:
    """Kill what nobody watches over; return the ids of the jobs it was of.

    Args:
        inbox_path: The mark of this agent's jobs.
        own_pids: As in `Leftovers.sweep`.
        owns_all_below: Whatever lives below this process is an orphan of its jobs, marked or not.
    """
    below = shim.descendants(os.getpid(), frozenset(own_pids)) if owns_all_below else {}
    found = {pid: (started_ticks, ANYBODYS) for pid, started_ticks in below.items()} | _marked(inbox_path, own_pids)
    for pid, (started_ticks, _) in found.items():
        shim.send_signal(pid, started_ticks, signal.SIGKILL)
    while ended := _next_ended_child():
        if ended in own_pids:
            break  # whoever started it collects it
        os.waitpid(ended, 0)
    return {job_id for _, job_id in found.values()}


def _marked(inbox_path: str, own_pids: AbstractSet[int]) -> dict[int, tuple[int, str]]:
    """Return start time in ticks and job id by pid, of processes with our mark and no shim above them."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a path object for each process is waste
        if not name.isdigit():
            continue
        pid = int(name)
        fields = shim.stat_fields(pid)
        if not fields or fields[0] in b"ZX":
            continue
        environ = _environ(pid)
        if environ.get(ENV_INBOX.encode()) == os.fsencode(inbox_path) and not _is_below_a_shim(pid, own_pids):
            found[pid] = (int(fields[19]), environ.get(ENV_JOB_ID.encode(), b"").decode(errors="replace"))
    return found


def _is_below_a_shim(pid: int, own_pids: AbstractSet[int]) -> bool:
    """Return whether a process is a shim or has one above it."""
    while pid > 1:
        if pid in own_pids or is_shim(pid):
            return True
        fields = shim.stat_fields(pid)
        pid = int(fields[1]) if fields else 0
    return False


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
