"""Computes how long ranks wait in collectives: for later ranks of their node, and for other nodes.

Pure.

`CallWaits` holds one rank's waits, from when each rank called what. The recorder reports when a collective was called
and not when it was over, so the time between two calls of a rank is split by what the others did:

- A rank that makes its next call before the last one has come to this one does not wait for it.
- Else it waits from its own call to the node's last one, when the program waits in its collectives.
- DDP's reductions run behind backward. There only the last one before the end of a step holds the rank up, and any
  other only by as much as the rank is behind its lead afterwards.
- A broadcast, and every other one-directional collective, does not wait for all. Before a collective that does, it held
  the rank up only by as much as the rank is behind its lead at that one.
- From the node's last call to the end of the step it waits for other nodes, and does what is left of the step. Of
  several in a row it waits in the first one, unless it works on behind them: the time from the first to the last counts
  by the fraction of it that it does not work.

`Lateness` holds which of a node's ranks comes last to the collectives and how long the others wait for it. All ranks of
a machine share a clock and read their recorders at the same tick, so that these hold the same collectives. Collectives
make all ranks equally fast: a rank that is slower than the others shows in nothing but when it comes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.node_state.gpu_arrivals import GpuArrivals, Key
from agent.wire.reports import LatenessReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpcore.wire import RankReport

MAX_SPAN_US = 600_000_000
"""Longest plausible time between two calls: beyond it a clock was set."""
PIECE_US = 250_000
"""Length of a piece: shorter steps are taken together, and so are calls where no rank reports steps."""
MAX_BURST = 0.25
"""Part of a step within which collectives count as one wait."""
MIN_OVERLAPPED = 0.2
"""Part of the time in which collectives are under way that must be measured as work before it counts as overlap."""


class Call(NamedTuple):
    """A collective that the rank has called."""

    called_us: int
    last_us: int | None
    """Time of the call by the node's last rank, None where that is not known."""
    is_one_way: bool = False
    """True where the call is over for one member before all have called it: a broadcast."""


class Waited(NamedTuple):
    """Sums of the exact figures of a `LatenessReport`, in its order."""

    spanned_s: float = 0.0
    waited_s: float = 0.0
    squared_s2: float = 0.0
    num_pieces: int = 0
    stepped_s: float = 0.0
    beyond_s: float = 0.0


class CallWaits:
    """Calls of one rank, tick by tick; `total` is what has been counted so far."""

    def __init__(self) -> None:
        self.total = Waited()
        self._counted_us = 0
        """Time up to which calls have been counted."""
        self._piece = (0, 0)
        """Microseconds of the present piece, and of these those waited."""
        self._step = (0, 0)
        """The same of the step that is not over."""
        self._is_torn = False
        """True where calls are missing before the next one: the rest of their step is no step."""

    def take(self, calls: Sequence[Call], step_ends_us: Sequence[int], overlap_frac: float = 0.0) -> None:
        """Count the time between calls, up to the last one.

        `calls` and `step_ends_us` ascend; some calls may have been counted before. `overlap_frac` is the part of the
        time in which collectives are under way that the rank works on behind them.
        """
        is_overlapped = overlap_frac > MIN_OVERLAPPED
        if calls and calls[-1].called_us < self._counted_us:
            self._counted_us = 0  # the clock was set back
        ends = sorted(step_ends_us)
        known = _num_known(calls)
        can_tear = _holds_steps(calls, ends)
        if can_tear and calls[0].called_us > self._counted_us:
            self._tear()
        for place in range(min(known, len(calls) - 1)):
            call, following = calls[place : place + 2]
            if call.called_us < self._counted_us:
                continue
            if call.last_us is None or not 0 <= following.called_us - call.called_us < MAX_SPAN_US:
                if can_tear:
                    self._tear()
                continue
            first, beyond = bisect_right(ends, call.called_us), bisect_right(ends, following.called_us)
            end_us = ends[first] if first < beyond else None
            if self._is_torn:
                self._is_torn = end_us is None
                continue
            waited_us = _waited_us(call, following, end_us, is_overlapped=is_overlapped and bool(ends))
            self._count(following.called_us - call.called_us, waited_us, is_whole=end_us is not None or not ends)
            if first > 0 and end_us is not None:
                began_us = ends[first - 1]
                opening = calls[bisect_left(calls, (began_us,))]
                self._count_step(ends[beyond - 1] - began_us, end_us, (opening, call), overlap_frac)
        if calls:
            self._counted_us = calls[min(known, len(calls) - 1)].called_us

    def _tear(self) -> None:
        self._is_torn = True
        self._step = (0, 0)

    def _count(self, span_us: int, waited_us: int, *, is_whole: bool) -> None:
        self._step = self._step[0] + span_us, self._step[1] + waited_us
        if not is_whole:
            return
        spanned_us, waited_us = (before + more for before, more in zip(self._piece, self._step, strict=True))
        self._piece, self._step = (spanned_us, waited_us), (0, 0)
        if spanned_us < PIECE_US:
            return
        spanned_s, waited_s = spanned_us / 1e6, waited_us / 1e6
        self._piece = (0, 0)
        total = self.total
        self.total = total._replace(
            spanned_s=total.spanned_s + spanned_s,
            waited_s=total.waited_s + waited_s,
            squared_s2=total.squared_s2 + waited_s * waited_s,
            num_pieces=total.num_pieces + 1,
        )

    def _count_step(self, step_us: int, end_us: int, burst: tuple[Call, Call], overlap_frac: float) -> None:
        """Count what follows the last calls of a step, if that is where a node waits.

        `burst` is the first and the last of them; `overlap_frac` of the time between them counts as work.
        """
        first, last = burst
        if first.last_us is None or last.called_us - first.called_us > MAX_BURST * step_us:
            if overlap_frac <= MIN_OVERLAPPED:
                return
            first = last
        first_us, last_us = first.last_us, last.last_us
        if first_us is None or last_us is None or step_us >= MAX_SPAN_US:
            return
        beyond_us = end_us - first_us - overlap_frac * max(0, last_us - first_us)
        total = self.total
        self.total = total._replace(
            stepped_s=total.stepped_s + step_us / 1e6,
            beyond_s=total.beyond_s + min(max(0.0, beyond_us), step_us) / 1e6,
        )


def _num_known(calls: Sequence[Call]) -> int:
    """Return how many calls there are up to the last one whose last caller is known.

    Those behind it are counted once their other ranks have been read too.
    """
    known = len(calls)
    while known > 0 and calls[known - 1].last_us is None:
        known -= 1
    return known


def _holds_steps(calls: Sequence[Call], ends: Sequence[int]) -> bool:
    """Return whether at least one whole step lies within some calls."""
    return bool(calls) and bisect_right(ends, calls[-1].called_us) - bisect_right(ends, calls[0].called_us) > 1


def _waited_us(call: Call, following: Call, end_us: int | None, *, is_overlapped: bool) -> int:
    if call.last_us is None or following.called_us < call.last_us:
        return 0
    lag_us = call.last_us - call.called_us
    is_passing = call.is_one_way and not following.is_one_way and end_us is None
    if not (is_overlapped or is_passing):
        return lag_us
    if end_us is not None:
        return min(lag_us, end_us - call.called_us)
    lag_after_us = 0 if following.last_us is None else following.last_us - following.called_us
    return max(0, lag_us - lag_after_us)


MAX_LEAD_US = 600_000_000
"""Longest plausible lead: beyond it a clock was set."""
MAX_LATE_TICKS = 8
MIN_SPREAD = 0.25
"""Part of the longest time between the first and the last caller of one collective in a tick. A collective called right
behind another is called by all ranks at nearly one time, and its last caller means nothing."""
USUAL_OVERLAP = 0.15
USUAL_S = 2.0
"""Seconds of samples that a rank is credited with in advance, all of which show the usual overlap. Where collectives
are short a few samples show nothing, and ranks that are alike would be judged by different rules."""


class _Count(msgspec.Struct):
    num_compared: int = 0
    num_last: int = 0


class _RankCalls(msgspec.Struct):
    """A rank's report of the present tick."""

    called_us: dict[Key, int] = {}
    on_gpu_us: dict[Key, int] = {}
    """Time that the GPU has spent in each call, where it is known."""
    one_way: set[Key] = set()
    """Group and seq of the calls that not all members wait in."""
    step_ends_us: list[int] = []
    overlap_frac: float = 0.0
    """Part of the time in which collectives are under way that the rank works on behind them."""


class Lateness:
    """Lateness of the ranks of one attempt of a job on this node."""

    def __init__(self) -> None:
        self._tick = -1
        self._calls_of: dict[int, _RankCalls] = {}
        """Calls of the present tick, by rank."""
        self._tellers: set[int] = set()
        """Ranks that reported the tick before: once all have reported again, the comparison can begin."""
        self._is_compared = False
        """True once the present tick has been compared."""
        self._counts: dict[int, _Count] = {}
        self._waits: dict[int, CallWaits] = {}
        self._gpu_arrivals = GpuArrivals()
        self._compared_seq: dict[str, int] = {}
        """Last seq that has been compared, by group: while little is called, a ring shows the same calls again."""

    def take(self, report: RankReport) -> None:
        """Take a report; a tick's calls are compared once all ranks have reported it, or the next tick begins."""
        is_late = self._tick - MAX_LATE_TICKS <= report.tick < self._tick
        if not report.arrivals or is_late:
            return
        # One that is far behind tells of a clock that was set back.
        if report.tick != self._tick:
            self._compare()
            self._tick = report.tick
            self._tellers, self._calls_of, self._is_compared = set(self._calls_of), {}, False
        if report.rank in self._calls_of:
            return
        rank_calls = self._calls_of[report.rank] = _RankCalls(
            step_ends_us=report.step_ends_us, overlap_frac=_overlap_frac(report)
        )
        for arrivals in report.arrivals:
            keys = [(arrivals.group, seq) for seq in arrivals.seqs]
            rank_calls.called_us |= zip(keys, arrivals.called_us, strict=False)
            lasted_us = zip(keys, arrivals.on_gpu_us, strict=False)
            rank_calls.on_gpu_us |= {key: for_us for key, for_us in lasted_us if for_us >= 0}
            rank_calls.one_way |= {(arrivals.group, seq) for seq in arrivals.one_way_seqs}
        if self._tellers and self._tellers <= self._calls_of.keys():
            self._compare()

    def of(self, rank: int) -> LatenessReport | None:
        """Return a rank's figures, None before anything of it has been compared."""
        count, waits = self._counts.get(rank), self._waits.get(rank)
        if count is None and (waits is None or waits.total == Waited()):
            return None
        count, total = count or _Count(), waits.total if waits else Waited()
        return LatenessReport(count.num_compared, count.num_last, *total)

    def _compare(self) -> None:
        if self._is_compared:
            return
        self._is_compared = True
        called_us = _by_call({rank: calls.called_us for rank, calls in self._calls_of.items()})
        on_gpu_us = _by_call({rank: calls.on_gpu_us for rank, calls in self._calls_of.items()})
        self._gpu_arrivals.place(called_us, on_gpu_us)
        by_group: dict[str, dict[int, dict[int, int]]] = {}
        callers: dict[str, set[int]] = {}
        for (group, seq), by_rank in called_us.items():
            by_group.setdefault(group, {})[seq] = by_rank
            callers.setdefault(group, set()).update(by_rank)
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
        for rank, rank_calls in self._calls_of.items():
            calls_of_rank = [
                Call(at_us, last_us.get(key), key in rank_calls.one_way)
                for at_us, key in sorted((called_us[key][rank], key) for key in rank_calls.called_us)
            ]
            waits = self._waits.setdefault(rank, CallWaits())
            waits.take(calls_of_rank, rank_calls.step_ends_us, rank_calls.overlap_frac)

    def _count_last(self, group: str, latest_seq: int, calls: dict[int, dict[int, int]], least_us: float) -> None:
        before = self._compared_seq.get(group, 0)
        if latest_seq < before:
            before = self._compared_seq[group] = 0  # the group was made again, and counts from 0
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


def _by_call(of_ranks: Mapping[int, Mapping[Key, int]]) -> dict[Key, dict[int, int]]:
    """Return figures of the calls of each rank by the call."""
    by_call: dict[Key, dict[int, int]] = {}
    for rank, figures in of_ranks.items():
        for key, figure in figures.items():
            by_call.setdefault(key, {})[rank] = figure
    return by_call


def _overlap_frac(report: RankReport) -> float:
    """Return the part of the time in which collectives are under way that a rank works, as far as samples show."""
    under_way_s = report.waited_s + report.overlapped_s
    return (report.overlapped_s + USUAL_OVERLAP * USUAL_S) / (under_way_s + USUAL_S)


def _spread_us(called_us: dict[int, int]) -> int:
    return max(called_us.values()) - min(called_us.values())
