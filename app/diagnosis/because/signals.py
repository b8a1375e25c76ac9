"""What each signal can mean for a slow rank: whether it is a cause, where it counts, and how much is a difference.

The traits below keep apart what makes a rank slow and what follows from it. Other ranks wait for a slow one, so their
signals differ from its own although nothing is wrong with it:

- They sleep, or spin in a kernel of NCCL: it has the CPUs and the interpreter lock more often than they, waits more for
  both, and collects more garbage. Such times are compared per second of work (`is_per_work`), not per second.
- Their GPUs draw less power: its GPU is warmer, at its power limit more often, and some percent slower. A temperature
  is never a cause, a power cap only beside a clock that is clearly lower.
- Its GPU idles while it loads data: signals of the GPU count in phases of computing alone (`phases`).
- On a whole host that is slow the others idle: their CPUs may clock differently, and pressure is only support.
"""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NamedTuple

from agent.wire.signals import Signal
from ddpcore.wire import Phase

COMPUTING = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BARRIER, Phase.EVAL, Phase.OTHER})
READING = frozenset(Phase) - {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
"""Phases in which a rank may read or write files."""
ANY_PHASE = frozenset(Phase)

LAG_S = 5.0
"""Seconds by which a change may be dated too late: agents smooth."""
SELDOM_LAG_S, COUNTER_LAG_S = LAG_S + 10.0, LAG_S + 20.0
"""The same where an agent asks every 10 s, and where it makes rates of counters over another 10 s."""


class Scope(StrEnum):
    """Whose figure a signal is."""

    RANK = "rank"
    GPU = "gpu"
    HOST = "host"


class Role(Enum):
    """What a signal may be in a verdict."""

    CAUSE = 1
    WITNESS = 2
    """It shows that a rank is held up, and is named itself where no cause of its family differs."""
    SUPPORT = 3
    """It is shown beside a cause, and never named itself."""


class Family(Enum):
    """Signals that explain each other."""

    CPU = 1
    MEMORY = 2
    DISK = 3
    GPU_SPEED = 4
    ALONE = 5
    """A signal that no other one explains."""


class Trait(NamedTuple):
    """How a signal is compared, and what it may explain."""

    scope: Scope
    role: Role
    family: Family
    least: float
    """Least difference from the peers' median, in the signal's unit."""
    least_ratio: float = 0.0
    """Least difference as a multiple of the median; the larger one of both counts."""
    is_less_worse: bool = False
    """Whether a lower value is the harmful one."""
    phases: frozenset[Phase] = ANY_PHASE
    """Phases of a slow rank that it may explain."""
    is_direct: bool = False
    """Whether it measures lost time or speed itself: then it may be likely although its beginning is not known."""
    is_weak: bool = False
    """Whether it is possible at most: often something else explains both."""
    is_per_work: bool = False
    """Whether it grows with the fraction of time in which a rank works, and is compared per second of work."""
    is_part: bool = False
    """Whether it is a part of the rank's time: it must be large enough for the cost."""
    explains_stalls: bool = False
    """Whether it may keep a rank from moving for seconds."""
    lag_s: float = LAG_S
    """Seconds by which a change of it may be dated too late."""
    lead_s: float = 0.0
    """Seconds by which it takes longer to name a rank for it: it holds up some steps only."""


def _rank(role: Role, family: Family, least: float, least_ratio: float = 0.0, **more: object) -> Trait:
    return Trait(Scope.RANK, role, family, least, least_ratio, **more)  # type: ignore[arg-type]


def _gpu(role: Role, family: Family, least: float, least_ratio: float = 0.0, **more: object) -> Trait:
    return Trait(Scope.GPU, role, family, least, least_ratio, **({"phases": COMPUTING} | more))  # type: ignore[arg-type]


def _host(role: Role, family: Family, least: float, least_ratio: float = 0.0, **more: object) -> Trait:
    return Trait(Scope.HOST, role, family, least, least_ratio, **more)  # type: ignore[arg-type]


TRAITS: dict[Signal, Trait] = {
    # The GPU's speed. A reason of the hardware counts where the clock is lower, as far as the clock is known.
    Signal.GPU_THERMAL: _gpu(Role.CAUSE, Family.GPU_SPEED, 0.1, is_direct=True),
    Signal.GPU_HW_SLOWDOWN: _gpu(Role.CAUSE, Family.GPU_SPEED, 0.1, is_direct=True),
    Signal.GPU_POWER_BRAKE: _gpu(Role.CAUSE, Family.GPU_SPEED, 0.1, is_direct=True),
    Signal.GPU_POWER_LIMIT: _gpu(Role.CAUSE, Family.GPU_SPEED, 10.0, 0.08, is_less_worse=True, lag_s=SELDOM_LAG_S),
    Signal.GPU_POWER_CAP: _gpu(Role.CAUSE, Family.GPU_SPEED, 0.2, is_weak=True, is_per_work=True),
    Signal.GPU_CLOCK: _gpu(Role.WITNESS, Family.GPU_SPEED, 5e7, 0.1, is_less_worse=True, is_direct=True),
    Signal.GPU_TEMPERATURE: _gpu(Role.SUPPORT, Family.GPU_SPEED, 5.0),
    Signal.GPU_MEMORY_CLOCK: _gpu(Role.CAUSE, Family.ALONE, 1e8, 0.15, is_less_worse=True, is_direct=True),
    # Its links, its memory, its other users.
    Signal.GPU_OTHERS: _gpu(Role.CAUSE, Family.ALONE, 0.5),
    Signal.PCIE_WIDTH: _gpu(Role.CAUSE, Family.ALONE, 0.9, 0.4, is_less_worse=True, phases=ANY_PHASE),
    Signal.PCIE_GENERATION: _gpu(Role.CAUSE, Family.ALONE, 0.9, is_less_worse=True, phases=ANY_PHASE),
    Signal.PCIE_REPLAYS: _gpu(Role.CAUSE, Family.ALONE, 10.0, 4.0, is_weak=True, phases=ANY_PHASE, lag_s=COUNTER_LAG_S),
    Signal.NVLINKS: _gpu(Role.CAUSE, Family.ALONE, 0.9, is_less_worse=True, lag_s=SELDOM_LAG_S),
    Signal.NVLINK_ERRORS: _gpu(Role.CAUSE, Family.ALONE, 1.0, 4.0, is_weak=True, lag_s=COUNTER_LAG_S),
    Signal.GPU_ROW_REMAP: _gpu(Role.CAUSE, Family.ALONE, 0.5, is_weak=True, lag_s=SELDOM_LAG_S),
    Signal.GPU_ECC_CORRECTED: _gpu(Role.CAUSE, Family.ALONE, 1.0, 4.0, is_weak=True, lag_s=COUNTER_LAG_S),
    # CPUs.
    Signal.CPU_THROTTLED: _rank(
        Role.CAUSE, Family.CPU, 0.08, is_direct=True, is_per_work=True, is_part=True, explains_stalls=True
    ),
    Signal.CPU_OTHERS: _host(Role.CAUSE, Family.CPU, 0.1, explains_stalls=True),
    Signal.CPU_STEAL: _host(Role.CAUSE, Family.CPU, 0.05, explains_stalls=True),
    Signal.CPUS_ALLOWED: _rank(Role.CAUSE, Family.CPU, 1.0, 0.45, is_less_worse=True),
    Signal.CPU_WAIT: _rank(
        Role.WITNESS, Family.CPU, 0.1, is_direct=True, is_per_work=True, is_part=True, explains_stalls=True
    ),
    Signal.CPU_PRESSURE: _host(Role.SUPPORT, Family.CPU, 0.1),
    Signal.CPU_CLOCK: _host(Role.CAUSE, Family.ALONE, 3e8, 0.2, is_less_worse=True),
    Signal.FAR_FROM_GPU: _rank(Role.CAUSE, Family.ALONE, 0.5),
    # The host's memory.
    Signal.SWAPPED: _host(Role.CAUSE, Family.MEMORY, 2.0**20, 4.0, explains_stalls=True),
    Signal.MAJOR_FAULTS: _rank(Role.WITNESS, Family.MEMORY, 50.0, 2.0, is_direct=True, explains_stalls=True),
    Signal.MEMORY_PRESSURE: _host(Role.WITNESS, Family.MEMORY, 0.1, explains_stalls=True),
    # Disks and file systems.
    Signal.BLOCKED: _rank(
        Role.WITNESS, Family.DISK, 0.1, phases=READING, is_direct=True, is_part=True, explains_stalls=True
    ),
    Signal.IO_PRESSURE: _host(Role.WITNESS, Family.DISK, 0.1, phases=READING, explains_stalls=True),
    # Python. The probe waits for the lock that the rank's own computing holds, too.
    Signal.GC_PAUSE: _rank(
        Role.CAUSE, Family.ALONE, 0.05, is_direct=True, is_per_work=True, is_part=True, explains_stalls=True
    ),
    Signal.GIL_WAIT: _rank(Role.CAUSE, Family.ALONE, 0.2, is_weak=True, is_per_work=True, is_part=True),
    Signal.LOG_LINES: _rank(Role.CAUSE, Family.ALONE, 100.0, 4.0, is_weak=True),
    # The network.
    Signal.NIC_SPEED: _host(Role.CAUSE, Family.ALONE, 1e6, 0.45, is_less_worse=True, is_direct=True),
    Signal.TCP_RETRANSMITS: _host(Role.CAUSE, Family.ALONE, 0.01, 2.0, lead_s=50.0),
    Signal.NIC_ERRORS: _host(Role.CAUSE, Family.ALONE, 5.0, 4.0),
    Signal.NIC_DROPS: _host(Role.CAUSE, Family.ALONE, 50.0, 4.0, is_weak=True),
}
"""Traits by signal, in the order in which equally good candidates are named."""
ORDER = {signal: place for place, signal in enumerate(TRAITS)}
