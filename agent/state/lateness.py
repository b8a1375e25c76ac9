"""Who of a node's ranks comes last to the collectives, by the clock that they share. Pure.

Collectives make all ranks equally fast: a rank that is a little slower than the others shows in nothing but the order
in which they come. All ranks of a machine read their recorders at the same beat, so that these hold the same
collectives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.wire.reports import LatenessReport

if TYPE_CHECKING:
    from ddpcore.wire import RankReport

MAX_LEAD_US = 600_000_000
"""More is a clock that was set, or nonsense."""
MAX_LATE_BEATS = 8


class _Count(msgspec.Struct):
    num_compared: int = 0
    num_last: int = 0


class Lateness:
    """The ranks of one attempt of a job on this node."""

    def __init__(self) -> None:
        self._beat = -1
        self._calls: dict[str, dict[int, dict[int, int]]] = {}
        """Of the present beat: microseconds by rank, by seq, by group."""
        self._callers: dict[str, set[int]] = {}
        """Of the present beat: who has told of calls in a group."""
        self._told: set[int] = set()
        """Who has told of the present beat."""
        self._tellers: set[int] = set()
        """Who told of the one before: once all have again, there is nothing to wait for."""
        self._counts: dict[int, _Count] = {}
        self._compared_seq: dict[str, int] = {}
        """The newest that has been compared, by group: while little is called, a ring shows the same calls again."""

    def take(self, report: RankReport) -> None:
        """Take a rank's report; a beat's calls are compared once all have told them, or the next one begins."""
        is_late = self._beat - MAX_LATE_BEATS <= report.beat < self._beat
        if not report.arrivals or is_late:
            return
        # One that is far behind tells of a clock that was set back.
        if report.beat != self._beat:
            self._compare()
            self._beat = report.beat
            self._tellers, self._told = self._told, set()
        if report.rank in self._told:
            return
        self._told.add(report.rank)
        for arrivals in report.arrivals:
            calls = self._calls.setdefault(arrivals.group, {})
            self._callers.setdefault(arrivals.group, set()).add(report.rank)
            for seq, called_us in zip(arrivals.seqs, arrivals.called_us, strict=False):
                calls.setdefault(seq, {})[report.rank] = called_us
        if self._tellers and self._tellers <= self._told:
            self._compare()

    def of(self, rank: int) -> LatenessReport | None:
        """Return a rank's counts, None while it has not been compared with any."""
        count = self._counts.get(rank)
        return None if count is None else LatenessReport(count.num_compared, count.num_last)

    def _compare(self) -> None:
        told, self._calls = self._calls, {}
        all_callers, self._callers = self._callers, {}
        for group, calls in told.items():
            callers = all_callers[group]
            if len(callers) < 2:
                continue
            before = self._compared_seq.get(group, 0)
            if max(calls, default=before) < before:
                before = self._compared_seq[group] = 0  # the group was made anew, and counts anew
            for seq, called_us in calls.items():
                if called_us.keys() == callers and seq > before:
                    self._count(called_us)
                    self._compared_seq[group] = max(seq, self._compared_seq.get(group, 0))

    def _count(self, called_us: dict[int, int]) -> None:
        *_, second, last = sorted(called_us, key=called_us.__getitem__)
        for rank in called_us:
            self._counts.setdefault(rank, _Count()).num_compared += 1
        lead_us = called_us[last] - called_us[second]
        if 0 < lead_us < MAX_LEAD_US:
            self._counts[last].num_last += 1
