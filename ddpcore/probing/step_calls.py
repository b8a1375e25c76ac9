"""How many collectives of a group this rank had called at the end of each step. Pure; a part of `group_track`.

The recorder says when each collective was called, the program when each step was over: a step's count is the seq of the
last call before its end. A rank that makes one call fewer than the others differs from them in every later step.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from ddpcore.wire import StepCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.probing.samples import RecorderEntry, StepEnd

NUM_NEWEST = 4
"""Newest steps that are kept."""
NUM_OLDER = 12
"""Older steps that are kept: those that are multiples of the highest powers of two, so that all ranks keep the same."""


class CallsAtSteps:
    """Seqs of one group by step."""

    __slots__ = ("_pairs", "_seq_of")

    def __init__(self) -> None:
        self._seq_of: dict[int, int] = {}
        self._pairs: list[StepCalls] = []

    def learn(self, entries: Sequence[RecorderEntry], ends: Sequence[StepEnd]) -> None:
        """Take the group's collectives in the ring, and the ends of the latest steps, both in the order of time."""
        calls = sorted((entry for entry in entries if entry.called_us > 0), key=_called_us)
        if not calls:
            return
        times = [entry.called_us for entry in calls]
        for end in _ascending(ends):
            place = bisect_right(times, end.at_us)
            if place > 0:
                seq = calls[place - 1].seq
                if self._seq_of.get(end.step, seq) != seq:
                    # The program counts its steps anew.
                    self._seq_of = {known: before for known, before in self._seq_of.items() if known < end.step}
                self._seq_of[end.step] = seq
        self._forget_undone()
        self._thin()
        self._pairs = [StepCalls(step, seq) for step, seq in sorted(self._seq_of.items())]

    def report(self) -> list[StepCalls]:
        """Return what is kept, ascending."""
        return self._pairs

    def _forget_undone(self) -> None:
        """Forget higher steps with lower seqs: the program has begun to count anew since."""
        newest_seq = max(self._seq_of.values(), default=0)
        for step in sorted(self._seq_of, reverse=True):
            if self._seq_of[step] >= newest_seq:
                break
            del self._seq_of[step]

    def _thin(self) -> None:
        older = sorted(self._seq_of)[:-NUM_NEWEST]
        kept = sorted(older, key=_weight, reverse=True)[:NUM_OLDER]
        for step in set(older) - set(kept):
            del self._seq_of[step]


def _ascending(ends: Sequence[StepEnd]) -> Sequence[StepEnd]:
    """Return the latest ends whose steps ascend."""
    first = len(ends)
    while first > 0 and ends[first - 1].step >= 0 and (first == len(ends) or ends[first - 1].step < ends[first].step):
        first -= 1
    return ends[first:]


def _weight(step: int) -> tuple[int, int]:
    """Return the highest power of two that divides a step, then the step itself."""
    return (step & -step if step else 1 << 62, step)


def _called_us(entry: RecorderEntry) -> int:
    return entry.called_us
