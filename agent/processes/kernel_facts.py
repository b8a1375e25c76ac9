"""What the kernel says of a process that cannot speak for itself."""

from __future__ import annotations

import time
from pathlib import Path

from agent.processes import shim
from agent.wire.stacks import MAX_KERNEL_FRAMES, KernelFacts

_MAX_BYTES = 8192
_MAX_CHARS = 256
STOPPED_LOOKS, STOPPED_PAUSE_S = 5, 0.1
"""For so long a tracer may hold a process that only looks at it."""


def kernel_facts(pid: int) -> KernelFacts | None:
    """Return what /proc says of a process, as far as this user may read it; None when it has ended."""
    fields = shim.stat_fields(pid)
    if not fields or fields[0] in b"ZX":
        return None
    wchan = _read(pid, "wchan").strip()
    number = _read(pid, "syscall").partition(" ")[0]
    # "[<0>] futex_wait_queue+0x60/0x90": the address is hidden, the offset says nothing to people.
    frames = [line.partition("] ")[2].partition("+")[0] for line in _read(pid, "stack").splitlines()]
    return KernelFacts(
        state=fields[0].decode("ascii", "replace"),
        wchan="" if wchan == "0" else wchan[:_MAX_CHARS],
        syscall=int(number) if number.isascii() and number.isdigit() else None,
        stack=[frame[:_MAX_CHARS] for frame in frames if frame][:MAX_KERNEL_FRAMES],
    )


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, or by a debugger that does more than look: state T, or t."""
    for _ in range(STOPPED_LOOKS):
        letter = b"".join(shim.stat_fields(pid)[:1])
        if letter != b"t":
            return letter == b"T"
        time.sleep(STOPPED_PAUSE_S)
    return True


def has_uninterruptible_thread(pid: int) -> bool:
    """Return whether a thread of a process waits in the kernel so that nobody can stop it now: state D."""
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(shim.stat_fields(thread)[:1] == [b"D"] for thread in threads)


def _read(pid: int, name: str) -> str:
    """Return a small file of a process; empty where this user may not read it, or the process is gone."""
    try:
        with Path(f"/proc/{pid}/{name}").open("rb") as file:
            return file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
