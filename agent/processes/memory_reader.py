"""Reads what a rank's process and its child processes hold of the host's memory, and which limits apply.

`MemoryReader` reads small files of /proc and of the cgroup file system that take no lock of the process. A DataLoader
worker's leak is its rank's. A limit counts what the kernel cannot give back: a cgroup's page cache is taken off.

Source: proc_pid_statm(5), proc_pid_status(5), proc_pid_limits(5); Documentation/admin-guide/cgroup-v2.rst (memory.max,
memory.current, memory.stat), cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from agent.node_state.observations import LimitSampled, MemorySampled
from agent.processes.cgroups import CGROUPS, PROC, Cgroup, cgroups_of, read_membership
from agent.processes.oom_kills import CgroupKills, files_of
from agent.wire.machine import LimitKind, LimitReport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.processes.oom_kills import Killing

PERIOD_S = 1.0
"""Seconds between reads of what a rank holds, and of what its limits have used."""
SEARCH_PERIOD_S = 10.0
"""Seconds between searches for child processes and limits."""
MAX_CHILDREN = 512
MAX_LIMITS = 4
UNLIMITED_BYTES = 2**60
"""Limits from here on are none; cgroup v1 writes the largest multiple of a page."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MemoryReader:
    """Reads the memory of one process; used from one thread."""

    def __init__(self, pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._pid, self._proc, self._cgroups = pid, proc, cgroups
        self._children: list[int] = []
        self._found: list[Cgroup] = []
        self._rlimits: dict[LimitKind, int] = {}
        self._read_s = self._searched_s = float("-inf")
        self._membership = ""
        """The cgroups of the process, as the kernel writes them; one that is moved counts there from then on."""
        self._last: MemorySampled | None = None
        self._limits: dict[str, LimitReport] = {}
        """Limits of its cgroups as they were read last."""
        self._kills = CgroupKills()

    def read(self, now_s: float) -> MemorySampled | None:
        """Return what is held, read again where that is due; None of a process that is gone."""
        if now_s - self._read_s < PERIOD_S:
            return self._last
        self._read_s = now_s
        try:
            cgroups = read_membership(self._pid, self._proc)
            status = self._status(self._pid)
            is_due = now_s - self._searched_s >= SEARCH_PERIOD_S or cgroups != self._membership
            # One that ends gives up its memory first, and seems to be in the root's cgroup (version 1) then.
            if is_due and b"VmRSS" in status:
                self._searched_s, self._membership = now_s, cgroups
                self._search()
            self._last = self._read(status)
        except (OSError, ValueError):
            self._last = None
        self._kills.look(now_s)
        return self._last

    def killing(self, now_s: float) -> Killing | None:
        """Return what was killed in the process's cgroup just before its end; None where that is not known."""
        return self._kills.killing(now_s, self._limits)

    def _search(self) -> None:
        self._children = list(self._descendants())
        levels = list(cgroups_of(self._membership, "memory", self._cgroups))
        self._found = [cgroup for cgroup in levels if _limit_of(cgroup) is not None][:MAX_LIMITS]
        self._kills.follow(levels, self._found)
        self._rlimits = self._process_limits()

    def _read(self, status: dict[bytes, int]) -> MemorySampled:
        tree_bytes = status.get(b"VmRSS", 0) + status.get(b"VmSwap", 0) + sum(map(self._private, self._children))
        limits = [limit for cgroup in self._found if (limit := _sampled(cgroup)) is not None]
        self._limits.update((limit.key, limit.report) for limit in limits)
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

    def _process_limits(self) -> dict[LimitKind, int]:
        names = {b"Max address space": LimitKind.ADDRESS_SPACE, b"Max data size": LimitKind.DATA}
        limits = {}
        for line in (self._proc / str(self._pid) / "limits").read_bytes().splitlines():
            kind = names.get(line[:26].strip())
            soft = line[26:].split()[:1]
            if kind is not None and soft and soft[0].isdigit():
                limits[kind] = int(soft[0])
        return limits


def _limit_of(cgroup: Cgroup) -> int | None:
    """Return the limit in bytes, None where there is none."""
    try:
        text = (cgroup.path / files_of(cgroup).limit).read_bytes().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < UNLIMITED_BYTES else None


def _sampled(cgroup: Cgroup) -> LimitSampled | None:
    limit_bytes = _limit_of(cgroup)
    if limit_bytes is None:
        return None
    try:
        used_bytes = int((cgroup.path / files_of(cgroup).used).read_bytes())
        stat = dict(line.split() for line in (cgroup.path / "memory.stat").read_bytes().splitlines())
    except (OSError, ValueError):
        return None
    cache_bytes = sum(int(stat.get(key, 0)) for key in files_of(cgroup).cache_keys)
    used = LimitReport(LimitKind.CGROUP, limit_bytes, max(0, used_bytes - cache_bytes))
    return LimitSampled(cgroup.key, used)
