"""Whether the kernel, or oomd, has killed a process for want of memory, and at which limit.

`OomKills` counts the kills of the whole machine, `CgroupKills` those in the cgroups of one process. Only the second
distinguishes a rank's from another program's, and a cgroup's limit from the machine's.

Source: Documentation/admin-guide/cgroup-v2.rst (memory.events counts a cgroup and those below it: `oom_kill` where a
process was killed, whatever the reason; memory.events.local `oom` where its own limit was the reason), cgroup-v1/
memory.rst (memory.oom_control `oom_kill`, memory.failcnt); systemd's src/oom/oomd-util.c (`user.oomd_ooms`).
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.ends import EndFacts, Sender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.processes.cgroups import Cgroup
    from agent.wire.machine import LimitReport

LOOK_PERIOD_S = 1.0
RECENT_S = 3.0
"""Seconds before a rank's end that count: it is noticed immediately, but the killed process may be one it depends
on."""
_VMSTAT = Path("/proc/vmstat")
_NAME = b"\noom_kill "
_OOMD_COUNT = "user.oomd_ooms"


class Files(NamedTuple):
    """Names of the memory controller's files in a cgroup, and of what is in them."""

    limit: str
    used: str
    cache_keys: tuple[bytes, ...]
    kills: str
    hits: str
    """File that counts how often the limit of this cgroup itself was the reason."""
    hits_key: bytes
    """Its line; empty where the file is one number."""


V2 = Files(
    *("memory.max", "memory.current", (b"inactive_file", b"active_file")),
    *("memory.events", "memory.events.local", b"oom"),
)
V1 = Files(
    *("memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_inactive_file", b"total_active_file")),
    *("memory.oom_control", "memory.failcnt", b""),
)


def files_of(cgroup: Cgroup) -> Files:
    """Return the names of the files in a cgroup."""
    return V2 if cgroup.is_v2 else V1


class Killing(NamedTuple):
    """Processes of a cgroup that were killed for want of memory."""

    num: int
    """How many the kernel killed; 0 if it killed none."""
    facts: EndFacts
    """At which limit, or by oomd."""


class _Counts(NamedTuple):
    at_s: float
    kills: int | None
    hits: dict[Cgroup, int]
    oomd: dict[Cgroup, int]


class CgroupKills:
    """Remembers over the last seconds what was counted in the cgroups of one process."""

    def __init__(self) -> None:
        self._levels: Sequence[Cgroup] = ()
        self._limited: Sequence[Cgroup] = ()
        self._counts: deque[_Counts] = deque()

    def follow(self, levels: Sequence[Cgroup], limited: Sequence[Cgroup]) -> None:
        """Take the cgroups of a process, from its own to the root, and those of them that have a limit."""
        if list(levels) != list(self._levels):
            self._counts.clear()  # the counts of another cgroup say nothing of this one
        self._levels, self._limited = tuple(levels), tuple(limited)

    def look(self, now_s: float) -> None:
        """Note the counts; called once a second, takes 0.1 ms."""
        self._counts.append(self._read(now_s))
        while now_s - self._counts[0].at_s > RECENT_S:
            self._counts.popleft()

    def killing(self, now_s: float, limits: Mapping[str, LimitReport]) -> Killing | None:
        """Return what was killed in the last seconds; None where that is not known.

        Args:
            now_s: Now.
            limits: By key, the limits as they were read last.
        """
        before = next((counts for counts in self._counts if now_s - counts.at_s <= RECENT_S + LOOK_PERIOD_S), None)
        if before is None:
            return None
        now = self._read(now_s)
        by_oomd = next((one for one in now.oomd if now.oomd[one] > before.oomd.get(one, 0)), None)
        if by_oomd is not None:
            return Killing(0, EndFacts(cgroup=by_oomd.name, sender=Sender.OOMD))
        if now.kills is None or before.kills is None:
            return None
        num = max(0, now.kills - before.kills)
        reached = (one for one in now.hits if one in before.hits and now.hits[one] > before.hits[one])
        cgroup = next((one for one in reached if one.key in limits), None) if num else None
        if cgroup is None:
            return Killing(num, EndFacts())
        return Killing(num, EndFacts(memory_limit=limits[cgroup.key], cgroup=cgroup.name))

    def _read(self, now_s: float) -> _Counts:
        own = (_number(one.path / files_of(one).kills, b"oom_kill") for one in self._levels)
        hits = ((one, _number(one.path / files_of(one).hits, files_of(one).hits_key)) for one in self._limited)
        oomd = ((one, _oomd_kills(one)) for one in self._levels if one.is_v2)
        return _Counts(
            now_s,
            next((number for number in own if number is not None), None),
            {one: number for one, number in hits if number is not None},
            {one: number for one, number in oomd if number},
        )


def _number(path: Path, key: bytes) -> int | None:
    """Return the number behind a key in a file; None where there is none, or the cgroup is gone."""
    try:
        for line in path.read_bytes().splitlines():
            *keys, number = line.split()
            if keys == ([key] if key else []):
                return int(number)
    except (OSError, ValueError):
        return None
    return None


def _oomd_kills(cgroup: Cgroup) -> int:
    try:
        return int(os.getxattr(cgroup.path, _OOMD_COUNT))
    except (OSError, ValueError):
        return 0


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
