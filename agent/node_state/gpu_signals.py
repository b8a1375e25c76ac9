"""Signals of ranks from the GPUs that they compute on.

Pure.

An idle GPU lowers its clocks and its PCIe link, which slows nobody: these count while it is busy alone, and so does its
power limit. Counters become rates over `RATE_S`, since the sampler asks for them seldom: one sample for each such time.
A figure that is not known gives no sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from agent.wire.machine import GpuCondition, PcieLink, ThrottleReason
from agent.wire.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.wire.machine import GpuFigures, GpuHolder, GpuReport, JobRank

BUSY_FRAC = 0.3
"""Part of a sampling period with kernels from which on a GPU's clocks are those of work."""
BUSY_SAMPLES = 2
"""Samples in which it was busy before its clocks count: it needs a moment to raise them."""
USED_FRAC = 0.1
"""The same part below which a power limit is none: idle GPUs report it too."""
RATE_S = 10.0
"""Seconds over which a counter becomes a rate."""
MPS_SERVER = "nvidia-cuda-mps"
"""Beginning of the name of MPS's server and its control daemon, which have a context for their clients."""
_THERMAL = frozenset({ThrottleReason.SW_THERMAL, ThrottleReason.HW_THERMAL})
_EXPLAINED = frozenset({ThrottleReason.HW_THERMAL, ThrottleReason.HW_POWER_BRAKE})
"""Reasons that NVML reports beside HW_SLOWDOWN where it knows them. Source: nvml.h,
nvmlClocksThrottleReasonHwSlowdown."""


class _Count(NamedTuple):
    """A counter at the beginning of a window."""

    value: int
    at_s: float


class GpuSignals:
    """What GPUs of a node mean to the ranks on them, from one sample to the next."""

    def __init__(self) -> None:
        self._num_busy: dict[int, int] = {}
        """Samples in a row in which a GPU was busy, by index."""
        self._counts: dict[tuple[int, Signal], _Count] = {}

    def values(self, gpus: Sequence[GpuReport], now_s: float) -> Iterator[tuple[JobRank, Signal, float]]:
        """Yield a value for each signal that is known of each rank's GPU; each sample is to be given once."""
        of_gpus = [self._of_gpu(gpu.figures, now_s) for gpu in gpus]
        for whose, place in computing_places(gpus).items():
            for signal, value in of_gpus[place].items():
                yield whose, signal, value
            others = num_others(gpus[place], whose)
            if others is not None:
                yield whose, Signal.GPU_OTHERS, float(others)

    def _of_gpu(self, figures: GpuFigures, now_s: float) -> dict[Signal, float]:
        """Return what is known of a GPU that works."""
        if figures.condition is not GpuCondition.OK:
            self._num_busy.pop(figures.index, None)
            return {}
        pcie, links = figures.pcie or PcieLink(), figures.nvlinks
        found: dict[Signal, float | None] = {
            Signal.GPU_TEMPERATURE: figures.temperature_celsius,
            Signal.GPU_POWER_LIMIT: figures.power_limit_watts,
            Signal.NVLINKS: None if links is None else links.num_up,
            Signal.GPU_ROW_REMAP: _row_remap(figures),
            Signal.PCIE_REPLAYS: self._rate(figures, Signal.PCIE_REPLAYS, pcie.replays, now_s),
            Signal.NVLINK_ERRORS: self._rate(
                figures, Signal.NVLINK_ERRORS, None if links is None else links.errors, now_s
            ),
            Signal.GPU_ECC_CORRECTED: self._rate(
                figures, Signal.GPU_ECC_CORRECTED, figures.ecc_corrected_errors, now_s
            ),
            **_throttled(figures),
        }
        if self._is_busy(figures):
            found |= {
                Signal.GPU_CLOCK: figures.sm_clock_hz,
                Signal.GPU_MEMORY_CLOCK: figures.memory_clock_hz,
                Signal.PCIE_WIDTH: pcie.width,
                Signal.PCIE_GENERATION: pcie.generation,
            }
        return {signal: float(value) for signal, value in found.items() if value is not None}

    def _is_busy(self, figures: GpuFigures) -> bool:
        is_busy = figures.busy_frac is not None and figures.busy_frac >= BUSY_FRAC
        num_busy = self._num_busy.get(figures.index, 0) + 1 if is_busy else 0
        self._num_busy[figures.index] = min(num_busy, BUSY_SAMPLES)
        return num_busy >= BUSY_SAMPLES

    def _rate(self, figures: GpuFigures, signal: Signal, value: int | None, now_s: float) -> float | None:
        """Return by how much a counter grew a second, at the end of each window; None before."""
        key = (figures.index, signal)
        if value is None:
            self._counts.pop(key, None)
            return None
        last = self._counts.get(key)
        if last is None or value < last.value or now_s < last.at_s:
            self._counts[key] = _Count(value, now_s)  # it is new, or its driver is
            return None
        if now_s - last.at_s < RATE_S:
            return None
        self._counts[key] = _Count(value, now_s)
        return (value - last.value) / (now_s - last.at_s)


def computing_places(gpus: Sequence[GpuReport]) -> dict[JobRank, int]:
    """Return the place of the GPU that each rank computes on: its home, or where it holds most if it holds none there.

    A rank that has not chosen its device computes on another one than it should.
    """
    held: dict[JobRank, dict[int, int]] = {}
    for place, gpu in enumerate(gpus):
        for holder in gpu.holders:
            if holder.whose is not None:
                places = held.setdefault(holder.whose, {})
                places[place] = places.get(place, 0) + (holder.used_bytes or 0)
    found = {}
    for place, gpu in enumerate(gpus):
        for whose in gpu.owners:
            places = held.get(whose, {})
            found[whose] = _fullest(places) if places and place not in places else place
    return found


def _fullest(places: Mapping[int, int]) -> int:
    return max(places, key=lambda place: (places[place], -place))


def num_others(gpu: GpuReport, whose: JobRank) -> int | None:
    """Return the processes that share a rank's GPU, or its MIG instance, and do not descend from it.

    None where the rank is not seen on it: in a container the pids may mean nothing to us.
    """
    instances = {holder.mig_uuid for holder in gpu.holders if holder.whose == whose}
    if not instances:
        return None
    return len({holder.pid for holder in gpu.holders if holder.mig_uuid in instances and _is_other(holder, whose)})


def _is_other(holder: GpuHolder, whose: JobRank) -> bool:
    return holder.whose != whose and not holder.name.startswith(MPS_SERVER)


def numa_nodes(gpus: Sequence[GpuReport]) -> dict[JobRank, int]:
    """Return the NUMA node of the GPU that each rank computes on, where it is known."""
    nodes = {whose: gpus[place].figures.numa_node for whose, place in computing_places(gpus).items()}
    return {whose: node for whose, node in nodes.items() if node is not None}


def _row_remap(figures: GpuFigures) -> float | None:
    known = [fact for fact in (figures.is_row_remap_pending, figures.has_row_remap_failed) if fact is not None]
    return float(any(known)) if known else None


def _throttled(figures: GpuFigures) -> dict[Signal, float | None]:
    """Return whether a GPU is slowed at this moment, by cause: 0 or 1."""
    reasons = frozenset(figures.throttle_reasons)
    is_used = figures.busy_frac is None or figures.busy_frac >= USED_FRAC
    return {
        Signal.GPU_THERMAL: float(bool(reasons & _THERMAL)),
        Signal.GPU_POWER_CAP: float(is_used and ThrottleReason.SW_POWER_CAP in reasons),
        Signal.GPU_POWER_BRAKE: float(ThrottleReason.HW_POWER_BRAKE in reasons),
        Signal.GPU_HW_SLOWDOWN: float(ThrottleReason.HW_SLOWDOWN in reasons and not reasons & _EXPLAINED),
    }
