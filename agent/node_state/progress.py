"""When the ranks of a node have last made progress (`Progress`), and how many cores a process uses (`CpuUse`).

Pure. `Progress` goes by what the ranks report, `CpuUse` by samples of a process's CPU time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ddpcore.wire import RankReport


class Progress:
    """Progress of one attempt of a job.

    Anything that moves counts: a step, a collective, a phase, another line of the program. A rank that computes for
    long on one line does not move, as far as this shows.
    """

    def __init__(self) -> None:
        self._marks: dict[int, Hashable] = {}
        """Last position by rank."""
        self._moved_at_s: float | None = None

    def note(self, report: RankReport, now_s: float) -> None:
        groups = tuple((group.group, group.enqueued_seq, group.completed_seq) for group in report.groups)
        mark = (report.pid, report.steps_done, report.epoch, report.phase, report.place, groups)
        if self._marks.get(report.rank) != mark:
            self._marks[report.rank] = mark
            self._moved_at_s = now_s

    def stalled_s(self, now_s: float) -> float:
        """Return how long no rank has moved; 0 before the first report, since nothing is known then."""
        return 0.0 if self._moved_at_s is None else max(0.0, now_s - self._moved_at_s)


WINDOW_S = 1.0
"""Least window in seconds: the kernel counts in hundredths, and a step of the training should fit in."""


class CpuUse:
    """Cores that a process kept busy over the last complete window of one to two `WINDOW_S`; 0 before the first."""

    __slots__ = ("_since", "cores")

    def __init__(self) -> None:
        self.cores = 0.0
        self._since: tuple[float, float] | None = None

    def take(self, cpu_s: float, now_s: float) -> None:
        if self._since is None:
            self._since = (now_s, cpu_s)
            return
        since_s, before_s = self._since
        if now_s - since_s >= WINDOW_S:
            self.cores = max(0.0, cpu_s - before_s) / (now_s - since_s)
            self._since = (now_s, cpu_s)
