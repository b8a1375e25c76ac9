"""What is known of one job's ranks on this node, and the report of each that it makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.node_state.gpu_ranks import Home, RankProcess
from agent.node_state.progress import CpuUse, Progress
from agent.node_state.waits import Lateness
from agent.wire.machine import JobRank
from agent.wire.reports import ExitReport, OutsideLook, ProcessState, WorkerReport
from ddpcore.wire import Anomaly, RankReport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.node_state.line_steps import LineSteps
    from agent.node_state.observations import MemorySampled, SeenFromOutside
    from agent.wire.jobs import JobStatus
    from agent.wire.machine import MemoryReport
    from agent.wire.signals import Reading

SPEAKS_S = 5.0
"""Age in seconds of a report from which its probe does not count as speaking."""
LONGEST_S = 1e10
"""Greatest age in seconds that a report may hold: `Seconds`."""


class Worker(msgspec.Struct):
    """Facts of a rank's process."""

    pid: int
    process: ProcessState
    process_since_s: float
    seen_at_s: float
    rss_bytes: int = 0
    cpu_s: float = 0.0
    cpu_use: CpuUse = msgspec.field(default_factory=CpuUse)
    pss_bytes: int | None = None
    memory: MemorySampled | None = None
    exit: ExitReport | None = None
    home: Home | None = None
    """GPU that the rank was last at home on; kept after its end."""


class Looked(NamedTuple):
    """What comes of samples of a rank over some time."""

    memory: MemoryReport | None
    signals: dict[str, Reading]
    unmeasured: int
    """Rates that are not among them since nobody measures them, as an `Unmeasured`."""


class Output(msgspec.Struct):
    """What a rank has printed."""

    printed_at_s: float
    metrics: dict[str, float | None] = {}
    loss_step: int | None = None
    line_steps: LineSteps | None = None
    """None until a line with a loss has what looks like a step."""


class Job(msgspec.Struct):
    """One attempt of a job, and its ranks."""

    admitted: JobStatus
    workers: dict[int, Worker] = {}
    reports: dict[int, tuple[RankReport, float]] = {}
    """Last report by rank, with the time of its arrival."""
    output: dict[int, Output] = {}
    outside: dict[int, tuple[SeenFromOutside, float]] = {}
    """Last look from outside by rank, with its time."""
    listeners: dict[int, str] = {}
    """Listeners by port at which ranks wait in `init_process_group`."""
    restored: tuple[Sequence[WorkerReport], float] = ((), 0.0)
    """Ranks that ended before and are not among `workers`, with the time that their ages are of."""
    progress: Progress = msgspec.field(default_factory=Progress)
    lateness: Lateness = msgspec.field(default_factory=Lateness)


def hangs(job: Job, rank: int, worker: Worker, now_s: float) -> bool:
    """Return whether a rank certainly hangs: by a signal, or in a collective by its fresh report."""
    report, reported_at_s = job.reports.get(rank, (None, now_s))
    if worker.exit is not None or (report is not None and Anomaly.OWN_RANKS in report.anomalies):
        return False
    if worker.process is ProcessState.FROZEN:
        return True
    is_fresh = now_s - reported_at_s < SPEAKS_S
    return report is not None and is_fresh and any(group.is_waiting for group in report.groups)


def rank_process(job: Job, rank: int, worker: Worker) -> RankProcess:
    report, _ = job.reports.get(rank, (None, 0.0))
    return RankProcess(
        whose=JobRank(job.admitted.job_id, rank),
        local_rank=_local_rank(job, rank),
        pid=worker.pid,
        reported_pid=None if report is None else report.pid,
        torch_bytes={} if report is None else {gpu.uuid: gpu.reserved_bytes for gpu in report.gpu_memory},
    )


def _local_rank(job: Job, rank: int) -> int:
    """Return the number of a rank on this node: where no agent has launched it, as it reports."""
    if not job.admitted.is_adopted:
        return rank - job.admitted.first_rank
    report, _ = job.reports.get(rank, (None, 0.0))
    return job.admitted.own_ranks.index(rank) if report is None else report.local_rank


def worker_report(job: Job, rank: int, worker: Worker, looked: Looked, now_s: float) -> WorkerReport:
    state_s = max(0.0, now_s - worker.process_since_s)
    report, reported_at_s = job.reports.get(rank, (None, now_s))
    output = job.output.get(rank) or Output(worker.seen_at_s)
    return WorkerReport(
        job_id=job.admitted.job_id,
        attempt=job.admitted.attempt,
        rank=rank,
        local_rank=_local_rank(job, rank),
        pid=worker.pid,
        process=worker.process,
        process_s=state_s,
        rss_bytes=worker.rss_bytes,
        cpu_s=worker.cpu_s,
        cpu_cores=0.0 if worker.exit else worker.cpu_use.cores,
        seen_s=max(0.0, now_s - worker.seen_at_s),
        quiet_s=max(0.0, now_s - max(output.printed_at_s, worker.seen_at_s)),
        metrics=output.metrics,
        loss_step=output.loss_step,
        pss_bytes=worker.pss_bytes,
        exit=None if worker.exit is None else msgspec.structs.replace(worker.exit, age_s=state_s),
        report=report,
        report_age_s=max(0.0, now_s - reported_at_s),
        lateness=job.lateness.of(rank),
        memory=looked.memory,
        signals=looked.signals,
        unmeasured=looked.unmeasured,
        outside=_outside_look(job, rank, now_s),
        store_port_owner=_store_port_owner(job, report),
    )


def later(ended: WorkerReport, by_s: float) -> WorkerReport:
    """Return the report of a rank that has ended as of a later time, or of an earlier one after its end."""

    def age(age_s: float) -> float:
        return min(max(0.0, age_s + by_s), LONGEST_S)

    exit_, outside = ended.exit, ended.outside
    return msgspec.structs.replace(
        ended,
        process_s=age(ended.process_s),
        seen_s=age(ended.seen_s),
        quiet_s=age(ended.quiet_s),
        exit=exit_ and msgspec.structs.replace(exit_, age_s=age(exit_.age_s)),
        report_age_s=age(ended.report_age_s),
        outside=outside and msgspec.structs.replace(outside, age_s=age(outside.age_s)),
    )


def _store_port_owner(job: Job, report: RankReport | None) -> str:
    meeting = None if report is None else report.store_meeting
    return "" if meeting is None else job.listeners.get(meeting.port, "")


def _outside_look(job: Job, rank: int, now_s: float) -> OutsideLook | None:
    """Return the last look from outside, while the reason for it holds."""
    seen, seen_at_s = job.outside.get(rank, (None, 0.0))
    report, _ = job.reports.get(rank, (None, 0.0))
    if seen is None or report is None:
        return None
    is_mute = (seen.pid, seen.report_seq) == (report.pid, report.report_seq)
    is_awaited = report.child_wait is not None and report.child_wait.pid == seen.pid
    return OutsideLook(seen.pid, seen.place, max(0.0, now_s - seen_at_s)) if is_mute or is_awaited else None
