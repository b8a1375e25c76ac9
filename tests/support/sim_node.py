"""A simulated node: an agent's cores, and a launcher that does what torchrun does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from agent.jobs.lifecycle import LauncherFailed, WorkerExited
from agent.jobs.root_cause import Failure, failure_of_launcher, failure_of_worker, first_of
from agent.node_state.gpu_sample import decode_sample, encode_sample
from agent.node_state.node_state import NodeState
from agent.node_state.observations import (
    DiskFound,
    GpusSampled,
    GpuWatchChanged,
    HostSampled,
    JobAdmitted,
    RankReported,
    WorkerEnded,
    WorkerSampled,
    WorkerSeen,
)
from agent.wire.digest import encode_frame
from agent.wire.jobs import JobState, JobStatus
from agent.wire.logs import LAUNCHER_RANK
from agent.wire.machine import GpuWatchState, HostReport
from agent.wire.reports import ExitReport
from ddpcore.wire import decode_report
from tests.support.jobs import left

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agent.node_state.gpu_sample import GpuSample
    from agent.wire.ends import FullDisk
    from agent.wire.reports import NodeReport
    from tests.support.sim_rank import SimRank

START_S = 1000.0
"""A monotonic clock does not start at zero."""
SIGKILL = 9
KILL_S = 10.0
"""From SIGTERM, which a frozen rank does not take, to SIGKILL; seen of torchrun 2.13."""
LAUNCHER_NEWS_S = 0.5
"""From the ends of the ranks of a killed launcher to its own, as an agent may see them."""
SAMPLE_S = 0.2
"""Between two looks at the workers."""


class SimNode:
    """An agent's cores and its launcher."""

    def __init__(self, name: str, node_rank: int, ranks: list[SimRank], world_size: int, num_nodes: int) -> None:
        self.name = name
        self.node_rank = node_rank
        self.ranks = ranks
        self.is_lost = False
        self.has_rebooted = False
        self.is_unheard = False
        """Its reports do not get through, and its ranks go on."""
        self.epoch = f"epoch-{node_rank}"
        self.state = JobState.PREPARED
        self.state_since_s = START_S
        self.sent_at_s = START_S
        self.exit_code: int | None = None
        self._shape = (world_size, num_nodes)
        self._core = NodeState(name, self.epoch, f"host-{node_rank}", 900 + node_rank, 8)
        self._report_seq = 0
        self._seen: set[int] = set()
        self._ended: set[int] = set()
        self._bad_s: float | None = None
        self.host = HostReport()
        self.sample_gpus: Callable[[float], GpuSample] | None = None
        """What this node's sampler says at a time, if it has GPUs."""
        self.with_signals: Callable[[NodeReport, float], NodeReport] | None = None
        """Gives a report the signals that its agent takes; None of an agent that takes none."""
        self.with_facts: Callable[[SimRank, ExitReport, float], ExitReport] | None = None
        """Adds to a rank's end what its agent finds out; None of an agent that finds nothing."""
        self._failure: Failure | None = None
        self._launcher_end: tuple[float, LauncherFailed] | None = None
        """When the end of a launcher that was ended from outside is noticed, and how it ended."""
        self._cpu_s = {rank.rank: 0.0 for rank in ranks}

    def admit(self, job_id: str, attempt: int, now_s: float) -> None:
        """Take part in a job."""
        self.job = (job_id, attempt)
        self._seen, self._ended, self._bad_s, self.exit_code = set(), set(), None, None
        self._failure, self._launcher_code, self._launcher_end = None, 1, None
        self.go(JobState.PREPARED, now_s)
        self._core.apply(JobAdmitted(self.status(now_s)), now_s)

    def join(self, other: SimNode, job_id: str, now_s: float) -> None:
        """Be the part of another node that a second job is: one agent watches both."""
        self._core = other._core
        self.admit(job_id, 0, now_s)

    def restart_agent(self, job_id: str, attempt: int, now_s: float) -> None:
        """Begin a new life that adopts the job: counts and epoch start anew."""
        self.epoch += "+"
        self._report_seq = 0
        self._core = NodeState(self.name, self.epoch, f"host-{self.node_rank}", 950 + self.node_rank, 8)
        state, since_s = self.state, self.state_since_s
        self.admit(job_id, attempt, now_s)
        self.state, self.state_since_s = state, since_s

    def reboot(self, now_s: float) -> None:
        """Be started again as a machine: the agent knows the job, which is lost, and no process of it is left."""
        self.restart_agent(*self.job, now_s)
        self.has_rebooted = True
        for rank in self.ranks:
            rank.is_frozen = True
        self.go(JobState.LOST, now_s)

    def go(self, state: JobState, now_s: float) -> None:
        """Change the job's state on this node."""
        self.state, self.state_since_s = state, now_s

    def end_launcher_by(self, signal: int, now_s: float) -> None:
        """Let a signal end the launcher and its ranks: SIGTERM is passed on, the kernel sees to it after SIGKILL."""
        for rank in self.ranks:
            rank.end = rank.end or (None, signal, "")
        exception = f"torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: {signal}"
        found = None if signal == SIGKILL else left(exception, rank=LAUNCHER_RANK)
        self._launcher_code = -SIGKILL if signal == SIGKILL else 1
        # The end of a killed one is noticed after those of its ranks.
        known_s = now_s + (LAUNCHER_NEWS_S if signal == SIGKILL else 0.0)
        self._launcher_end = known_s, LauncherFailed(self._launcher_code, found)

    @property
    def has_news(self) -> bool:
        """Whether a rank has begun or ended a wait since the last report."""
        return self._core.has_news

    def receive(self, datagram: bytes, now_s: float) -> None:
        """Take a probe's datagram."""
        self._core.apply(RankReported(decode_report(datagram)), now_s)

    def find_disk(self, rank: int, disk: FullDisk, now_s: float) -> None:
        """Learn on which file system a rank that has ended could not write."""
        self._core.apply(DiskFound(self.job[0], rank, disk), now_s)

    def sample(self, now_s: float) -> None:
        """Look at the workers, as the agent does from /proc."""
        job_id = self.job[0]
        self._core.apply(HostSampled(0.5, 16 * 2**30, 10 * 2**30, 50 * 2**20, self.host), now_s)
        if self.sample_gpus is not None:
            sample = decode_sample(encode_sample(self.sample_gpus(now_s)))
            self._core.apply(GpuWatchChanged(GpuWatchState.WATCHING, ""), now_s)
            self._core.apply(GpusSampled(sample), now_s)
        for rank in () if self.has_rebooted else self.ranks:
            if rank.end is None or rank.rank not in self._seen:
                self._see(rank, now_s)
                self._cpu_s[rank.rank] += SAMPLE_S * (0.0 if rank.is_idle else 0.86 + 0.04 * rank.local_rank)
                memory = None if rank.memory is None else rank.memory(now_s)
                rss = (300 + 4 * rank.rank) * 2**20 if memory is None else memory.tree_bytes
                cpu_s = self._cpu_s[rank.rank]
                self._core.apply(
                    WorkerSampled(job_id, rank.rank, rank.process, rss, cpu_s, rss * 3 // 4, memory), now_s
                )

    def _see(self, rank: SimRank, now_s: float) -> None:
        """Find a rank's process, as an agent does before it knows anything else of it."""
        if rank.rank not in self._seen:
            self._seen.add(rank.rank)
            self._core.apply(WorkerSeen(self.job[0], rank.rank, rank.pid), now_s)

    def watch(self, now_s: float) -> None:
        """Notice ends, and do what torchrun does about a bad one: end the others."""
        if self.has_rebooted:
            return
        for rank in self.ranks:
            if rank.end is not None and rank.rank not in self._ended:
                self._ended.add(rank.rank)
                self._see(rank, now_s)
                code, signal, error = rank.end
                end = ExitReport(code, signal, error=error, oom_kills=rank.oom_kills)
                end = end if self.with_facts is None else self.with_facts(rank, end, now_s)
                self._core.apply(WorkerEnded(self.job[0], rank.rank, end), now_s)
                if code or signal:
                    self._bad_s = now_s if self._bad_s is None else self._bad_s
                    if self.state is JobState.STOPPING:
                        continue
                    found = left(error, rank=rank.rank) if error else None
                    failure = failure_of_worker(WorkerExited(rank.rank, code, signal, found), now_s, self._failure)
                    self._failure = first_of(self._failure, failure)
        if self._launcher_end is not None and now_s >= self._launcher_end[0]:
            self._failure = first_of(self._failure, failure_of_launcher(self._launcher_end[1], now_s))
            self._launcher_end = None
        if self._bad_s is not None:
            self._end_the_others(now_s - self._bad_s)
        if len(self._ended) == len(self.ranks) and self.state in (JobState.RUNNING, JobState.STOPPING):
            self._end_launcher(now_s)

    def _end_the_others(self, bad_for_s: float) -> None:
        for rank in self.ranks:
            if bad_for_s >= KILL_S:
                rank.end = rank.end or (None, SIGKILL, "")
            elif bad_for_s >= 0.15 and rank.end is None and not rank.is_frozen:
                rank.end = (None, 15, "")

    def _end_launcher(self, now_s: float) -> None:
        if self.state is JobState.STOPPING:
            self.go(JobState.STOPPED, now_s)
        elif self._bad_s is None:
            self.exit_code = 0
            self.go(JobState.SUCCEEDED, now_s)
        elif now_s - self._bad_s > 1.0:
            self.exit_code = self._launcher_code
            self.go(JobState.FAILED, now_s)

    def status(self, now_s: float) -> JobStatus:
        """Return what this node has to say of the job."""
        world_size, num_nodes = self._shape
        failure, is_running = self._failure, self.state is JobState.RUNNING
        return JobStatus(
            job_id=self.job[0],
            attempt=self.job[1],
            state=self.state,
            state_s=now_s - self.state_since_s,
            world_size=world_size,
            num_nodes=num_nodes,
            node_rank=self.node_rank,
            first_rank=self.ranks[0].rank,
            local_world_size=len(self.ranks),
            exit_code=self.exit_code,
            root_cause=failure.as_root_cause(now_s, is_running=is_running) if failure else None,
        )

    def publish(self, now_s: float, others: Sequence[JobStatus] = (), *, is_last: bool = False) -> bytes:
        """Return the next telemetry frame, in which other jobs may be; the last one of an agent that is stopped."""
        self._report_seq += 1
        jobs = [self.status(now_s), *others]
        report = self._core.report(now_s, report_seq=self._report_seq, jobs=jobs, log_seq=0, malformed_datagrams=0)
        self._core.validate()
        report = msgspec.structs.replace(report, is_last=is_last)
        return encode_frame(report if self.with_signals is None else self.with_signals(report, now_s))
