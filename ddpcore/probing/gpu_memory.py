"""What torch's allocator holds on the GPUs, read on the main thread, at the end of a step.

The allocator's figures lie behind its lock, which a thread may hold for as long as the GPU takes; and torch asks for
them with Python's own lock in hand. A probe that did that on its thread could stop the whole rank. At the end of a step
the main thread itself holds no memory in flight, and training would take the same lock next.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol

from ddpcore.wire import GpuMemoryReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MEMORY_PERIOD_S = 1.0
"""Between looks."""
MAX_GPUS = 64


class Cuda(Protocol):
    """The part of `torch.cuda` that is used."""

    def is_initialized(self) -> bool:
        """Say whether the program uses CUDA."""

    def device_count(self) -> int:
        """Return how many GPUs it sees."""

    @property
    def get_device_properties(self) -> Callable[[int], Any]:
        """Return what a GPU is."""

    @property
    def memory_stats_as_nested_dict(self) -> Callable[[int], Mapping[str, Any]]:
        """Return the allocator's figures."""


class GpuMemory:
    """Looks at most once a second; initialises nothing."""

    def __init__(self) -> None:
        self._due_s = float("-inf")
        self._uuids: dict[int, str] = {}
        self._last: tuple[GpuMemoryReport, ...] = ()

    def look(self, now_s: float, cuda: Cuda | None = None) -> tuple[GpuMemoryReport, ...]:
        """Return what is held, GPUs without any left out; never raises. `cuda` is `torch.cuda` unless told.

        Where the allocator has no figures (a pluggable one has none, and says so by a RuntimeError) what was told last
        stays, and it is not asked again: training goes on.
        """
        if now_s < self._due_s:
            return self._last
        self._due_s = now_s + MEMORY_PERIOD_S
        if cuda is None:
            cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is not None and cuda.is_initialized():
            try:
                reports = [self._of(cuda, device) for device in range(min(cuda.device_count(), MAX_GPUS))]
            except RuntimeError:
                self._due_s = float("inf")
            else:
                self._last = tuple(report for report in reports if report is not None)
        return self._last

    def _of(self, cuda: Cuda, device: int) -> GpuMemoryReport | None:
        stats = cuda.memory_stats_as_nested_dict(device)
        reserved = _whole(stats, "reserved_bytes")
        if not any(reserved):
            return None
        if device not in self._uuids:
            self._uuids[device] = _uuid(cuda.get_device_properties(device))
        allocated = _whole(stats, "allocated_bytes")
        return GpuMemoryReport(self._uuids[device], allocated[0], reserved[0], allocated[1], reserved[1])


def _whole(stats: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Return (current, peak) over all pools."""
    figures = stats.get(name, {}).get("all", {})
    return max(0, int(figures.get("current", 0))), max(0, int(figures.get("peak", 0)))


def _uuid(properties: Any) -> str:
    """Return a UUID as NVML writes it; torch leaves the kind away."""
    text = str(getattr(properties, "uuid", ""))
    return text if not text or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
