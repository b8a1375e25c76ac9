"""Signals: figures of a rank, its GPU or its host that may explain why the rank is slow.

An agent smooths each one and notes when it last changed lastingly, so that a console can compare a rank with its peers
now, and with itself before. What is usual is left out of a report: a rate or a part of time near 0 (`RATES`). Those
that are missing since nobody measures them are listed (`Unmeasured`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from ddpcore.wire import Count, Seconds, Word

if TYPE_CHECKING:
    from collections.abc import Sequence


class Signal(StrEnum):
    """What is measured. Its unit stands in its comment; a part of time is 0..1."""

    # Of the rank's process.
    CPU_WAIT = "cpu_wait"
    """Part of the time for which its main thread could run and had no CPU."""
    CPU_THROTTLED = "cpu_throttled"
    """Part of the time for which the CPU quota of a cgroup held threads of it at most."""
    CPUS_ALLOWED = "cpus_allowed"
    """CPUs on which it may run; sent where these are fewer than the node has."""
    FAR_FROM_GPU = "far_from_gpu"
    """1 if none of its CPUs is on the NUMA node of its GPU."""
    BLOCKED = "blocked"
    """Part of the time in uninterruptible sleep (D), of itself or of a DataLoader worker."""
    MAJOR_FAULTS = "major_faults"
    """Pages a second that it had to fetch from a disk, its child processes included."""
    GC_PAUSE = "gc_pause"
    """Part of the time in Python's garbage collection."""
    GIL_WAIT = "gil_wait"
    """Part of the time for which Python's interpreter lock was held for 10 ms and more, as by a call in C."""
    LOG_LINES = "log_lines"
    """Lines a second that it printed."""
    # Of its GPU.
    GPU_CLOCK = "gpu_clock"
    """Clock of the SMs in Hz, while it was busy."""
    GPU_MEMORY_CLOCK = "gpu_memory_clock"
    """Clock of the device memory in Hz, while it was busy."""
    GPU_TEMPERATURE = "gpu_temperature"
    """Degrees Celsius."""
    GPU_THERMAL = "gpu_thermal"
    """Part of the time slowed by heat, by driver or hardware."""
    GPU_POWER_CAP = "gpu_power_cap"
    """Part of the time slowed by its power limit."""
    GPU_POWER_BRAKE = "gpu_power_brake"
    """Part of the time slowed by the power supply."""
    GPU_HW_SLOWDOWN = "gpu_hw_slowdown"
    """Part of the time slowed by its hardware, the reason not known closer."""
    GPU_POWER_LIMIT = "gpu_power_limit"
    """Enforced power limit in watts."""
    PCIE_WIDTH = "pcie_width"
    """Lanes of the PCIe link, while it was busy."""
    PCIE_GENERATION = "pcie_generation"
    PCIE_REPLAYS = "pcie_replays"
    """Packets a second that the PCIe link sent again."""
    NVLINKS = "nvlinks"
    """NVLinks that are up."""
    NVLINK_ERRORS = "nvlink_errors"
    """Errors a second on its NVLinks, of all kinds."""
    GPU_ECC_CORRECTED = "gpu_ecc_corrected"
    """Corrected memory errors a second."""
    GPU_ROW_REMAP = "gpu_row_remap"
    """1 while the replacement of a faulty memory row is pending, or has failed."""
    GPU_OTHERS = "gpu_others"
    """Other processes than its own with a context on its GPU, or on its MIG instance."""
    # Of its host.
    CPU_OTHERS = "cpu_others"
    """Part of all CPUs that processes of no job used."""
    CPU_STEAL = "cpu_steal"
    """Part of all CPUs that the hypervisor gave to other machines."""
    CPU_PRESSURE = "cpu_pressure"
    """Part of the time for which some task had no CPU (PSI, some)."""
    MEMORY_PRESSURE = "memory_pressure"
    """Part of the time for which some task waited for memory (PSI, some)."""
    IO_PRESSURE = "io_pressure"
    """Part of the time for which some task waited for a disk (PSI, some)."""
    SWAPPED = "swapped"
    """Bytes a second swapped in and out."""
    CPU_CLOCK = "cpu_clock"
    """Clock in Hz of the fastest of its CPUs: idle ones are slow everywhere."""
    NIC_SPEED = "nic_speed"
    """Speed in bits a second of the interface that carries most."""
    NIC_ERRORS = "nic_errors"
    """Packets a second with errors, over all interfaces but loopback."""
    NIC_DROPS = "nic_drops"
    """Packets a second that were dropped, over all interfaces but loopback."""
    TCP_RETRANSMITS = "tcp_retransmits"
    """Part of the sent TCP segments that were sent again."""


LEVELS = frozenset(
    {
        *(Signal.CPUS_ALLOWED, Signal.GPU_CLOCK, Signal.GPU_MEMORY_CLOCK, Signal.GPU_TEMPERATURE),
        *(Signal.GPU_POWER_LIMIT, Signal.PCIE_WIDTH, Signal.PCIE_GENERATION, Signal.NVLINKS),
        *(Signal.CPU_CLOCK, Signal.NIC_SPEED),
    }
)
"""Signals without a neutral value: one that is missing is not known."""
RATES_OF_RANK = (
    *(Signal.CPU_WAIT, Signal.CPU_THROTTLED, Signal.FAR_FROM_GPU, Signal.BLOCKED, Signal.MAJOR_FAULTS),
    *(Signal.GC_PAUSE, Signal.GIL_WAIT, Signal.LOG_LINES),
    *(Signal.GPU_THERMAL, Signal.GPU_POWER_CAP, Signal.GPU_POWER_BRAKE, Signal.GPU_HW_SLOWDOWN),
    *(Signal.PCIE_REPLAYS, Signal.NVLINK_ERRORS, Signal.GPU_ECC_CORRECTED, Signal.GPU_ROW_REMAP, Signal.GPU_OTHERS),
)
RATES_OF_HOST = (
    *(Signal.CPU_OTHERS, Signal.CPU_STEAL, Signal.CPU_PRESSURE, Signal.MEMORY_PRESSURE, Signal.IO_PRESSURE),
    *(Signal.SWAPPED, Signal.NIC_ERRORS, Signal.NIC_DROPS, Signal.TCP_RETRANSMITS),
)
"""Rates of a rank or its GPU, and of a host. Their places are part of the wire: new ones come at the end."""
RATES = frozenset((*RATES_OF_RANK, *RATES_OF_HOST))
"""Signals whose neutral value is 0: one that is missing from a report with signals is 0, unless it is unmeasured."""

Value = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]


class Reading(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A signal's value, smoothed over some seconds, and its last lasting change."""

    value: Value
    before: Value | None = None
    """Its value before that change; None where there was none as far as known."""
    since_s: Seconds | None = None
    """How long ago that change began, in seconds."""


MAX_SIGNALS = 64
Readings: TypeAlias = Annotated[dict[Word, Reading], msgspec.Meta(max_length=MAX_SIGNALS)]
"""Readings by signal; one of a later version is kept and not understood."""

Unmeasured: TypeAlias = Count
"""Rates that nobody measures: bit i is that of place i in `RATES_OF_RANK` or `RATES_OF_HOST`.

An older agent does not report it: all that it leaves out counts as 0."""


def rates_in(unmeasured: int, rates: Sequence[Signal]) -> set[Signal]:
    """Return the rates of an `Unmeasured`; those of a later version are left out.

    Args:
        unmeasured: The bits.
        rates: `RATES_OF_RANK` or `RATES_OF_HOST`.
    """
    return {rate for place, rate in enumerate(rates) if unmeasured >> place & 1}
