"""How long a rank waits for the later ranks of its node, and for other nodes, from when each called what. Pure.

The recorder tells when a collective was called and not when it was over, so the time between two calls of a rank is
split by what the others did:

- A rank that makes its next call before the last one has come to this one does not wait for it.
- Else it waits from its own call to the node's last one, when the program waits in its collectives.
- DDP's reductions run behind backward. There only the last one before the end of a step holds the rank up, and any
  other only by as much as the rank is behind its lead afterwards.
- From the node's last call to the end of the step it waits for other nodes, and does what is left of the step.
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


class Call(NamedTuple):
    """A collective that the rank has called."""

    called_us: int
    last_us: int | None
    """When the node's last rank called it, None where that is not known."""


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
        self._piece_us = 0
        self._piece_waited_us = 0

    def take(self, calls: Sequence[Call], step_ends_us: Sequence[int], *, is_overlapped: bool) -> None:
        """Count the time between calls, up to the newest one.

        Args:
            calls: The latest calls of the rank, ascending; some may have been counted before.
            step_ends_us: When its latest steps ended, ascending.
            is_overlapped: It works on behind its collectives.
        """
        if calls and calls[-1].called_us < self._counted_us:
            self._counted_us = 0  # the clock was set back
        ends = sorted(step_ends_us)
        for place in range(len(calls) - 1):
            call, following = calls[place : place + 2]
            span_us = following.called_us - call.called_us
            if call.called_us < self._counted_us or call.last_us is None or not 0 <= span_us < MAX_SPAN_US:
                continue
            first, beyond = bisect_right(ends, call.called_us), bisect_right(ends, following.called_us)
            end_us = ends[first] if first < beyond else None
            waited_us = _waited_us(call, following, end_us, is_overlapped=is_overlapped and bool(ends))
            self._count(span_us, waited_us, is_whole=end_us is not None or not ends)
            if first > 0 and end_us is not None:
                began_us = ends[first - 1]
                burst_us = call.called_us - calls[bisect_left(calls, (began_us,))].called_us
                step_us = ends[beyond - 1] - began_us
                is_one_wait = is_overlapped or burst_us <= MAX_BURST * step_us
                if is_one_wait and step_us < MAX_SPAN_US:
                    self._count_step(step_us, max(0, end_us - call.last_us))
        if calls:
            self._counted_us = calls[-1].called_us

    def _count(self, span_us: int, waited_us: int, *, is_whole: bool) -> None:
        self._piece_us += span_us
        self._piece_waited_us += waited_us
        if self._piece_us < PIECE_US or not is_whole:
            return
        spanned_s, waited_s = self._piece_us / 1e6, self._piece_waited_us / 1e6
        self._piece_us = self._piece_waited_us = 0
        total = self.total
        self.total = total._replace(
            spanned_s=total.spanned_s + spanned_s,
            waited_s=total.waited_s + waited_s,
            squared_s2=total.squared_s2 + waited_s * waited_s,
            num_pieces=total.num_pieces + 1,
        )

    def _count_step(self, step_us: int, beyond_us: int) -> None:
        total = self.total
        self.total = total._replace(
            stepped_s=total.stepped_s + step_us / 1e6, beyond_s=total.beyond_s + min(beyond_us, step_us) / 1e6
        )


def _waited_us(call: Call, following: Call, end_us: int | None, *, is_overlapped: bool) -> int:
    if call.last_us is None or following.called_us < call.last_us:
        return 0
    lag_us = call.last_us - call.called_us
    if not is_overlapped:
        return lag_us
    if end_us is not None:
        return min(lag_us, end_us - call.called_us)
    lag_after_us = 0 if following.last_us is None else following.last_us - following.called_us
    return max(0, lag_us - lag_after_us)
