"""The state of a node: folds what ranks and the kernel report into one NodeReport with ages.

Membership comes from the jobs: a report of a rank that belongs to no job here is dropped and counted, and so is one
that is older than the last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec

from agent.node_state.gpu_ranks import AFTER_END_S, Home, gpu_fault, gpu_reports, num_visible_gpus
from agent.node_state.job_state import Job, Looked, Output, Worker, hangs, later, rank_process, worker_report
from agent.node_state.line_steps import LineSteps
from agent.node_state.memory_growth import MemoryGrowth, gpu_held, host_held
from agent.node_state.node_signals import NodeSignals
from agent.node_state.observations import (
    DiskFound,
    GpusSampled,
    GpuWatchChanged,
    HostSampled,
    JobAdmitted,
    JobForgotten,
    JobGrown,
    Observation,
    RankPrinted,
    RankReported,
    RanksRestored,
    SeenFromOutside,
    StorePortSeen,
    WorkerEnded,
    WorkerSampled,
    WorkerSeen,
)
from agent.wire.codec import LOSS_METRIC
from agent.wire.machine import GpuCondition, GpusReport, GpuWatchState, JobRank, MemoryReport
from agent.wire.reports import (
    WIRE_VERSION,
    ControlReport,
    NodeReport,
    ProcessState,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.node_state.gpu_sample import GpuSample
    from agent.wire.jobs import JobStatus
    from agent.wire.reports import WorkerReport
    from ddpcore.wire import RankReport


MUTE_S = 1.0
"""Age in seconds of a last report from which a rank is looked at from outside: a probe reports four times a second."""
LONG_MEETING_S = 5.0
"""Seconds after which a rank that waits for the others is late: ranks that have all started find each other sooner."""


class OutsideWish(NamedTuple):
    """A process that only a look from outside can place, and why."""

    job_id: str
    rank: int
    pid: int
    rank_pid: int
    """Pid of the rank's own process."""
    report_seq: int
    """Number of the rank's last report; 0 where that does not matter."""

    @property
    def is_child(self) -> bool:
        """True for a child that the rank waits for."""
        return self.pid != self.rank_pid


class NodeState:
    """State of this node; `apply` is the only way to change it."""

    def __init__(self, node: str, epoch: str, hostname: str, agent_pid: int, num_cpus: int) -> None:
        self._identity = (node, epoch, hostname, agent_pid, num_cpus)
        self._jobs: dict[str, Job] = {}
        self._host = HostSampled(0.0, 0, 0, 0)
        self._gpus = GpusReport()
        self._gpus_at_s = 0.0
        self._growth = MemoryGrowth()
        self._signals = NodeSignals(num_cpus)
        self.num_foreign_reports = 0
        """Number of reports of ranks that are not ours, or that are older than what is known."""
        self.has_news = False
        """True if a rank has begun or ended to wait in a collective since the last report."""

    def apply(  # noqa: C901, PLR0912 - one case for each observation
        self, observation: Observation, now_s: float
    ) -> None:
        match observation:
            case JobAdmitted(job=job):
                self._jobs[job.job_id] = Job(job)
                self._forget(job.job_id)
            case JobGrown(job=job):
                self._jobs[job.job_id].admitted = job
            case JobForgotten(job_id=job_id):
                self._jobs.pop(job_id, None)
                self._forget(job_id)
            case RankReported(report=report):
                self._on_report(report, now_s)
            case WorkerSeen(job_id=job_id, rank=rank, pid=pid):
                self._forget(job_id, [rank])
                self._jobs[job_id].workers[rank] = Worker(pid, ProcessState.RUNNING, now_s, now_s)
            case WorkerSampled():
                self._on_sample(observation, now_s)
            case WorkerEnded():
                self._on_end(observation, now_s)
            case RanksRestored(job_id=job_id, workers=workers):
                self._jobs[job_id].restored = (workers, now_s)
            case DiskFound():
                self._on_disk(observation)
            case RankPrinted():
                self._on_output(observation, now_s)
            case SeenFromOutside(job_id=job_id, rank=rank):
                self._jobs[job_id].outside[rank] = (observation, now_s)
            case StorePortSeen(job_id=job_id, port=port, text=text):
                self._jobs[job_id].listeners[port] = text
            case HostSampled():
                self._host = observation
                if observation.signals is not None:
                    self._signals.take_host(observation.signals, now_s)
            case GpusSampled(sample=sample):
                self._on_gpus(sample, now_s)
            case GpuWatchChanged(state=state, detail=detail):
                self._gpus = msgspec.structs.replace(self._gpus, state=state, detail=detail[:1024])
                if state is GpuWatchState.ABSENT:
                    self._gpus = GpusReport(state, self._gpus.detail)
            case _:
                assert_never(observation)

    def stalled_s(self, job_id: str, now_s: float) -> float:
        """Return how long the ranks of a job here have hung, in seconds; 0 while it is not certain that they do.

        Ranks that make no progress hang only if one of them is frozen, or is known to wait for others: a rank without a
        probe that reports, or one that runs ranks of its own, may be doing what it should.
        """
        job = self._jobs.get(job_id)
        if job is None or not any(hangs(job, rank, worker, now_s) for rank, worker in job.workers.items()):
            return 0.0
        return job.progress.stalled_s(now_s)

    def report(
        self,
        now_s: float,
        *,
        report_seq: int,
        jobs: list[JobStatus],
        log_seq: int,
        malformed_datagrams: int,
        control: ControlReport | None = None,
    ) -> NodeReport:
        """Return the whole state; ages are measured from `now_s`.

        `report_seq`, `jobs` and `log_seq` (the last log line) are the caller's. `malformed_datagrams` were no report at
        all.
        """
        node, epoch, hostname, agent_pid, num_cpus = self._identity
        host = self._host
        self.has_news = False
        workers = [worker for job in self._jobs.values() for worker in self._workers_of(job, now_s)]
        workers.sort(key=lambda worker: (worker.rank, worker.job_id))
        return NodeReport(
            wire_version=WIRE_VERSION,
            node=node,
            epoch=epoch,
            report_seq=report_seq,
            hostname=hostname,
            agent_pid=agent_pid,
            num_cpus=num_cpus,
            cpu_frac=host.cpu_frac,
            memory_total_bytes=host.memory_total_bytes,
            memory_available_bytes=host.memory_available_bytes,
            agent_rss_bytes=host.agent_rss_bytes,
            host=host.host,
            gpus=msgspec.structs.replace(
                self._gpus, age_s=max(0.0, now_s - self._gpus_at_s) if self._gpus.gpus else 0.0
            ),
            signals=self._signals.of_host(now_s),
            unmeasured=self._signals.unmeasured_of_host(now_s),
            nic=self._signals.nic,
            log_seq=log_seq,
            malformed_reports=malformed_datagrams + self.num_foreign_reports,
            control=control,
            jobs=jobs,
            workers=workers,
        )

    def ended_ranks(self, job_id: str, now_s: float) -> list[WorkerReport]:
        """Return the reports of the ranks of a job here that have ended, by rank."""
        ended = [worker for worker in self._workers_of(self._jobs[job_id], now_s) if worker.exit is not None]
        return sorted(ended, key=lambda worker: worker.rank)

    def num_visible_gpus(self, env: Mapping[str, str]) -> int | None:
        """Return how many of this node's GPUs a program with this environment would see; None is unknown."""
        return num_visible_gpus(self._gpus.gpus, env)

    def can_agree_to_stop(self, job_id: str) -> bool:
        """Return whether every rank of a job here runs and has reported that it can stop at an agreed step."""
        job = self._jobs.get(job_id)
        return (
            job is not None
            and len(job.workers) == job.admitted.local_world_size
            and all(worker.process is ProcessState.RUNNING for worker in job.workers.values())
            and all(rank in job.reports and job.reports[rank][0].can_stop for rank in job.workers)
        )

    def last_step(self, job_id: str, rank: int) -> int | None:
        """Return the last step that a rank here has reported; None for none."""
        job = self._jobs.get(job_id)
        known = job.reports.get(rank) if job else None
        return known[0].step if known else None

    def wishes_from_outside(self, job_id: str, now_s: float) -> list[OutsideWish]:
        """Return the processes that need a look from outside: of silent ranks, and those that ranks wait for."""
        job = self._jobs.get(job_id)
        wishes = []
        for rank, (report, reported_at_s) in job.reports.items() if job else ():
            worker = job.workers.get(rank) if job else None
            if worker is None or worker.exit is not None:
                continue
            if now_s - reported_at_s >= MUTE_S:
                wishes.append(OutsideWish(job_id, rank, report.pid, report.pid, report.report_seq))
            elif report.child_wait is not None and report.child_wait.waiting_s >= MUTE_S:
                wishes.append(OutsideWish(job_id, rank, report.child_wait.pid, report.pid, 0))
        return wishes

    def stores_waited_at(self, job_id: str) -> set[tuple[str, int]]:
        """Return address and port of the stores at which ranks have waited for long in `init_process_group`."""
        job = self._jobs.get(job_id)
        long_meetings = (
            [report for report, _ in job.reports.values() if report.phase_s >= LONG_MEETING_S] if job else []
        )
        return {
            (one.store_meeting.address, one.store_meeting.port)
            for one in long_meetings
            if one.store_meeting is not None
        }

    def validate(self) -> None:
        """Assert what holds after every observation."""
        for job in self._jobs.values():
            admitted = job.admitted
            assert set(job.workers) <= set(admitted.own_ranks)
            assert set(job.reports) <= set(admitted.own_ranks)
            for worker in job.workers.values():
                assert (worker.exit is not None) == (worker.process is ProcessState.EXITED)

    def _on_report(self, report: RankReport, now_s: float) -> None:
        job = self._jobs.get(report.job_id)
        if job is None or not _belongs(report, job.admitted):
            self.num_foreign_reports += 1
            return
        known = job.reports.get(report.rank)
        if known is not None and known[0].pid == report.pid and report.report_seq <= known[0].report_seq:
            self.num_foreign_reports += 1
            return
        job.lateness.take(report)
        self._signals.take_report(report, now_s)
        report = msgspec.structs.replace(report, arrivals=[], gc_pause_s=None, gil_held_s=None)
        self.has_news = self.has_news or (known is not None and _is_waiting(known[0]) != _is_waiting(report))
        job.reports[report.rank] = (report, now_s)
        job.progress.note(report, now_s)
        output = job.output.get(report.rank)
        if output is not None and output.line_steps is not None and report.step is not None:
            output.line_steps.count(report.step, now_s)

    def _on_sample(self, sample: WorkerSampled, now_s: float) -> None:
        worker = self._jobs[sample.job_id].workers[sample.rank]
        if worker.exit is not None:
            return  # the sample was taken before the end was noticed
        if sample.process is not worker.process:
            worker.process, worker.process_since_s = sample.process, now_s
        worker.rss_bytes, worker.cpu_s, worker.pss_bytes = sample.rss_bytes, sample.cpu_s, sample.pss_bytes
        worker.memory = sample.memory
        worker.cpu_use.take(sample.cpu_s, now_s)
        whose = JobRank(sample.job_id, sample.rank)
        if sample.process is ProcessState.FROZEN:
            self._signals.interrupt(whose)
        if sample.signals is not None:
            is_followed = not self._jobs[sample.job_id].admitted.is_adopted
            self._signals.take_rank(whose, sample.signals, now_s, is_followed=is_followed)
        report, _ = self._jobs[sample.job_id].reports.get(sample.rank, (None, 0.0))
        held = host_held(sample, self._host, report)
        if held is not None:
            self._growth.take(held, now_s)
        self._growth.judge(now_s)

    def _forget(self, job_id: str, ranks: Sequence[int] | None = None) -> None:
        """Drop what came of samples of a job's ranks: of all of them without `ranks`."""
        self._growth.forget(job_id, ranks)
        self._signals.forget(job_id, ranks)

    def _workers_of(self, job: Job, now_s: float) -> list[WorkerReport]:
        restored, restored_s = job.restored
        return [later(worker, now_s - restored_s) for worker in restored] + [
            worker_report(job, rank, worker, self._looked_at(job, rank, worker, now_s), now_s)
            for rank, worker in job.workers.items()
        ]

    def _looked_at(self, job: Job, rank: int, worker: Worker, now_s: float) -> Looked:
        memory, whose = self._memory_of(job, rank, worker), JobRank(job.admitted.job_id, rank)
        if worker.exit:
            return Looked(memory, {}, 0)
        return Looked(memory, self._signals.of_rank(whose, now_s), self._signals.unmeasured_of_rank(whose, now_s))

    def _memory_of(self, job: Job, rank: int, worker: Worker) -> MemoryReport | None:
        """Return a rank's memory; of one that has ended, how it grew last."""
        growths = self._growth.of(job.admitted.job_id, rank)
        memory = worker.memory
        if memory is None:
            return MemoryReport(0, growths=growths) if growths else None
        return MemoryReport(memory.tree_bytes, [limit.report for limit in memory.limits], growths)

    def _on_output(self, printed: RankPrinted, now_s: float) -> None:
        job = self._jobs.get(printed.job_id)
        if job is None:
            return  # the last lines of a job that has been forgotten
        output = job.output.setdefault(printed.rank, Output(now_s))
        output.printed_at_s = now_s
        output.metrics.update(printed.metrics)
        if LOSS_METRIC in printed.metrics:
            output.loss_step, line_step = whole_number(printed.loss_step), whole_number(printed.line_step)
            if output.line_steps is None and line_step is not None:
                output.line_steps = LineSteps()
            if output.line_steps is not None and output.loss_step is None:
                output.loss_step = output.line_steps.own_step(line_step, now_s)
        self._signals.note_lines(JobRank(printed.job_id, printed.rank), printed.num_lines)

    def _on_end(self, end: WorkerEnded, now_s: float) -> None:
        worker = self._jobs[end.job_id].workers[end.rank]
        worker.exit = end.exit
        worker.process, worker.process_since_s = ProcessState.EXITED, now_s
        worker.rss_bytes, worker.pss_bytes, worker.memory = 0, None, None
        self._growth.end(end.job_id, end.rank)
        self._look_at_home(worker)

    def _on_disk(self, found: DiskFound) -> None:
        job = self._jobs.get(found.job_id)
        worker = job.workers.get(found.rank) if job else None
        if worker is not None and worker.exit is not None:
            facts = msgspec.structs.replace(worker.exit.facts, disk=found.disk)
            worker.exit = msgspec.structs.replace(worker.exit, facts=facts)

    def _look_at_home(self, worker: Worker) -> None:
        """Add to a bad end what happened to the rank's GPU, as far as the latest sample shows it."""
        end, ended_s = worker.exit, worker.process_since_s
        if end is None or end.code == 0 or worker.home is None or self._gpus_at_s > ended_s + AFTER_END_S:
            return
        figures = next((gpu.figures for gpu in self._gpus.gpus if worker.home.is_(gpu.figures)), None)
        if figures is None:
            return
        fault = gpu_fault(figures, end.facts.gpu, worker.seen_at_s, ended_s, self._gpus_at_s)
        if fault.xids or fault.condition is not GpuCondition.OK:
            worker.exit = msgspec.structs.replace(end, facts=msgspec.structs.replace(end.facts, gpu=fault))

    def _on_gpus(self, sample: GpuSample, now_s: float) -> None:
        """Find the rank behind each process that NVML knows, once a sample."""
        ranks = [
            rank_process(job, rank, worker)
            for job in self._jobs.values()
            for rank, worker in job.workers.items()
            if worker.exit is None
        ]
        gpus = gpu_reports(sample.gpus, ranks)
        self._gpus = msgspec.structs.replace(self._gpus, gpus=gpus, driver_version=sample.driver_version)
        self._gpus_at_s = now_s
        reports = {
            JobRank(job_id, rank): report
            for job_id, job in self._jobs.items()
            for rank, (report, _) in job.reports.items()
        }
        self._signals.take_gpus(gpus, now_s)
        for held in gpu_held(gpus, reports):
            self._growth.take(held, now_s)
        for gpu in gpus:
            for owner in gpu.owners:
                self._jobs[owner.job_id].workers[owner.rank].home = Home(gpu.figures.index, gpu.figures.uuid)
        for job in self._jobs.values():
            for worker in job.workers.values():
                self._look_at_home(worker)


def _belongs(report: RankReport, job: JobStatus) -> bool:
    return (
        report.attempt == job.attempt
        and report.world_size == job.world_size
        and report.rank in job.own_ranks
        and (job.is_adopted or report.local_rank == report.rank - job.first_rank)
    )


def _is_waiting(report: RankReport) -> bool:
    return any(group.is_waiting for group in report.groups)
