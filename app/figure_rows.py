"""Figures of a job at one moment, over all its ranks, GPUs or nodes: what the charts show over time."""

from __future__ import annotations

from enum import StrEnum

import msgspec

METRIC_PREFIX = "metric "
"""Before the name of a figure that a pattern of the job finds in the ranks' lines."""


class FigureKey(StrEnum):
    """What a figure is of; a metric's key is `METRIC_PREFIX` and its name."""

    LOSS = "loss"
    STEP_RATE = "step_rate"
    """Steps a second."""
    WAIT_SHARE = "wait_share"
    """Share of the last seconds that a rank spent waiting."""
    GPU_USE = "gpu_use"
    """Share of the last second in which some kernel ran, by GPU."""
    GPU_MEMORY = "gpu_memory"
    """Bytes held by everybody, by GPU."""
    CPU_CORES = "cpu_cores"
    """Cores that a rank's process keeps busy."""
    RANK_MEMORY = "rank_memory"
    """Resident bytes of a rank's process."""
    HOST_CPU = "host_cpu"
    """Busy share of all cores, by node."""


class Figure(msgspec.Struct, frozen=True):
    """A figure at one moment; None is not known, never a made-up zero."""

    key: str
    value: float | None
    """The mean; NaN or infinite where one of those it is over is."""
    low: float | None = None
    """The lowest and the highest of those that are finite; None where there is but one figure."""
    high: float | None = None
    low_who: str = ""
    """Whose it is, in clean words: `rank 2`, `GPU 3 of node-7`, `node-7`; the first of equals."""
    high_who: str = ""
