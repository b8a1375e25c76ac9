"""What a node's state is made from: what happened to its jobs, what its ranks say, and what its machine says."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from agent.wire.machine import (
    GpuWatchState,
    HostReport,
    LimitReport,
)

if TYPE_CHECKING:
    from agent.node_state.gpu_sample import GpuSample
    from agent.wire.reports import ExitReport, ProcessState
    from ddpcore.wire import Place, RankReport


class JobAdmitted(msgspec.Struct, frozen=True):
    """A job has been prepared; an earlier attempt of it is over."""

    job_id: str
    attempt: int
    first_rank: int
    local_world_size: int
    world_size: int


class JobForgotten(msgspec.Struct, frozen=True):
    """A job is no longer this node's business."""

    job_id: str


class RankReported(msgspec.Struct, frozen=True):
    """A datagram came in; it may be anybody's of this user."""

    report: RankReport


class WorkerSeen(msgspec.Struct, frozen=True):
    """The process of a rank has been found."""

    job_id: str
    rank: int
    pid: int


class LimitSampled(msgspec.Struct, frozen=True):
    """A limit that a worker's memory runs into; equal keys are one limit, which workers share."""

    key: str
    report: LimitReport


class MemorySampled(msgspec.Struct, frozen=True):
    """What a worker and its child processes hold, and what limits it besides the machine."""

    tree_bytes: int
    limits: list[LimitSampled] = []
    """The nearest first."""


class WorkerSampled(msgspec.Struct, frozen=True):
    """The kernel has been asked about a worker that has been seen."""

    job_id: str
    rank: int
    process: ProcessState
    rss_bytes: int
    cpu_s: float
    pss_bytes: int | None = None
    memory: MemorySampled | None = None


class SeenFromOutside(msgspec.Struct, frozen=True):
    """A process has been looked at that cannot tell where it stands."""

    job_id: str
    rank: int
    pid: int
    """The rank's own, or that of a child that the rank waits for."""
    report_seq: int
    """Of the rank's last report then."""
    place: Place | None


class StorePortSeen(msgspec.Struct, frozen=True):
    """It has been found who listens on a port at which ranks wait for the others in `init_process_group`."""

    job_id: str
    port: int
    text: str
    """Its pid and its command line."""


class WorkerEnded(msgspec.Struct, frozen=True):
    """The process of a worker is gone."""

    job_id: str
    rank: int
    exit: ExitReport
    """As at its end: its age is 0."""


class RankPrinted(msgspec.Struct, frozen=True):
    """A rank has printed something."""

    job_id: str
    rank: int
    metrics: dict[str, float]
    """Found in it by the job's patterns."""


class HostSampled(msgspec.Struct, frozen=True):
    """The kernel has been asked about the machine and about this agent."""

    cpu_frac: float
    memory_total_bytes: int
    memory_available_bytes: int
    agent_rss_bytes: int
    host: HostReport = HostReport()


class GpusSampled(msgspec.Struct, frozen=True):
    """The GPU sampler has asked NVML."""

    sample: GpuSample


class GpuWatchChanged(msgspec.Struct, frozen=True):
    """How the look at the GPUs stands, and why there are no fresh figures."""

    state: GpuWatchState
    detail: str


Observation: TypeAlias = (
    JobAdmitted
    | JobForgotten
    | RankReported
    | WorkerSeen
    | WorkerSampled
    | WorkerEnded
    | SeenFromOutside
    | StorePortSeen
    | RankPrinted
    | HostSampled
    | GpusSampled
    | GpuWatchChanged
)
