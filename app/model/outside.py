"""What is known of ranks without what they report: by their processes, and by what they print."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agent.wire.fields import EPOCH_METRIC, LOSS_METRIC, STEP_METRIC
from app.words import seconds_text

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport

MAX_STEP = 2**53
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

    def put(self, worker: WorkerReport, now_s: float) -> None:
        """Take a node's word on one of the ranks."""
        if worker.quiet_s >= worker.seen_s:
            return  # not a word yet
        at_s = now_s - worker.quiet_s
        if self.last_s is None:
            self.last_s = at_s
        elif at_s > self.last_s:
            self._longest_gap_s = max(self._longest_gap_s, at_s - self.last_s)
            self.last_s = at_s

    def is_too_quiet(self, now_s: float) -> bool:
        """Say whether the ranks have been quiet for longer than they are wont to be."""
        if self.last_s is None or self._longest_gap_s < LEAST_GAP_S:
            return False  # nobody knows how often it prints
        return now_s - self.last_s > max(LONG_QUIET_S, QUIET_FACTOR * self._longest_gap_s)


def loss_of(worker: WorkerReport) -> float | None:
    """Return a rank's loss: what it reports, else what its lines say."""
    report = worker.report
    return worker.metrics.get(LOSS_METRIC) if report is None or report.loss is None else report.loss


def step_of(worker: WorkerReport) -> int | None:
    """Return a rank's step: what it says itself, else what its lines say, else the count of its optimizers' steps."""
    report = worker.report
    if report is not None and report.step is not None and not report.is_step_counted:
        return report.step
    printed = _whole(worker.metrics.get(STEP_METRIC))
    return printed if printed is not None or report is None else report.step


def epoch_of(worker: WorkerReport) -> int | None:
    """Return a rank's epoch: what it reports, else what its lines say."""
    report = worker.report
    return _whole(worker.metrics.get(EPOCH_METRIC)) if report is None or report.epoch is None else report.epoch


def is_step_counted(worker: WorkerReport) -> bool:
    """Say whether a rank's step is only the count of its optimizers' steps."""
    report = worker.report
    return report is not None and report.is_step_counted and _whole(worker.metrics.get(STEP_METRIC)) is None


def outside_text(worker: WorkerReport) -> str:
    """Return `watched from outside: printed 3.2 s ago, 0.9 cores busy`."""
    if worker.quiet_s >= worker.seen_s:
        output = f"has printed nothing in {seconds_text(worker.seen_s)}"
    else:
        output = f"printed {seconds_text(worker.quiet_s)} ago"
    return f"watched from outside: {output}, {worker.cpu_cores:.1f} cores busy"


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < MAX_STEP else None
