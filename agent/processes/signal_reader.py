"""Reads the signals of a rank's process: what may keep it from its CPU, its pages and its disk.

`SignalReader` reads small files of /proc and of the cgroup file system that take no lock of the process. What cannot be
read is left out. All readers of a machine read in the same second of the clock, so that the CPU time of all ranks can
be compared with that of the machine.

Source: proc_pid_stat(5), fields 12 to 17; Documentation/scheduler/sched-stats.rst (/proc/PID/schedstat);
Documentation/admin-guide/mm/numaperf.rst (node*/cpulist).
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from agent.node_state.observations import RankSignals
from agent.processes.cgroups import CGROUPS, PROC, Cgroup, Throttled, cgroups_of, has_quota, read_membership, throttled
from agent.wire.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PERIOD_S = 1.0
"""Seconds between samples: their borders are whole multiples of it."""
SEARCH_PERIOD_S = 2.0
"""Seconds between searches for cgroups with a quota: a later date of the quota would not fit the slowness."""
MAX_CHILDREN = 64
"""Child processes of a rank that are looked at."""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_NODES = PROC.parent / "sys/devices/system/node"
# Indices behind the name, counted from the state.
_STATE, _MAJOR_FAULTS, _UTIME, _CSTIME = 0, 9, 11, 14
_BLOCKED = b"D"


class _Counts(NamedTuple):
    """What is counted up, as of one sample."""

    at_s: float
    run_delay_s: float | None
    major_faults: dict[int, int]
    """Pages by process."""
    throttled: dict[Cgroup, Throttled]


class SignalReader:
    """Reads the signals of one process; used from one thread."""

    def __init__(self, pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS, nodes: Path = _NODES) -> None:
        self._pid, self._proc, self._cgroups_root, self._nodes = pid, proc, cgroups, nodes
        self._before: _Counts | None = None
        self._limited: list[Cgroup] | None = None
        """Cgroups with a quota; None where no cgroup is seen."""
        self._searched_s = float("-inf")
        self._num_looks = self._num_blocked = 0
        """Looks at its own state since the last sample."""

    def read(self, now_s: float, stat: Sequence[bytes], children: Sequence[int]) -> RankSignals | None:
        """Return a sample where one is due, else None.

        Args:
            now_s: Monotonic time in seconds.
            stat: Fields of its /proc/PID/stat behind the name, just read.
            children: Pids of its child processes, as far as known.
        """
        self._num_looks += 1
        self._num_blocked += stat[_STATE] == _BLOCKED
        before = self._before
        if before is not None and now_s // PERIOD_S == before.at_s // PERIOD_S:
            return None
        try:
            return self._sample(now_s, stat, children)
        except (OSError, ValueError, IndexError):
            self._before = None  # it ends just now
            return None

    def _sample(self, now_s: float, stat: Sequence[bytes], children: Sequence[int]) -> RankSignals:
        if now_s - self._searched_s >= SEARCH_PERIOD_S:
            self._searched_s = now_s
            self._search()
        pids = dict.fromkeys([*self._own_children(), *children])
        trees = {pid: fields for pid in list(pids)[:MAX_CHILDREN] if len(fields := self._stat(pid)) > _CSTIME}
        own = [stat, *trees.values()]
        counts = _Counts(
            now_s,
            self._run_delay_s(),
            {pid: int(fields[_MAJOR_FAULTS]) for pid, fields in ((self._pid, stat), *trees.items())},
            {cgroup: found for cgroup in self._limited or () if (found := throttled(cgroup)) is not None},
        )
        # Whom the kernel has collected counts for its parent, which is the rank or one of the children.
        tree_cpu_s = _TICK_S * sum(int(ticks) for fields in own for ticks in fields[_UTIME : _CSTIME + 1])
        cpus = os.sched_getaffinity(self._pid) if self._proc is PROC else frozenset[int]()
        values = {Signal.BLOCKED: self._blocked([fields[_STATE] for fields in trees.values()])}
        if cpus:
            values[Signal.CPUS_ALLOWED] = float(len(cpus))
        if self._before is not None:
            values |= self._since(self._before, counts)
        self._before = counts
        return RankSignals(values, tree_cpu_s, numa_nodes_of(frozenset(cpus), self._nodes))

    def _since(self, before: _Counts, now: _Counts) -> dict[Signal, float]:
        passed_s = now.at_s - before.at_s
        if passed_s <= 0.0:
            return {}
        # A child's first figure is that of its whole life.
        faults = sum(max(0, count - before.major_faults.get(pid, count)) for pid, count in now.major_faults.items())
        found = {Signal.MAJOR_FAULTS: faults / passed_s}
        if now.run_delay_s is not None and before.run_delay_s is not None:
            found[Signal.CPU_WAIT] = min(1.0, max(0.0, now.run_delay_s - before.run_delay_s) / passed_s)
        if self._limited is not None:
            parts = [
                count.part_since(before.throttled[cgroup], passed_s)
                for cgroup, count in now.throttled.items()
                if cgroup in before.throttled
            ]
            if parts or not self._limited:
                found[Signal.CPU_THROTTLED] = max(parts, default=0.0)
        return found

    def _blocked(self, states: Sequence[bytes]) -> float:
        """Return its own part of the time in state D, or that of its child processes, whichever is larger."""
        own = self._num_blocked / self._num_looks
        self._num_looks = self._num_blocked = 0
        of_children = sum(state == _BLOCKED for state in states) / len(states) if states else 0.0
        return max(own, of_children)

    def _search(self) -> None:
        found = list(cgroups_of(read_membership(self._pid, self._proc), "cpu", self._cgroups_root))
        self._limited = [cgroup for cgroup in found if has_quota(cgroup)] if found else None

    def _run_delay_s(self) -> float | None:
        """Return how long the main thread could run and had no CPU; None where the kernel does not count it."""
        try:
            run_ns, delay_ns, _ = (self._proc / str(self._pid) / "schedstat").read_bytes().split()
        except (OSError, ValueError):
            return None
        return int(delay_ns) / 1e9 if int(run_ns) else None

    def _own_children(self) -> list[int]:
        """Return what the main thread has forked, as DataLoader workers are: those of an epoch may be short-lived."""
        try:
            path = self._proc / str(self._pid) / "task" / str(self._pid) / "children"
            return [int(pid) for pid in path.read_bytes().split()]
        except (OSError, ValueError):
            return []

    def _stat(self, pid: int) -> list[bytes]:
        try:
            line = (self._proc / str(pid) / "stat").read_bytes()
        except OSError:
            return []
        return line[line.rfind(b")") + 2 :].split()


def numa_nodes_of(cpus: frozenset[int], nodes: Path = _NODES) -> frozenset[int] | None:
    """Return the NUMA nodes of CPUs; None where the machine shows none."""
    by_node = _cpus_by_node(nodes)
    found = frozenset(node for node, own in by_node.items() if own & cpus)
    return found or None


@cache
def _cpus_by_node(nodes: Path) -> dict[int, frozenset[int]]:
    found = {}
    try:
        for path in nodes.glob("node[0-9]*"):
            found[int(path.name.removeprefix("node"))] = cpus_in((path / "cpulist").read_text())
    except (OSError, ValueError):
        return {}
    return found


def cpus_in(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel writes it: `0-3,8`; raise ValueError if it is none."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1))
