"""Whether what stragglers cost grows or falls: a GPU that gets hotter, a disk that fills, a cure that takes hold."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_AGE_S = 300.0
MIN_AGE_S = 60.0
"""What is looked at as one window must not be compared with itself."""
SPAN_S = 10.0
"""The earlier cost is a mean over so long."""
MIN_CHANGE = 0.05
MIN_CHANGE_RATIO = 0.25
"""Less change is noise: in points of the step time, and of what it was."""


class EarlierCost(NamedTuple):
    """What stragglers cost some time ago, where that was notably more or less."""

    frac: float
    """Of the step time."""
    age_s: float


class CostTrend:
    """The costs of the present stragglers, over some minutes."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._costs: deque[tuple[float, float]] = deque()

    def note(self, ranks: Sequence[int], cost_frac: float, now_s: float) -> None:
        """Take what stragglers cost now; of other ones than before, all begins anew."""
        if tuple(ranks) != self._ranks:
            self._ranks = tuple(ranks)
            self._costs.clear()
        self._costs.append((now_s, cost_frac))
        while self._costs[0][0] < now_s - MAX_AGE_S:
            self._costs.popleft()

    def forget(self) -> None:
        """Take that there are none."""
        self._ranks = ()
        self._costs.clear()

    def earlier(self, now_s: float) -> EarlierCost | None:
        """Return the earlier cost, None where it was much the same or too little time has gone by."""
        if not self._costs or now_s - self._costs[0][0] < MIN_AGE_S:
            return None
        first_s = self._costs[0][0]
        first = [cost for at_s, cost in self._costs if at_s < first_s + SPAN_S]
        before, after = sum(first) / len(first), self._costs[-1][1]
        if abs(after - before) < max(MIN_CHANGE, MIN_CHANGE_RATIO * before):
            return None
        return EarlierCost(before, now_s - first_s)
