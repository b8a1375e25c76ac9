"""Programs that make one signal of a process rise, and how to wait until the kernel shows it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from agent.processes.memory_reader import MemoryReader
from agent.processes.signal_reader import SignalReader
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.node_state.observations import RankSignals
    from agent.wire.signals import Signal

PATIENCE_S = 60.0
BUSY = "while True: pass"
SLEEPS = "import time\nwhile True: time.sleep(0.05)"
# The child of a vfork shares its parent's memory, so it may only call what touches none: the parent is in D until then.
VFORK_C = """
#include <unistd.h>
int main(void) { for (;;) { if (vfork() == 0) { sleep(60); _exit(0); } } }
"""
PAGES = 512
FAULTS = f"""
import mmap, os, sys
path, evicts = sys.argv[1], sys.argv[2] == "evicts"
fd = os.open(path, os.O_RDWR | os.O_CREAT)
os.write(fd, bytes({PAGES} * mmap.PAGESIZE))
os.fsync(fd)
while True:
    if evicts:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(fd, {PAGES} * mmap.PAGESIZE, prot=mmap.PROT_READ) as pages:
        pages.madvise(mmap.MADV_RANDOM)
        sum(pages[at] for at in range(0, len(pages), mmap.PAGESIZE))
"""


@contextlib.contextmanager
def running(*argv: str, cpus: set[int] | None = None) -> Iterator[int]:
    """Run a program, on these CPUs, until the end of the block; yield its pid."""
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    if cpus is not None:
        os.sched_setaffinity(process.pid, cpus)
    try:
        yield process.pid
    finally:
        for child in _children(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, 9)
        process.kill()
        process.wait()


@contextlib.contextmanager
def python(text: str, *args: str, cpus: set[int] | None = None) -> Iterator[int]:
    """Run a Python program until the end of the block; yield its pid."""
    with running(sys.executable, "-S", "-c", text, *args, cpus=cpus) as pid:
        yield pid


class Watched:
    """A process as the agent samples it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._reader, self._memory = SignalReader(pid), MemoryReader(pid)

    def values(self) -> dict[Signal, float]:
        """Return the signals of the next sample."""
        return self._sample().values

    def has(self, signal: Signal, least: float, *, num: int = 3) -> bool:
        """Return whether a signal comes to this in a few samples, one after the other."""
        return any(all(self.values().get(signal, 0.0) >= least for _ in range(2)) for _ in range(num))

    def most(self, signal: Signal, num: int = 3) -> float:
        """Return the largest value in a few samples, without the first, which has no rates."""
        self.values()
        return max(self.values()[signal] for _ in range(num))

    def tree_cpu_s(self) -> float:
        """Return the CPU time of the process and its children as of the next sample."""
        return self._sample().tree_cpu_s

    def _sample(self) -> RankSignals:
        found = until(self._look, PATIENCE_S, "a sample")
        assert found is not None
        return found

    def _look(self) -> RankSignals | None:
        now_s = time.monotonic()
        self._memory.read(now_s)
        line = Path(f"/proc/{self._pid}/stat").read_bytes()
        return self._reader.read(now_s, line[line.rfind(b")") + 2 :].split(), self._memory.children)


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
