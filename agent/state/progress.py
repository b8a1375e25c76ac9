"""When the ranks of a node have last got any further, by what they report. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

    from ddpcore.wire import RankReport


class Progress:
    """Of one attempt of a job.

    Anything that moves counts: a step, a collective, a phase, another line of the program. A rank that computes for
    long on one line does not move, as far as this can tell.
    """

    def __init__(self) -> None:
        self._marks: dict[int, Hashable] = {}
        """Where each rank was."""
        self._moved_at_s: float | None = None

    def note(self, report: RankReport, now_s: float) -> None:
        """Take a report of a rank."""
        groups = tuple((group.group, group.enqueued_seq, group.completed_seq) for group in report.groups)
        mark = (report.pid, report.steps_done, report.epoch, report.phase, report.place, groups)
        if self._marks.get(report.rank) != mark:
            self._marks[report.rank] = mark
            self._moved_at_s = now_s

    def stalled_s(self, now_s: float) -> float:
        """Return how long no rank has moved; 0 while none has ever reported, since nothing is known then."""
        return 0.0 if self._moved_at_s is None else max(0.0, now_s - self._moved_at_s)
