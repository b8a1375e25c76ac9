"""Whether the main thread works while a collective is under way: the kernel shows what it sleeps in.

A rank that waits in a collective sleeps in a futex. Backward that goes on beside DDP's reductions runs, a program that
sleeps or reads a file does so in another system call. A thread that waits for the interpreter's lock sleeps in a futex
too, and seems to wait for the collective.
"""

from __future__ import annotations

import os
import platform

FUTEX_CALLS = {"x86_64": (b"202", b"449"), "aarch64": (b"98", b"449")}
"""Numbers of futex and futex_waitv (Source: Linux, arch/x86/entry/syscalls/syscall_64.tbl, asm-generic/unistd.h)."""

MAX_BYTES = 64


class MainThread:
    """What the kernel says of a thread of this process; half a microsecond a look.

    Args:
        native_id: The thread, by the kernel's number.
    """

    def __init__(self, native_id: int | None) -> None:
        self._futex_calls = FUTEX_CALLS.get(platform.machine(), ())
        self._file: int | None = None
        if native_id is not None and self._futex_calls:
            try:
                self._file = os.open(f"/proc/self/task/{native_id}/syscall", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._file = None  # a kernel without it, or one that does not let us

    def is_at_work(self) -> bool:
        """Return whether the thread runs, or sleeps in anything but a futex; False where that is not known."""
        if self._file is None:
            return False
        try:
            call = os.pread(self._file, MAX_BYTES, 0).split(maxsplit=1)
        except OSError:
            return False
        return bool(call) and call[0] not in self._futex_calls
