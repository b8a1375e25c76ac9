"""How long a rank waits for the later ranks of its node, and for other nodes, from when each called what. Pure.

The recorder tells when a collective was called and not when it was over, so the time between two calls of a rank is
split by what the others did:

- A rank that makes its next call before the last one has come to this one does not wait for it.
- Else it waits from its own call to the node's last one, when the program waits in its collectives.
- DDP's reductions run behind backward. There only the last one before the end of a step holds the rank up, and any
  other only by as much as the rank is behind its lead afterwards.
- A broadcast, and what else goes one way, does not wait for all. Before a collective that does, it held the rank up
  only by as much as the rank is behind its lead at that one.
- From the node's last call to the end of the step it waits for other nodes, and does what is left of the step. Of
  several in a row it waits in the first one, unless it works on behind them: the time from the first to the last counts
  by the share of it that it does not work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_SPAN_US = 600_000_000
"""A longer time between two calls is a clock that was set, or nonsense."""
PIECE_US = 250_000
"""Shorter steps are taken together, and what follows each other where nobody reports steps."""
MAX_BURST = 0.25
"""Of a step: collectives within it are waited for as one."""
MIN_OVERLAPPED = 0.2
"""Of the time in which collectives are under way: a rank that works through more of it works behind them as a rule."""


class Call(NamedTuple):
    """A collective that the rank has called."""

    called_us: int
    last_us: int | None
    """When the node's last rank called it, None where that is not known."""
    is_one_way: bool = False
    """It is over for one member before all have called it: a broadcast."""


class Waited(NamedTuple):
    """Sums of the exact figures of a `LatenessReport`, in its order."""

    spanned_s: float = 0.0
    waited_s: float = 0.0
    squared_s2: float = 0.0
    num_pieces: int = 0
    stepped_s: float = 0.0
    beyond_s: float = 0.0


class CallWaits:
    """The calls of one rank, beat by beat.

    Attributes:
        total: What has been counted so far.
    """

    def __init__(self) -> None:
        self.total = Waited()
        self._counted_us = 0
        """The time before the call at this moment has been counted."""
        self._piece = (0, 0)
        """Microseconds of what has been taken together so far, and of these those waited."""
        self._step = (0, 0)
        """The same of the step that is not over."""
        self._is_torn = False
        """Calls are missing before the next one: what is left of their step is no step."""

    def take(self, calls: Sequence[Call], step_ends_us: Sequence[int], overlap_frac: float = 0.0) -> None:
        """Count the time between calls, up to the newest one.

        Args:
            calls: The latest calls of the rank, ascending; some may have been counted before.
            step_ends_us: When its latest steps ended, ascending.
            overlap_frac: Share of the time in which collectives are under way that the rank works on behind them.
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

        Args:
            step_us: Length of the step.
            end_us: When it ended.
            burst: The first and the last of them.
            overlap_frac: How much of the time between them counts as work.
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
    """Return how many calls there are up to the newest one of which it is known who came last.

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
