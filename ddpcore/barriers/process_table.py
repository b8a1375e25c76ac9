"""What the kernel says of processes: is another rank of this machine running, stopped, or gone.

Linux's /proc. Where it cannot tell, the answer is `UNKNOWN`, never a guess.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ddpcore.barriers.whereabouts import ProcessState

_STATE = 0
_START_TIME = 19
"""Fields of /proc/PID/stat after the command, proc_pid_stat(5): the third and the 22nd of all."""


def this_machine() -> str:
    """Return a name that two processes share if they see the same process numbers; empty where /proc does not tell."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def started_ticks(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks; 0 if that is not known."""
    fields = _stat(pid)
    return int(fields[_START_TIME]) if fields else 0


def ticks_now() -> int:
    """Return the time in the same ticks: a process was started earlier or later than this."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def process_state(pid: int, started: int) -> ProcessState:
    """Return the state of a process of this machine.

    Args:
        pid: Its number.
        started: Its `started_ticks`, since numbers are used again; 0 is not known.
    """
    if not started:
        return ProcessState.UNKNOWN
    fields = _stat(pid)
    if fields is None or int(fields[_START_TIME]) != started or fields[_STATE] in "ZX":
        return ProcessState.GONE
    return ProcessState.STOPPED if fields[_STATE] in "Tt" else ProcessState.RUNNING


def _stat(pid: int) -> list[str] | None:
    """Return the fields after the command, which may hold anything; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()
