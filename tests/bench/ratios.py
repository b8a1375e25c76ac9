"""What benchmarks make of pairs that ran side by side."""

from __future__ import annotations

import math
import random
import statistics

RESAMPLES = 10_000


def interval(log_ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median: one pair in which the machine was busy spoils a mean."""
    dice = random.Random(0)
    medians = sorted(statistics.median(dice.choices(log_ratios, k=len(log_ratios))) for _ in range(RESAMPLES))
    return math.exp(medians[RESAMPLES // 40]), math.exp(medians[-RESAMPLES // 40])
