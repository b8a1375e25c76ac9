"""How far a rank has come: what it reports goes before what it prints, and that before a count of its optimizers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agent.wire.fields import EPOCH_METRIC, LOSS_METRIC, STEP_METRIC

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport

MAX_STEP = 2**53


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


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < MAX_STEP else None
