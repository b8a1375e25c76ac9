"""The model: reports of the nodes, folded into nodes, jobs and ranks.

A node is identified by its connection, whatever name its message carries. Membership comes from the job's world size,
and counters are kept by (job, attempt). Times are of this console's clock: a report carries ages, and the time since it
was received adds to them.

`still_cluster` copies the model: later reports do not change the copy, from which a paused screen is drawn.
"""

from __future__ import annotations

import copy
from collections import deque
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from agent.wire.digest import NodeFrame, frame_of
from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.machine import GpuCondition
from app.model.farewells import LAUNCHER_END_S
from app.model.job_model import AssignmentSummary, JobModel, Process
from app.model.new_nodes import NewNodes
from app.model.rank_batch import RankBatch
from app.model.unreachable_reason import UnreachableKind, UnreachableReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import NodeReport

MAX_WORLD_SIZE = 131_072
"""Upper bound on ranks, 8 times the largest cluster measured; a job that claims more is refused."""
MAX_JOBS = 64
"""Limit of jobs kept; the oldest ended one goes first."""
GAP_S = 1.5
"""Seconds without a report after which a node has come back: its facts on ranks need a moment to be fresh again."""
GONE_S = 5.0
"""Seconds for which a job of another launcher is kept that its node, which reports, does not name: a new agent learns
of it by its ranks' next reports."""
CROWDED_LOAD = 2.0
"""Runnable threads per CPU above which a healthy probe is late. A gloo rank on two CPUs was 2.3 s late at a load of 7.5
per CPU."""
SETTLED_S = LAUNCHER_END_S + 5.0
"""Seconds from the latest news of a job that is over until none is awaited: a node may hold many such jobs."""
OLD_SETTLED_S = 5.0
"""The same for a job that was over for longer when it became known."""
MAX_CROWDING = 4.0
"""Upper bound on a node's crowding; more load is not taken to make probes later still."""
MAX_OLD_EPOCHS = 8
"""Number of an agent's earlier epochs whose late reports are recognised."""
WAS_STOPPED = UnreachableReason("stopped on request", UnreachableKind.AGENT)


class Node:
    """One node, as its reports describe it.

    Attributes:
        report: Its latest report; None before the first.
        num_ignored: Reports, or parts of them, that were refused.
        may_have_broken_gpus: Whether its latest report holds any sign of a broken GPU.
        has_adopted: Whether it has ever reported a job that no agent has launched.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.report: NodeFrame | None = None
        self.num_ignored = 0
        self.may_have_broken_gpus = self.has_adopted = False
        self.connection_reason: UnreachableReason | None = None
        """Why it cannot be reached, as far as its connection shows; None while it can be."""
        self.old_epochs: deque[str] = deque(maxlen=MAX_OLD_EPOCHS)

    @property
    def has_left(self) -> bool:
        """Whether its agent has ended as it was asked to, and no other has reported since."""
        return self.report is not None and self.report.is_last

    @property
    def unreachable_reason(self) -> UnreachableReason | None:
        """Why it cannot be reached, as far as known; None while it can be."""
        reason = self.connection_reason
        is_better = reason is not None and reason.unreachable_kind is not UnreachableKind.ANSWER
        return WAS_STOPPED if self.has_left and not is_better else reason

    def is_newer(self, report: NodeFrame) -> bool:
        """Return whether a report is later than the latest: of a new epoch, or of this one with a higher seq."""
        if self.report is None:
            return True
        if report.epoch == self.report.epoch:
            return report.report_seq > self.report.report_seq
        return report.epoch not in self.old_epochs

    def put(self, report: NodeFrame) -> None:
        if self.report is not None and self.report.epoch != report.epoch:
            self.old_epochs.append(self.report.epoch)
        self.report = report
        gpus = report.gpus.gpus
        self.may_have_broken_gpus = bool(gpus) and any(
            gpu.figures.xids or gpu.figures.condition is not GpuCondition.OK for gpu in gpus
        )


class Cluster:
    """All nodes and their jobs: reports are applied, what this console knows besides is put.

    Attributes:
        last_report_s: When each node's latest report came; minus infinity before the first.
        back_s: When each node first reported, or reported again after a gap.
        away_s: Seconds of each node's latest gap between two reports; 0 before the first.
        is_cut_off: Whether each node is known to be unreachable now.
        has_left: Whether each node's agent has ended as it was asked to.
        available_frac: Fraction of each node's memory that is available; 1 while that is not known.
        crowding: Load of each node relative to `CROWDED_LOAD`; from 1 to `MAX_CROWDING`.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = {name: Node(name, index) for index, name in enumerate(nodes)}
        self.node_names = tuple(self.nodes)
        self.jobs: dict[str, JobModel] = {}
        """Latest attempt of each job by id, oldest job first."""
        self.last_report_s = np.full(len(self.nodes), -np.inf)
        self.back_s = np.full(len(self.nodes), -np.inf)
        self.away_s = np.zeros(len(self.nodes))
        self.is_cut_off, self.has_left = np.zeros((2, len(self.nodes)), np.bool_)
        self.available_frac = np.ones(len(self.nodes))
        self.crowding = np.ones(len(self.nodes))
        self._begun: dict[str, int] = {}
        """Attempt that this console started, by job; older attempts are over, whichever node still reports them."""
        self.new_nodes = NewNodes()
        """Nodes that came after the start and are not part of this cluster."""
        self.awaits_past = False
        """Whether what the nodes reported before this console came is still being read: it may hold a verdict."""
        self.num_unknown_nodes = 0
        """Number of reports under a name that is not a node of this cluster."""

    def unreported_of(self, job: JobModel) -> tuple[str, ...]:
        """Return the nodes without a report that must have the job's other ranks; none where that is not certain."""
        silent = np.flatnonzero(self.last_report_s == -np.inf).tolist()
        is_certain = len(silent) == job.num_nodes - len(job.assignments) and not job.together.is_adopted
        return tuple(self.node_names[index] for index in silent) if is_certain else ()

    def put_new_nodes(self, new_nodes: NewNodes) -> None:
        self.new_nodes = new_nodes

    def put_unreachable(self, node: str, unreachable_reason: UnreachableReason | None) -> None:
        """Set why a node cannot be reached now; None when it can be."""
        known = self.nodes[node]
        known.connection_reason = unreachable_reason
        self.is_cut_off[known.index] = unreachable_reason is not None

    def begin(self, job_id: str, attempt: int) -> None:
        """Note that an attempt of a job begins: what was reported of older ones no longer applies."""
        self._begun[job_id] = attempt
        known = self.jobs.get(job_id)
        if known is not None and known.attempt < attempt:
            del self.jobs[job_id]

    def go_on_from(self, before: Cluster) -> None:
        """Take from another model of these nodes what is later there, and what no report carries."""
        for name, node in before.nodes.items():
            self.put_unreachable(name, node.connection_reason)
        self.new_nodes = before.new_nodes
        for job_id, attempt in before._begun.items():
            self.begin(job_id, attempt)
        reported = [(name, node.report, before.last_report_s[node.index]) for name, node in before.nodes.items()]
        self.apply_all([(name, report, float(at_s)) for name, report, at_s in reported if report is not None])

    def apply(self, node: str, report: NodeReport | NodeFrame, now_s: float) -> None:
        """Fold in a node's report. Nothing in a report raises: it becomes state or is counted."""
        self.apply_all([(node, report if isinstance(report, NodeFrame) else frame_of(report), now_s)])

    def apply_all(self, received: Sequence[tuple[str, NodeFrame, float]]) -> None:
        """Fold in reports of several nodes, at most one of each: node, report, when it came."""
        taken: list[tuple[int, NodeFrame, float]] = []
        reported: list[list[JobModel | None]] = []
        for name, report, now_s in received:
            node = self.nodes.get(name)
            if node is None:
                self.num_unknown_nodes += 1
            elif not node.is_newer(report):
                node.num_ignored += 1
            else:
                node.put(report)
                taken.append((node.index, report, now_s))
                reported.append(self._put_jobs(node, report, now_s))
        if taken:
            self._put_nodes(taken)
            self._put_ranks(RankBatch(taken), reported)
            for job in {id(job): job for jobs in reported for job in jobs if job is not None}.values():
                job.sample_steps(taken[-1][2])

    def _put_nodes(self, taken: Sequence[tuple[int, NodeFrame, float]]) -> None:
        nodes = [node for node, _, _ in taken]
        now_s = np.array([now_s for _, _, now_s in taken])
        gap_s = now_s - self.last_report_s[nodes]
        self.back_s[nodes] = np.where(gap_s > GAP_S, now_s, self.back_s[nodes])
        self.away_s[nodes] = np.where((gap_s > GAP_S) & np.isfinite(gap_s), gap_s, self.away_s[nodes])
        self.last_report_s[nodes] = now_s
        self.has_left[nodes] = [report.is_last for _, report, _ in taken]
        self.available_frac[nodes] = [
            report.memory_available_bytes / report.memory_total_bytes if report.memory_total_bytes else 1.0
            for _, report, _ in taken
        ]
        load = [(report.host.load_1min or 0.0) / max(1, report.num_cpus) for _, report, _ in taken]
        self.crowding[nodes] = np.clip(np.divide(load, CROWDED_LOAD), 1.0, MAX_CROWDING)

    def _put_jobs(self, node: Node, report: NodeFrame, now_s: float) -> list[JobModel | None]:
        """Take a node's status of jobs; return the model of each, None for those refused."""
        if node.has_adopted:
            self._drop_gone(node, report, now_s)
        for known in self.jobs.values():
            known.refused.pop(node.index, None)
        jobs = []
        for status in report.jobs:
            node.has_adopted = node.has_adopted or status.is_adopted
            job = self._job_of(node, status)
            jobs.append(job)
            if job is None:
                node.num_ignored += 1
            else:
                job.put_assignment(node.index, status, now_s)
        return jobs

    def _drop_gone(self, node: Node, report: NodeFrame, now_s: float) -> None:
        """Drop jobs of other launchers that their node reports no longer: agents keep no record of them."""
        for job_id, job in list(self.jobs.items()):
            last = job.assignments.get(node.index)
            if last is None or not last.status.is_adopted or now_s - last.received_s < GONE_S:
                continue
            if len(job.assignments) == 1 and all(status.job_id != job_id for status in report.jobs):
                del self.jobs[job_id]

    def _put_ranks(self, batch: RankBatch, reported: Sequence[Sequence[JobModel | None]]) -> None:
        """Give each job the records of its ranks."""
        jobs = list({id(job): job for jobs in reported for job in jobs if job is not None}.values())
        place_of = {id(job): place for place, job in enumerate(jobs)}
        width = 1 + max(len(of_node) for of_node in reported)
        numbers = np.full((len(reported), width), -1)
        for place, of_node in enumerate(reported):
            numbers[place, : len(of_node)] = [-1 if job is None else place_of[id(job)] for job in of_node]
        whose = numbers[batch.place, np.minimum(batch.records["job"], width - 1)]
        whose[~batch.is_sound] = -1
        if (whose < 0).any():
            names = [self.node_names[index] for index in batch.nodes.tolist()]
            for name, num in zip(names, np.bincount(batch.place[whose < 0], minlength=len(names)), strict=True):
                self.nodes[name].num_ignored += int(num)
        now_s = float(batch.at_s.max(initial=0))
        for place, job in enumerate(jobs):
            if not _is_settled(job, now_s):
                job.put_ranks(batch, np.flatnonzero(whose == place))

    def current_job(self) -> JobModel | None:
        """Return the job to show where none is asked for: under way before ended, a later start or a later end first.

        Never one that is only prepared, nor one that had ended before its agents began; None where there is no other.
        """
        latest_first = list(self.jobs.values())[::-1]
        known = [job for job in latest_first if not job.is_only_prepared() and not job.together.is_past]
        under_way = [job for job in known if job.is_under_way()]
        latest_end = max(known, key=ended_s, default=None) if not under_way else None
        return max(under_way, key=lambda job: job.started_s, default=latest_end)

    def validate(self) -> None:
        assert len(self.jobs) <= MAX_JOBS
        for job_id, job in self.jobs.items():
            assert job.job_id == job_id
            assert set(job.assignments) <= set(range(len(self.nodes)))
            job.validate()

    def _job_of(self, node: Node, status: JobStatus) -> JobModel | None:
        """Return the model that a status belongs to, a fresh one for a new attempt; None when it is refused."""
        job = self.jobs.get(status.job_id)
        is_new_run = job is not None and status.is_adopted and _is_another_run(job, node.index, status)
        if job is not None and status.attempt == job.attempt and not is_new_run:
            return None if _is_of_run_before(job, node.index, status) else job
        if job is not None and status.attempt < job.attempt and not job.is_only_prepared():
            return None
        if job is not None and status.state is JobState.PREPARED:
            return None  # it may be withdrawn: until it begins, the attempt before it is the job
        if status.attempt < self._begun.get(status.job_id, 0):
            return None
        if not _is_sound(status) or (job is None and not self._has_room()):
            return None
        self.jobs.pop(status.job_id, None)
        job = JobModel(status.job_id, status.attempt, status.world_size, status.num_nodes)
        job.follows_a_run = is_new_run
        self.jobs[status.job_id] = job
        return job

    def _has_room(self) -> bool:
        if len(self.jobs) < MAX_JOBS:
            return True
        ended = next((job_id for job_id, job in self.jobs.items() if job.is_ended()), None)
        if ended is None:
            return False
        del self.jobs[ended]
        return True


def _is_another_run(job: JobModel, node: int, status: JobStatus) -> bool:
    """Return whether a job of another launcher has been restarted: its attempts count torchrun's restarts alone."""
    return status.world_size != job.world_size or (job.is_over_on(node) and status.state not in ENDED_STATES)


def _is_of_run_before(job: JobModel, node: int, status: JobStatus) -> bool:
    """Return whether a node reports the end of the run before this one: it has not begun there yet."""
    return job.follows_a_run and status.state in ENDED_STATES and node not in job.assignments


def _is_sound(status: JobStatus) -> bool:
    return (
        0 < status.world_size <= MAX_WORLD_SIZE
        and 0 < status.num_nodes <= status.world_size
        and status.first_rank + status.local_world_size <= status.world_size
    )


Thing = TypeVar("Thing")


def still_cluster(cluster: Cluster) -> Cluster:
    """Return a copy of a cluster; reports are never changed, so they are shared."""
    copied = _still(cluster)
    copied.nodes = {name: copy.copy(node) for name, node in cluster.nodes.items()}
    copied.jobs = {job_id: _still_job(job) for job_id, job in cluster.jobs.items()}
    return copied


def _still_job(job: JobModel) -> JobModel:
    copied = _still(job)
    copied.together = AssignmentSummary(copied.assignments)
    copied.group_tables = _still(job.group_tables)
    copied.group_tables.tables = {name: _still(table) for name, table in job.groups.items()}
    copied.anomalies, copied.step_rate = copy.deepcopy(job.anomalies), copy.deepcopy(job.step_rate)
    copied.output, copied.steps_together = copy.copy(job.output), _still(job.steps_together)
    return copied


def _still(thing: Thing) -> Thing:
    """Return a copy with arrays and collections of its own."""
    copied = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, np.ndarray | list | dict | deque):
            setattr(copied, name, value.copy())
    return copied


def ended_s(job: JobModel) -> float:
    """Return when the last node of an ended job ended it, as the nodes report."""
    return max((assignment.began_s for assignment in job.assignments.values()), default=0.0)


def settling_s(job: JobModel, now_s: float) -> float:
    """Return the seconds from the latest news of an ended job until there is none to come: fewer for an old end."""
    return OLD_SETTLED_S if now_s - ended_s(job) > SETTLED_S else SETTLED_S


def _is_settled(job: JobModel, now_s: float) -> bool:
    """Return whether nothing new can come of a job's ranks: nodes report their ended jobs again and again."""
    is_over = job.is_ended() and bool(((job.process == Process.EXITED) | (job.process == Process.UNSEEN)).all())
    known = (job.deaths_version, job.together) if is_over else None
    if known is None or job.latest_news is None or job.latest_news[0] != known:
        job.latest_news = None if known is None else (known, now_s)
        return False
    return now_s - job.latest_news[1] >= settling_s(job, now_s)
