"""How long each call of NVML takes that the GPU sampler makes, in microseconds: by itself, and how often it is made.

    python -m tests.gpu.nvml_costs

The sampler is not asked: its calls are made here, on the first GPU, as it is at this moment (idle or busy).
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pynvml  # type: ignore[import-untyped]

from agent.machine import nvml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_CALLS = 30
_CORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC)
_UNCORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
CALLS: tuple[tuple[float, Callable[..., Any], tuple[Any, ...]], ...] = (
    (1.0, pynvml.nvmlDeviceGetUtilizationRates, ()),
    (1.0, nvml.memory, ()),
    (1.0, pynvml.nvmlDeviceGetTemperature, (pynvml.NVML_TEMPERATURE_GPU,)),
    (1.0, pynvml.nvmlDeviceGetPowerUsage, ()),
    (1.0, pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_SM,)),
    (1.0, pynvml.nvmlDeviceGetClockInfo, (pynvml.NVML_CLOCK_MEM,)),
    (1.0, nvml.throttle_reasons, ()),
    (1.0, nvml.mig_handles, ()),
    (1.0, nvml.running_on, ()),
    (1.0, pynvml.nvmlDeviceGetCurrPcieLinkGeneration, ()),
    (1.0, pynvml.nvmlDeviceGetCurrPcieLinkWidth, ()),
    (nvml.SELDOM_S, pynvml.nvmlDeviceGetPcieReplayCounter, ()),
    (nvml.SELDOM_S, nvml.nvlinks, ()),
    (nvml.SELDOM_S, pynvml.nvmlDeviceGetEnforcedPowerLimit, ()),
    (nvml.SELDOM_S, pynvml.nvmlDeviceGetRemappedRows, ()),
    (nvml.SELDOM_S, pynvml.nvmlDeviceGetTotalEccErrors, _CORRECTED),
    (nvml.SELDOM_S, pynvml.nvmlDeviceGetTotalEccErrors, _UNCORRECTED),
    (nvml.CONSTANT_S, pynvml.nvmlDeviceGetMaxClockInfo, (pynvml.NVML_CLOCK_SM,)),
    (nvml.CONSTANT_S, pynvml.nvmlDeviceGetMaxPcieLinkGeneration, ()),
    (nvml.CONSTANT_S, pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, ()),
    (nvml.CONSTANT_S, pynvml.nvmlDeviceGetMaxPcieLinkWidth, ()),
    (nvml.CONSTANT_S, nvml.numa_node, ()),
)
"""Each call of a sample with its period in seconds, and what it is given beside the handle."""


class Cost(NamedTuple):
    """A call, its answer, and what it took in microseconds."""

    name: str
    period_s: float
    answer: Any
    first_us: float
    median_us: float
    worst_us: float

    @property
    def pause_s(self) -> float:
        """Seconds between two calls of the sampler, which pauses longer after dear ones."""
        return max(self.period_s, self.median_us / 1e6 / nvml.MOST_COST)


def costs(handle: Any) -> Iterator[Cost]:
    """Make each call some times."""
    for period_s, call, more in CALLS:
        took_us = []
        answer = None
        for _ in range(NUM_CALLS):
            began_s = time.perf_counter()
            answer = nvml.ask(call, handle, *more)
            took_us.append(1e6 * (time.perf_counter() - began_s))
        name = f"{call.__name__}({', '.join(map(str, more))})"
        yield Cost(name, period_s, answer, took_us[0], statistics.median(took_us[1:]), max(took_us[1:]))


def main() -> None:
    """Print a table, and what all of them cost a second."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    print(f"{pynvml.nvmlDeviceGetName(handle)}, driver {pynvml.nvmlSystemGetDriverVersion()}, n {NUM_CALLS}\n")
    print("| call | each | first | median | worst | answer |\n|---|---|---|---|---|---|")
    total_us = 0.0
    for cost in costs(handle):
        total_us += cost.median_us / max(1.0, cost.pause_s)
        times = f"{cost.first_us:.0f} us | {cost.median_us:.1f} us | {cost.worst_us:.0f} us"
        answer = str(cost.answer).replace("|", "/")[:60]
        print(f"| {cost.name} | {max(1.0, cost.pause_s):.0f} s | {times} | {answer} |")
    print(f"\nTogether {total_us:.0f} us a second for one GPU: {total_us / 1e4:.3f} % of the time.")


if __name__ == "__main__":
    main()
