"""A node's machine as it is reported: the host's own figures, its GPUs with who holds their memory, ranks' memory.

A figure that the machine does not have is None, never a made-up zero.

`MemoryReport`, `GrowthReport` and `LimitReport` are how a rank's memory grows, and what limits it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from ddpcore.wire import Count, Name, Rank, Seconds, Word

Frac = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e18)]
Sentence = Annotated[str, msgspec.Meta(max_length=1024)]

MAX_GPUS = 64
MAX_HOLDERS = 32
"""Holders of one GPU; the largest are kept."""
MAX_MIG_INSTANCES = 16
MAX_XIDS = 8


class HostReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Figures of the machine beside its cores and its memory."""

    load_1min: Amount | None = None
    """Processes that ran or waited for a core or a disk, mean of the last minute."""
    swap_total_bytes: Count | None = None
    swap_used_bytes: Count | None = None
    shm_total_bytes: Count | None = None
    """Bytes of /dev/shm, through which DataLoader workers pass their batches: when it is full they die of SIGBUS."""
    shm_used_bytes: Count | None = None
    disk_total_bytes: Count | None = None
    """Bytes of the file system that holds the agent's directory."""
    disk_free_bytes: Count | None = None
    nic_rx_bytes_hz: Amount | None = None
    """Bytes a second over all interfaces but loopback, received and sent."""
    nic_tx_bytes_hz: Amount | None = None


class GpuCondition(StrEnum):
    """Condition of a GPU as a whole, by NVML."""

    OK = "ok"
    LOST = "lost"
    """Fallen off the bus, or given up by its driver."""
    RESET_REQUIRED = "reset_required"
    UNREADABLE = "unreadable"
    """NVML does not answer for it, or not for this user."""


class ThrottleReason(StrEnum):
    """Reason why a GPU runs below its possible clock. Being idle, or set so by hand, is none."""

    SW_POWER_CAP = "sw_power_cap"
    HW_SLOWDOWN = "hw_slowdown"
    SYNC_BOOST = "sync_boost"
    SW_THERMAL = "sw_thermal"
    HW_THERMAL = "hw_thermal"
    HW_POWER_BRAKE = "hw_power_brake"


class Xid(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """An error that the driver has logged for a GPU since the sampler began to listen."""

    code: Count
    """Code of the error. Source: https://docs.nvidia.com/deploy/xid-errors/."""
    times: Count
    age_s: Seconds = 0.0
    """Seconds since the last time."""


class MigInstance(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A part of a GPU that programs see as a GPU."""

    uuid: Name
    memory_total_bytes: Count | None = None
    memory_used_bytes: Count | None = None


class PcieLink(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The PCIe link of a GPU; None is not known."""

    generation: Count | None = None
    """Generation at this moment; an idle GPU lowers it."""
    width: Count | None = None
    """Lanes at this moment."""
    generation_max: Count | None = None
    """Highest generation of this GPU in this slot."""
    width_max: Count | None = None
    """Most lanes of this GPU in this slot."""
    generation_gpu_max: Count | None = None
    """Highest generation of this GPU in any slot."""
    replays: Count | None = None
    """Packets sent again since the driver was loaded."""


class NvLinks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The NVLinks of a GPU."""

    num_links: Count
    num_up: Count
    """Those that are up."""
    errors: Count | None = None
    """Errors of all of them, of all kinds, since the driver was loaded."""


class GpuFigures(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Figures of a GPU by NVML."""

    index: Count
    """Index by PCI bus, as in nvidia-smi."""
    uuid: Name = ""
    name: Name = ""
    condition: GpuCondition = GpuCondition.OK
    busy_frac: Frac | None = None
    """Part of the last sampling period in which some kernel ran."""
    memory_busy_frac: Frac | None = None
    """Part of it in which device memory was read or written."""
    memory_total_bytes: Count | None = None
    memory_used_bytes: Count | None = None
    """Bytes used by all, contexts and driver included; torch's `reserved` is a part of it."""
    temperature_celsius: Annotated[float, msgspec.Meta(ge=-273.0, le=1e4)] | None = None
    power_watts: Amount | None = None
    power_limit_watts: Amount | None = None
    sm_clock_hz: Count | None = None
    sm_clock_max_hz: Count | None = None
    memory_clock_hz: Count | None = None
    throttle_reasons: Annotated[list[ThrottleReason], msgspec.Meta(max_length=16)] = []
    ecc_corrected_errors: Count | None = None
    """Number since the driver was loaded; None where ECC is off."""
    ecc_uncorrected_errors: Count | None = None
    is_row_remap_pending: bool | None = None
    """A faulty row of memory is replaced at the next reset."""
    has_row_remap_failed: bool | None = None
    pcie: PcieLink | None = None
    nvlinks: NvLinks | None = None
    """None without any."""
    numa_node: Count | None = None
    """NUMA node that it is attached to."""
    xids: Annotated[list[Xid], msgspec.Meta(max_length=MAX_XIDS)] = []
    """Xid errors, the latest first."""
    mig_instances: Annotated[list[MigInstance], msgspec.Meta(max_length=MAX_MIG_INSTANCES)] = []


class JobRank(msgspec.Struct, frozen=True, gc=False, order=True):
    """A rank of a job."""

    job_id: Name
    rank: Rank


class GpuHolder(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A process that has a context, and so memory, on a GPU."""

    pid: Count
    used_bytes: Count | None = None
    """Bytes; None where the driver does not show it (WSL, some MIG set-ups)."""
    mig_uuid: Name = ""
    whose: JobRank | None = None
    """Rank that it is, or that it descends from; None for processes of no job."""
    is_foreign: bool = False
    """True for a rank with a GPU of its own that holds memory on this one, which is another rank's."""
    name: Word = ""
    """Its name by the kernel, of at most 15 characters; empty where it cannot be read."""


class GpuReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A GPU and who uses it."""

    figures: GpuFigures
    owners: Annotated[list[JobRank], msgspec.Meta(max_length=MAX_HOLDERS)] = []
    """Ranks whose own GPU it is."""
    holders: Annotated[list[GpuHolder], msgspec.Meta(max_length=MAX_HOLDERS)] = []
    """Processes, the largest first."""


class GpuWatchState(StrEnum):
    """State of the node's GPU sampler."""

    STARTING = "starting"
    WATCHING = "watching"
    ABSENT = "absent"
    """Nothing to sample; the detail gives the reason."""
    SILENT = "silent"
    """NVML does not answer, or the sampler has ended: the figures are old, or there are none."""


class GpusReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """All GPUs of a node."""

    state: GpuWatchState = GpuWatchState.STARTING
    detail: Sentence = ""
    """Reason why there are no fresh figures, or ""."""
    age_s: Seconds = 0.0
    """Age of the figures in seconds."""
    driver_version: Word = ""
    gpus: Annotated[list[GpuReport], msgspec.Meta(max_length=MAX_GPUS)] = []


MAX_GROWTHS = 4
"""Growths of one rank: its host memory, and that on its GPU."""


class LimitKind(StrEnum):
    """What ends a process that holds too much memory."""

    MACHINE = "machine"
    """The memory of the machine, with its swap: shared by all that runs there, /dev/shm included."""
    CGROUP = "cgroup"
    """memory.max of a cgroup (v2) or memory.limit_in_bytes (v1), of the process or of one above it."""
    ADDRESS_SPACE = "address_space"
    """RLIMIT_AS of the process."""
    DATA = "data"
    """RLIMIT_DATA of the process."""
    GPU = "gpu"
    """The memory of a GPU: shared by all processes on it."""


class LimitReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A limit of a rank's memory, and how far it is used, by whomever it counts."""

    kind: LimitKind
    limit_bytes: Count
    used_bytes: Count
    """Bytes in use, without what the kernel, or torch's allocator, gives back on demand."""


class GrowthReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Steady growth of a rank's memory, and when it comes to the limit that is nearest in time."""

    limit: LimitReport
    held_bytes: Count
    """What the rank holds, its child processes included."""
    rate_bytes_hz: Amount
    """Growth of this rank, bytes a second."""
    for_s: Seconds
    """How long it has grown so."""
    remaining_s: Seconds
    """Seconds until the limit is reached, with the growth of the other ranks that share it."""
    is_near: bool = False
    """The limit is near, and the growth has lasted long enough to be no filling cache: worth a warning."""


class MemoryReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The memory of a rank's process and of its child processes."""

    tree_bytes: Count
    """Resident memory of the process, and what its child processes hold besides shared pages; swap included."""
    limits: Annotated[list[LimitReport], msgspec.Meta(max_length=8)] = []
    """Known limits of the host's memory, the nearest first; the machine's is in the node's own report."""
    growths: Annotated[list[GrowthReport], msgspec.Meta(max_length=MAX_GROWTHS)] = []
