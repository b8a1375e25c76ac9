"""Reads what a rank's process and its child processes hold of the host's memory, and which limits apply.

`MemoryReader` reads small files of /proc and of the cgroup file system that take no lock of the process. A DataLoader
worker's leak is its rank's. A limit counts what the kernel cannot give back: a cgroup's page cache is taken off.

Source: proc_pid_statm(5), proc_pid_status(5), proc_pid_limits(5); Documentation/admin-guide/cgroup-v2.rst (memory.max,
memory.current, memory.stat), cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes).

`OomKills` counts how often the kernel has killed a process of this machine for want of memory.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.node_state.observations import LimitSampled, MemorySampled
from agent.processes.cgroups import CGROUPS, PROC, cgroups_of
from agent.wire.machine import LimitKind, LimitReport

if TYPE_CHECKING:
    from collections.abc import Iterator

PERIOD_S = 1.0
"""Seconds between reads of what a rank holds, and of what its limits have used."""
SEARCH_PERIOD_S = 10.0
"""Seconds between searches for child processes and limits."""
MAX_CHILDREN = 512
MAX_LIMITS = 4
UNLIMITED_BYTES = 2**60
"""Limits from here on are none; cgroup v1 writes the largest multiple of a page."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Cgroup(msgspec.Struct, frozen=True):
    """A directory whose limit holds for a process, and the names of its files."""

    path: Path
    limit_file: str
    used_file: str
    cache_keys: tuple[bytes, ...]


_V2 = ("memory.max", "memory.current", (b"inactive_file", b"active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file"))


class MemoryReader:
    """Reads the memory of one process; used from one thread."""

    def __init__(self, pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._pid, self._proc, self._cgroups = pid, proc, cgroups
        self._children: list[int] = []
        self._found: list[_Cgroup] = []
        self._rlimits: dict[LimitKind, int] = {}
        self._read_s = self._searched_s = float("-inf")
        self._last: MemorySampled | None = None

    def read(self, now_s: float) -> MemorySampled | None:
        """Return what is held, read again where that is due; None of a process that is gone."""
        if now_s - self._read_s < PERIOD_S:
            return self._last
        self._read_s = now_s
        try:
            if now_s - self._searched_s >= SEARCH_PERIOD_S:
                self._searched_s = now_s
                self._search()
            self._last = self._read()
        except (OSError, ValueError):
            self._last = None
        return self._last

    def _search(self) -> None:
        self._children = list(self._descendants())
        self._found = [cgroup for cgroup in self._all_cgroups() if _limit_of(cgroup) is not None][:MAX_LIMITS]
        self._rlimits = self._process_limits()

    def _read(self) -> MemorySampled:
        status = self._status(self._pid)
        tree_bytes = status.get(b"VmRSS", 0) + status.get(b"VmSwap", 0) + sum(map(self._private, self._children))
        limits = [limit for cgroup in self._found if (limit := _sampled(cgroup)) is not None]
        for kind, key in ((LimitKind.ADDRESS_SPACE, b"VmSize"), (LimitKind.DATA, b"VmData")):
            if kind in self._rlimits and key in status:
                limits.append(LimitSampled(f"{kind} {self._pid}", LimitReport(kind, self._rlimits[kind], status[key])))
        limits.sort(key=lambda limit: limit.report.limit_bytes - limit.report.used_bytes)
        return MemorySampled(tree_bytes, limits)

    def _status(self, pid: int) -> dict[bytes, int]:
        sizes = {}
        for line in (self._proc / str(pid) / "status").read_bytes().splitlines():
            key, _, rest = line.partition(b":")
            if key.startswith(b"Vm"):
                sizes[key] = int(rest.split()[0]) * 1024
        return sizes

    def _private(self, pid: int) -> int:
        """Return what a child process holds besides pages of files and shared memory, which others hold too."""
        try:
            fields = (self._proc / str(pid) / "statm").read_bytes().split()
            return max(0, int(fields[1]) - int(fields[2])) * _PAGE_BYTES
        except (OSError, ValueError, IndexError):
            return 0  # it has ended

    def _descendants(self) -> Iterator[int]:
        waiting, num = [self._pid], 0
        while waiting and num < MAX_CHILDREN:
            for child in self._children_of(waiting.pop()):
                num += 1
                waiting.append(child)
                yield child

    @property
    def children(self) -> list[int]:
        """Pids of the child processes and theirs, as of the last search."""
        return self._children

    def _children_of(self, pid: int) -> list[int]:
        found: list[int] = []
        try:
            for task in os.scandir(self._proc / str(pid) / "task"):
                found += map(int, Path(task.path, "children").read_bytes().split())
        except (OSError, ValueError):
            return found
        return found

    def _all_cgroups(self) -> Iterator[_Cgroup]:
        for cgroup in cgroups_of(self._pid, "memory", proc=self._proc, cgroups=self._cgroups):
            yield _Cgroup(cgroup.path, *(_V2 if cgroup.is_v2 else _V1))

    def _process_limits(self) -> dict[LimitKind, int]:
        names = {b"Max address space": LimitKind.ADDRESS_SPACE, b"Max data size": LimitKind.DATA}
        limits = {}
        for line in (self._proc / str(self._pid) / "limits").read_bytes().splitlines():
            kind = names.get(line[:26].strip())
            soft = line[26:].split()[:1]
            if kind is not None and soft and soft[0].isdigit():
                limits[kind] = int(soft[0])
        return limits


def _limit_of(cgroup: _Cgroup) -> int | None:
    """Return the limit in bytes, None where there is none."""
    try:
        text = (cgroup.path / cgroup.limit_file).read_bytes().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < UNLIMITED_BYTES else None


def _sampled(cgroup: _Cgroup) -> LimitSampled | None:
    limit_bytes = _limit_of(cgroup)
    if limit_bytes is None:
        return None
    try:
        used_bytes = int((cgroup.path / cgroup.used_file).read_bytes())
        stat = dict(line.split() for line in (cgroup.path / "memory.stat").read_bytes().splitlines())
    except (OSError, ValueError):
        return None
    cache_bytes = sum(int(stat.get(key, 0)) for key in cgroup.cache_keys)
    used = LimitReport(LimitKind.CGROUP, limit_bytes, max(0, used_bytes - cache_bytes))
    return LimitSampled(f"cgroup {cgroup.path}", used)


LOOK_PERIOD_S = 1.0
RECENT_S = 3.0
"""Seconds before a rank's end that count: it is noticed immediately, but the killed process may be one it depends
on."""
_VMSTAT = Path("/proc/vmstat")
_NAME = b"\noom_kill "


class OomKills:
    """Remembers the kernel's count over the last seconds. The count is the machine's, also seen from a container."""

    def __init__(self, path: Path = _VMSTAT) -> None:
        self._path = path
        self._counts: deque[tuple[float, int]] = deque()

    def look(self, now_s: float) -> None:
        """Note the count, once a second; takes 0.1 ms."""
        if self._counts and now_s - self._counts[-1][0] < LOOK_PERIOD_S:
            return
        self._counts.append((now_s, self._count()))
        while now_s - self._counts[0][0] > RECENT_S:
            self._counts.popleft()

    def recent(self, now_s: float) -> int:
        """Return how many processes were killed in the last seconds; 0 where the kernel does not show it."""
        known = [count for at_s, count in self._counts if now_s - at_s <= RECENT_S + LOOK_PERIOD_S]
        return max(0, self._count() - known[0]) if known else 0

    def _count(self) -> int:
        """Return the kernel's count since the machine began. Source: proc_vmstat(5), oom_kill, Linux 4.13."""
        try:
            text = self._path.read_bytes()
        except OSError:
            return 0
        _, found, rest = text.partition(_NAME)
        return int(rest.split(b"\n", 1)[0]) if found else 0
