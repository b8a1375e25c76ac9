"""The model: what the nodes have said, folded into nodes, jobs and ranks.

A node is who its connection says, whatever name its message carries. Membership comes from the job's world size, and
counters are kept by (job, attempt). Times are of this console's clock: a report carries ages, and the time since it was
received adds to them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from agent.wire.machine import GpuCondition
from app.model.job_model import JobModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import NodeReport

MAX_WORLD_SIZE = 131_072
"""Eight times the largest cluster this console is measured with; a node that claims more is not believed."""
MAX_JOBS = 64
"""Jobs kept at once, the oldest ended one goes first."""
GAP_S = 1.5
"""A node that was not heard for this long has come back: what it says of its ranks needs a moment to be fresh again."""
MAX_OLD_EPOCHS = 8
"""Earlier lives of an agent whose late reports are recognised."""


class Node:
    """A node as its reports tell it.

    Attributes:
        report: Its newest report; None before the first.
        received_s: When that came.
        back_s: When it was first heard, or first heard again after a gap.
        num_ignored: Reports, or parts of them, that were refused.
        may_have_broken_gpus: Whether its newest report tells of anything that broken GPUs show.
        trouble: Why there is no way to it from here, as far as that is known; empty while there is one.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.report: NodeReport | None = None
        self.received_s = float("-inf")
        self.back_s = float("-inf")
        self.num_ignored = 0
        self.may_have_broken_gpus = False
        self.trouble = ""
        self.old_epochs: deque[str] = deque(maxlen=MAX_OLD_EPOCHS)

    def is_newer(self, report: NodeReport) -> bool:
        """Return whether a report is later than the newest one: of a new life of the agent, or further on in this."""
        if self.report is None:
            return True
        if report.epoch == self.report.epoch:
            return report.report_seq > self.report.report_seq
        return report.epoch not in self.old_epochs


class Cluster:
    """All nodes and their jobs; `apply` is the only thing that changes it."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = {name: Node(name, index) for index, name in enumerate(nodes)}
        self.node_names = tuple(self.nodes)
        self.jobs: dict[str, JobModel] = {}
        """The newest attempt of each job, oldest job first."""
        self.num_unknown_nodes = 0
        """Reports under a name that is not a node of this cluster."""

    def put_trouble(self, node: str, words: str) -> None:
        """Take why there is no way to a node at present; empty when there is one."""
        self.nodes[node].trouble = words

    def apply(self, node: str, report: NodeReport, now_s: float) -> None:
        """Fold in a node's report. Nothing that a peer says raises: it becomes state or is counted."""
        known = self.nodes.get(node)
        if known is None:
            self.num_unknown_nodes += 1
            return
        if not known.is_newer(report):
            known.num_ignored += 1
            return
        if known.report is not None and known.report.epoch != report.epoch:
            known.old_epochs.append(known.report.epoch)
        if now_s - known.received_s > GAP_S:
            known.back_s = now_s
        known.report = report
        known.received_s = now_s
        known.may_have_broken_gpus = any(
            gpu.figures.xids or gpu.figures.condition is not GpuCondition.OK for gpu in report.gpus.gpus
        )
        told: dict[tuple[str, int], JobModel] = {}
        for status in report.jobs:
            job = self._job_of(status)
            if job is None:
                known.num_ignored += 1
                continue
            job.put_share(known.index, status, now_s)
            told[status.job_id, status.attempt] = job
        for worker in report.workers:
            job = told.get((worker.job_id, worker.attempt))
            if job is None:
                known.num_ignored += 1
                continue
            job.put_worker(known.index, worker, now_s)
        for job in told.values():
            job.sample_steps(now_s)

    def current_job(self) -> JobModel | None:
        """Return the job to show: the newest that has not ended, else the newest."""
        newest_first = list(self.jobs.values())[::-1]
        return next((job for job in newest_first if not job.is_ended()), newest_first[0] if newest_first else None)

    def validate(self) -> None:
        """State the invariants."""
        assert len(self.jobs) <= MAX_JOBS
        for job_id, job in self.jobs.items():
            assert job.job_id == job_id
            assert set(job.shares) <= set(range(len(self.nodes)))
            job.validate()

    def _job_of(self, status: JobStatus) -> JobModel | None:
        """Return the model that a status belongs to, a fresh one for a new attempt; None when it is not believed."""
        job = self.jobs.get(status.job_id)
        if job is not None and status.attempt <= job.attempt:
            return job if status.attempt == job.attempt else None
        if not _is_sound(status) or (job is None and not self._has_room()):
            return None
        self.jobs.pop(status.job_id, None)
        job = JobModel(status.job_id, status.attempt, status.world_size, status.num_nodes)
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


def _is_sound(status: JobStatus) -> bool:
    return (
        0 < status.world_size <= MAX_WORLD_SIZE
        and 0 < status.num_nodes <= status.world_size
        and status.first_rank + status.local_world_size <= status.world_size
    )
