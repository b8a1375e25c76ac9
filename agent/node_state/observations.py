"""What a node's state is made from: what happened to its jobs, what its ranks and its machine report."""

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
    from agent.wire.ends import FullDisk
    from agent.wire.jobs import JobStatus
    from agent.wire.reports import ExitReport, ProcessState, WorkerReport
    from agent.wire.signals import Signal
    from ddpcore.wire import Place, RankReport


class JobAdmitted(msgspec.Struct, frozen=True):
    """A job has been prepared; its earlier attempt is over."""

    job: JobStatus
    """Status at that time, which names the attempt and its ranks."""


class JobGrown(msgspec.Struct, frozen=True):
    """A job that no agent has launched has one more rank here."""

    job: JobStatus


class JobForgotten(msgspec.Struct, frozen=True):
    """A job is no longer of this node."""

    job_id: str


class RankReported(msgspec.Struct, frozen=True):
    """A datagram has arrived; any process of this user may have sent it."""

    report: RankReport


class WorkerSeen(msgspec.Struct, frozen=True):
    """The process of a rank has been found."""

    job_id: str
    rank: int
    pid: int


class LimitSampled(msgspec.Struct, frozen=True):
    """A limit of a worker's memory; equal keys are one limit, which workers share."""

    key: str
    report: LimitReport


class MemorySampled(msgspec.Struct, frozen=True):
    """Memory of a worker and its child processes, and the limits below the machine's."""

    tree_bytes: int
    limits: list[LimitSampled] = []
    """Limits, the nearest first."""


class RankSignals(msgspec.Struct, frozen=True):
    """Signals of a worker's process over the time since the last ones."""

    values: dict[Signal, float]
    """Values of those that can be read."""
    tree_cpu_s: float
    """CPU time of the process and its child processes, of those that have ended too."""
    numa_nodes: frozenset[int] | None = None
    """NUMA nodes of the CPUs on which it may run; None where the machine shows none."""


class WorkerSampled(msgspec.Struct, frozen=True):
    """The kernel's figures of a worker that has been seen."""

    job_id: str
    rank: int
    process: ProcessState
    rss_bytes: int
    cpu_s: float
    pss_bytes: int | None = None
    memory: MemorySampled | None = None
    signals: RankSignals | None = None
    """None between two samples of them, which are rarer."""


class SeenFromOutside(msgspec.Struct, frozen=True):
    """A process that cannot report its place has been looked at."""

    job_id: str
    rank: int
    pid: int
    """Pid of the rank, or of a child that the rank waits for."""
    report_seq: int
    """Number of the rank's last report at that time."""
    place: Place | None


class StorePortSeen(msgspec.Struct, frozen=True):
    """The listener at a port where ranks wait in `init_process_group` has been found."""

    job_id: str
    port: int
    text: str
    """Pid and command line of the listener."""


class WorkerEnded(msgspec.Struct, frozen=True):
    """The process of a worker has ended."""

    job_id: str
    rank: int
    exit: ExitReport
    """Report of its end, with an age of 0."""
    cgroup_kills: int | None = None
    """Processes that the kernel killed in its cgroup just before, for want of memory; None where that is not known."""


class RanksRestored(msgspec.Struct, frozen=True):
    """Ranks of a job that had ended before are known as they were last reported."""

    job_id: str
    workers: list[WorkerReport]
    """Ranks that have ended, with ages as of this observation."""


class DiskFound(msgspec.Struct, frozen=True):
    """The file system has been found on which a rank that has ended could not write."""

    job_id: str
    rank: int
    disk: FullDisk


class RankPrinted(msgspec.Struct, frozen=True):
    """A rank has printed something."""

    job_id: str
    rank: int
    metrics: dict[str, float]
    """Figures found in the lines by the job's patterns."""
    num_lines: int = 0
    loss_step: float | None = None
    """Step in the line of the loss, by the patterns; None where they find none."""
    line_step: float | None = None
    """What looks like a step in that line; None for nothing."""


class HostSignals(msgspec.Struct, frozen=True):
    """Signals of the machine over the time since the last ones."""

    values: dict[Signal, float]
    """Values of those that can be read."""
    busy_cpu_s: float
    """CPU time of all programs since the machine began, without interrupts and what a hypervisor took."""
    all_cpu_s: float
    """Time of all CPUs since the machine began, whatever they did."""
    agent_cpu_s: float
    """CPU time of this agent."""
    nic: str = ""
    """Network interface that carries most; empty where none is known."""


class HostSampled(msgspec.Struct, frozen=True):
    """The kernel's figures of the machine and this agent."""

    cpu_frac: float
    memory_total_bytes: int
    memory_available_bytes: int
    agent_rss_bytes: int
    host: HostReport = HostReport()
    signals: HostSignals | None = None


class GpusSampled(msgspec.Struct, frozen=True):
    """A sample of the GPU sampler."""

    sample: GpuSample


class GpuWatchChanged(msgspec.Struct, frozen=True):
    """The state of the GPU sampler has changed, with the reason why there are no fresh figures."""

    state: GpuWatchState
    detail: str


Observation: TypeAlias = (
    JobAdmitted
    | JobGrown
    | JobForgotten
    | RankReported
    | WorkerSeen
    | WorkerSampled
    | WorkerEnded
    | RanksRestored
    | DiskFound
    | SeenFromOutside
    | StorePortSeen
    | RankPrinted
    | HostSampled
    | GpusSampled
    | GpuWatchChanged
)
