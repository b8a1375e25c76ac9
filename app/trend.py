"""Remembers how a figure went over the steps, in bounded memory: when full, neighbours are merged into their mean."""

from __future__ import annotations

import math


class Trend:
    """Points (x, y) with growing x; at most `max_points`, the whole run always in view."""

    def __init__(self, max_points: int = 2048) -> None:
        self._max_points = max_points
        self._stride = 1
        self._pending: list[tuple[float, float]] = []
        self.points: list[tuple[float, float]] = []

    def add(self, x: float, y: float) -> None:
        """Take a point; one that does not advance in x is ignored, one that goes back starts afresh (a new attempt)."""
        if not math.isfinite(y):
            return
        last_x = self._pending[-1][0] if self._pending else self.points[-1][0] if self.points else -math.inf
        if x == last_x:
            return
        if x < last_x:
            self._stride = 1
            self._pending.clear()
            self.points.clear()
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self.points.append(_mean(self._pending))
        self._pending.clear()
        if len(self.points) >= self._max_points:
            self.points = [_mean(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self._stride *= 2

    def go_on_with(self, newer: Trend) -> None:
        """Take the points of another one that are further on."""
        last_x = self._pending[-1][0] if self._pending else self.points[-1][0] if self.points else -math.inf
        for x, y in (*newer.points, *newer._pending):
            if x > last_x:
                self.add(x, y)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    # The last x, so that x keeps growing and the newest point stands at the right edge.
    return points[-1][0], sum(y for _, y in points) / len(points)
