"""Who of a node's ranks comes last to the collectives and how long the others wait for it. Pure.

All ranks of a machine share a clock and read their recorders at the same beat, so that these hold the same collectives.
Collectives make all ranks equally fast: a rank that is slower than the others shows in nothing but when it comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.state.call_waits import Call, CallWaits, Waited
from agent.wire.reports import LatenessReport

if TYPE_CHECKING:
    from ddpcore.wire import RankReport

MAX_LEAD_US = 600_000_000
"""More is a clock that was set, or nonsense."""
MAX_LATE_BEATS = 8
MIN_SPREAD = 0.25
"""Of the longest time between the first and the last caller of one collective in a beat: what is called right behind
another collective is called by all at once, and who is the last to that means nothing."""
USUAL_OVERLAP = 0.15
USUAL_S = 2.0
"""A rank is taken to work so much behind its collectives as if it had been seen to for so long: where these are short,
a few samples say nothing, and ranks that are alike would be judged by different rules."""


class _Count(msgspec.Struct):
    num_compared: int = 0
    num_last: int = 0


class _Told(msgspec.Struct):
    """What a rank has reported of the present beat."""

    calls: list[tuple[int, str, int]] = []
    """Microseconds, group and seq of each call."""
    one_way: set[tuple[str, int]] = set()
    """Group and seq of those that not all members wait in."""
    step_ends_us: list[int] = []
    overlap_frac: float = 0.0
    """Share of the time in which collectives are under way that it works on behind them."""


class Lateness:
    """The ranks of one attempt of a job on this node."""

    def __init__(self) -> None:
        self._beat = -1
        self._told: dict[int, _Told] = {}
        """Of the present beat, by rank."""
        self._tellers: set[int] = set()
        """Who told of the one before: once all have again, there is nothing to wait for."""
        self._is_compared = False
        """The present beat has been."""
        self._counts: dict[int, _Count] = {}
        self._waits: dict[int, CallWaits] = {}
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
            self._tellers, self._told, self._is_compared = set(self._told), {}, False
        if report.rank in self._told:
            return
        told = self._told[report.rank] = _Told(step_ends_us=report.step_ends_us, overlap_frac=_overlap_frac(report))
        for arrivals in report.arrivals:
            calls = zip(arrivals.called_us, arrivals.seqs, strict=False)
            told.calls += [(called_us, arrivals.group, seq) for called_us, seq in calls]
            told.one_way |= {(arrivals.group, seq) for seq in arrivals.one_way_seqs}
        if self._tellers and self._tellers <= self._told.keys():
            self._compare()

    def of(self, rank: int) -> LatenessReport | None:
        """Return a rank's figures, None while nothing of it has been compared."""
        count, waits = self._counts.get(rank), self._waits.get(rank)
        if count is None and (waits is None or waits.total == Waited()):
            return None
        count, total = count or _Count(), waits.total if waits else Waited()
        return LatenessReport(count.num_compared, count.num_last, *total)

    def _compare(self) -> None:
        if self._is_compared:
            return
        self._is_compared = True
        by_group: dict[str, dict[int, dict[int, int]]] = {}
        callers: dict[str, set[int]] = {}
        for rank, told in self._told.items():
            for called_us, group, seq in told.calls:
                by_group.setdefault(group, {}).setdefault(seq, {})[rank] = called_us
                callers.setdefault(group, set()).add(rank)
        whole = {
            group: {seq: called_us for seq, called_us in calls.items() if called_us.keys() == callers[group]}
            for group, calls in by_group.items()
        }
        last_us = {
            (group, seq): max(called_us.values()) for group, calls in whole.items() for seq, called_us in calls.items()
        }
        spreads_us = [_spread_us(called_us) for calls in whole.values() for called_us in calls.values()]
        least_us = MIN_SPREAD * max((spread_us for spread_us in spreads_us if spread_us < MAX_LEAD_US), default=0)
        for group, calls in by_group.items():
            if len(callers[group]) > 1:
                self._count_last(group, max(calls), whole[group], least_us)
        for rank, told in self._told.items():
            calls_of_rank = [
                Call(called_us, last_us.get((group, seq)), (group, seq) in told.one_way)
                for called_us, group, seq in sorted(told.calls)
            ]
            waits = self._waits.setdefault(rank, CallWaits())
            waits.take(calls_of_rank, told.step_ends_us, told.overlap_frac)

    def _count_last(self, group: str, newest_seq: int, calls: dict[int, dict[int, int]], least_us: float) -> None:
        before = self._compared_seq.get(group, 0)
        if newest_seq < before:
            before = self._compared_seq[group] = 0  # the group was made anew, and counts anew
        for seq, called_us in calls.items():
            if seq > before:
                if _spread_us(called_us) >= least_us:
                    self._count(called_us)
                self._compared_seq[group] = max(seq, self._compared_seq.get(group, 0))

    def _count(self, called_us: dict[int, int]) -> None:
        *_, second, last = sorted(called_us, key=called_us.__getitem__)
        for rank in called_us:
            self._counts.setdefault(rank, _Count()).num_compared += 1
        lead_us = called_us[last] - called_us[second]
        if 0 < lead_us < MAX_LEAD_US:
            self._counts[last].num_last += 1


def _overlap_frac(report: RankReport) -> float:
    """Return which share of the time in which collectives are under way a rank works, as far as samples tell."""
    under_way_s = report.waited_s + report.overlapped_s
    return (report.overlapped_s + USUAL_OVERLAP * USUAL_S) / (under_way_s + USUAL_S)


def _spread_us(called_us: dict[int, int]) -> int:
    return max(called_us.values()) - min(called_us.values())
