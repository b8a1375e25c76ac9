"""What is known of ranks without what they report: by their processes, and by what they print."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.words import seconds_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agent.wire.reports import WorkerReport

LONG_QUIET_S = 60.0
LEAST_GAP_S = 1.0
"""Between words, before a job is held to any habit."""
QUIET_FACTOR = 3.0
"""A job that nobody sees into is said to be quiet when no rank has printed for this long, and so many times as long as
ever before."""


class Output:
    """When the ranks of a job print.

    Attributes:
        last_s: When any of them printed last; None before the first word.
    """

    def __init__(self) -> None:
        self.last_s: float | None = None
        self._longest_gap_s = 0.0

    def put(self, at_s: NDArray[np.float64]) -> None:
        """Take when ranks have printed last, as nodes say."""
        news = at_s if self.last_s is None else at_s[at_s > self.last_s]
        if not len(news):
            return
        if self.last_s is not None:
            gaps_s = np.diff(np.sort(news), prepend=self.last_s)
            self._longest_gap_s = max(self._longest_gap_s, float(gaps_s.max()))
        self.last_s = float(news.max())

    def is_too_quiet(self, now_s: float) -> bool:
        """Say whether the ranks have been quiet for longer than they are wont to be."""
        if self.last_s is None or self._longest_gap_s < LEAST_GAP_S:
            return False  # nobody knows how often it prints
        return now_s - self.last_s > max(LONG_QUIET_S, QUIET_FACTOR * self._longest_gap_s)


def outside_text(worker: WorkerReport) -> str:
    """Return `watched from outside: printed 3.2 s ago, 0.9 cores busy`."""
    if worker.quiet_s >= worker.seen_s:
        output = f"has printed nothing in {seconds_text(worker.seen_s)}"
    else:
        output = f"printed {seconds_text(worker.quiet_s)} ago"
    return f"watched from outside: {output}, {worker.cpu_cores:.1f} cores busy"
