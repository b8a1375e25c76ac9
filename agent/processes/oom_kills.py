"""How often the kernel has killed a process of this machine for want of memory."""

from __future__ import annotations

from collections import deque
from pathlib import Path

LOOK_PERIOD_S = 1.0
RECENT_S = 3.0
"""Before a rank's end: it is noticed at once, but the killed process may be one that it depends on."""
_VMSTAT = Path("/proc/vmstat")
_NAME = b"\noom_kill "


class OomKills:
    """Remembers the kernel's count of the last seconds. The count is the machine's, also seen from a container."""

    def __init__(self, path: Path = _VMSTAT) -> None:
        """`path` is read as /proc/vmstat is."""
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
        """Return how many processes were killed in the last seconds; 0 where the kernel does not tell."""
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
