"""One attempt of one job over all its nodes: arrays by rank, updated in place by every report.

The arrays exist so that a question about 16,384 ranks is a few vector operations; the last `WorkerReport` of each rank
is kept beside them for the words of its row.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.reports import ProcessState
from app.model.group_table import GroupTable
from app.model.oddities import PROBE_PATIENCE_S, Oddities
from app.model.outside import Output, is_step_counted, loss_of, step_of
from app.model.step_rate import StepRate
from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import ExitReport, WorkerReport
    from ddpcore.wire import GroupReport, RankReport

MAX_GROUPS = 8_192
MAX_MEMBERSHIPS = 8 * 131_072
"""Bounds on what peers can make this console allocate: groups, and members summed over groups."""
MAX_CALLS = 4_096
"""Distinct (operation, label) pairs; later ones share the nameless first."""
STEP_SAMPLE_S = 0.5
"""Between two looks at the step: often enough to know when a step was done, seldom enough for 16,384 ranks."""
HEARD_S = 2.0
"""A rank that its node has not spoken of for longer, ten of its reports, is not asked for its step."""


WORST_FIRST = (
    JobState.FAILED,
    JobState.LOST,
    JobState.STOPPING,
    JobState.RESTARTING,
    JobState.RUNNING,
    JobState.PREPARED,
    JobState.STOPPED,
    JobState.SUCCEEDED,
)
"""Of its nodes' states a job has the first in this order."""


class Process(IntEnum):
    """`ProcessState` as a number, with one for a worker that has not been heard of."""

    UNSEEN = 0
    RUNNING = 1
    FROZEN = 2
    BLOCKED = 3
    EXITED = 4


_PROCESS = {
    ProcessState.RUNNING: int(Process.RUNNING),
    ProcessState.FROZEN: int(Process.FROZEN),
    ProcessState.BLOCKED: int(Process.BLOCKED),
    ProcessState.EXITED: int(Process.EXITED),
}

PHASES = tuple(Phase)
PHASE_CODE = {phase: code for code, phase in enumerate(PHASES)}


class Death(NamedTuple):
    """How and when a worker's process ended."""

    rank: int
    at_s: float
    exit: ExitReport


class NodeShare(NamedTuple):
    """What a node last said of the job as a whole."""

    status: JobStatus
    received_s: float

    @property
    def began_s(self) -> float:
        """Since when the job has been in its state on this node."""
        return self.received_s - self.status.state_s


class JobModel:
    """What is known of one attempt of a job.

    Attributes:
        node_of: Index of the node that runs each rank; -1 until a node claims it.
        process: `Process` of each rank.
        received_s: When the node last spoke of the rank.
        process_since_s: Since when its process has been in this state.
        last_frozen_s: When it was last seen frozen.
        report_at_s: When its probe's last report reached its node; NaN before the first.
        report_age_s: How old that report was when the node last spoke.
        phase_since_s: Since when it has been in its phase; NaN before its first report.
        is_ending: Whether its last report was its farewell.
        stamp: Count of its probe's reports that have been folded in.
        worked_s: Seconds in which it waited for nobody, by phase (in the order of `Phase`) and rank.
        num_compared: Collectives of which it is known which rank of its node came last.
        num_last: Of these, those to which it did.
        workers: The node's last word on each rank.
        deaths: By rank, of those whose process has ended.
        died_at_s: When; NaN of those that live.
        died_badly: Whether a signal or an exit code other than 0 ended it.
        is_unprobed: Whether its process runs and nothing in it reports, nor is to be expected to.
        is_step_counted: Whether the steps are only the optimizers' counts of some rank.
        oddities: What limits what can be seen of the ranks.
        output: When they print.
        step_rate: How fast the one goes that is behind.
        shares: By node.
        stop_began_s: When the job was told to end; infinity while it was not.
        num_ignored: Facts that were refused: ranks of other nodes, members that are none, contradictions.
    """

    def __init__(self, job_id: str, attempt: int, world_size: int, num_nodes: int) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.world_size = world_size
        self.num_nodes = num_nodes
        self.node_of = np.full(world_size, -1, np.int32)
        self.process = np.zeros(world_size, np.int8)
        self.received_s = np.full(world_size, -np.inf)
        self.process_since_s = np.full(world_size, -np.inf)
        self.last_frozen_s = np.full(world_size, -np.inf)
        self.report_at_s = np.full(world_size, np.nan)
        self.report_age_s = np.zeros(world_size)
        self.phase = np.full(world_size, PHASE_CODE[Phase.STARTING], np.int8)
        self.phase_since_s = np.full(world_size, np.nan)
        self.is_ending = np.zeros(world_size, np.bool_)
        self.step = np.full(world_size, -1, np.int64)
        self.loss = np.full(world_size, np.nan)
        self.has_loss = np.zeros(world_size, np.bool_)
        self.observed_s = np.zeros(world_size)
        self.waited_s = np.zeros(world_size)
        self.worked_s = np.zeros((len(Phase), world_size))
        self.num_compared = np.zeros(world_size)
        self.num_last = np.zeros(world_size)
        self.rss_bytes = np.full(world_size, np.nan)
        self.peak_rss_bytes = np.full(world_size, np.nan)
        self.stamp = np.zeros(world_size, np.int64)
        self.workers: list[WorkerReport | None] = [None] * world_size
        self.died_at_s = np.full(world_size, np.nan)
        self.died_badly = np.zeros(world_size, np.bool_)
        self.deaths: dict[int, Death] = {}
        self.deaths_version = 0
        self.is_unprobed = np.zeros(world_size, np.bool_)
        self.oddities, self.output, self.is_step_counted, self._tells_steps = Oddities(), Output(), False, False
        self.groups: dict[str, GroupTable] = {}
        self.calls: list[tuple[str, str]] = [("", "")]
        self.shares: dict[int, NodeShare] = {}
        self.stop_began_s = float("inf")
        self.num_ignored = self._num_memberships = 0
        self._call_code: dict[tuple[str, str], int] = {("", ""): 0}
        self.step_rate, self._pacer, self._sampled_s = StepRate(), 0, -np.inf

    def put_share(self, node: int, status: JobStatus, now_s: float) -> None:
        """Take a node's word on the job, and on which ranks are its own."""
        if (status.world_size, status.num_nodes) != (self.world_size, self.num_nodes):
            self.num_ignored += 1
            return
        first, last = status.first_rank, status.first_rank + status.local_world_size
        before = self.shares.get(node)
        if before is None or (before.status.first_rank, self._end_rank(before.status)) != (first, last):
            owners = self.node_of[first:last]
            if last > self.world_size or np.any((owners != -1) & (owners != node)):
                self.num_ignored += 1
                return
            self.node_of[self.node_of == node] = -1
            self.node_of[first:last] = node
        self.shares[node] = NodeShare(status, now_s)
        if status.state is JobState.STOPPING:
            self.stop_began_s = min(self.stop_began_s, now_s - status.state_s)
        elif status.state is JobState.STOPPED and self.stop_began_s == float("inf"):
            # The stop itself went unseen: it came between the node's last word and this one, if there was one before.
            self.stop_began_s = -float("inf") if before is None else (before.received_s + now_s) / 2

    def put_worker(self, node: int, worker: WorkerReport, now_s: float) -> None:
        """Take a node's word on one of its ranks."""
        rank = worker.rank
        if rank >= self.world_size or self.node_of[rank] != node:
            self.num_ignored += 1
            return
        before = self.workers[rank]
        self.workers[rank] = worker
        process = _PROCESS[worker.process]
        self.process[rank] = process
        self.received_s[rank] = now_s
        self.process_since_s[rank] = now_s - worker.process_s
        if process == Process.FROZEN:
            self.last_frozen_s[rank] = now_s
        if process == Process.EXITED or rank in self.deaths:
            self._put_death(rank, worker, now_s)
        if process != Process.EXITED:
            self.rss_bytes[rank] = rss = worker.rss_bytes
            if not rss <= self.peak_rss_bytes[rank]:
                self.peak_rss_bytes[rank] = rss
        if worker.lateness is not None:
            self.num_compared[rank] = worker.lateness.num_compared
            self.num_last[rank] = worker.lateness.num_last
        report = worker.report
        if report is not None:
            age_s = worker.report_age_s
            self.report_age_s[rank] = age_s
            if before is None or before.report is None or not _is_same(before.report, report):
                self._put_report(rank, report, now_s - age_s)
        self._put_progress(rank, worker)
        self.output.put(worker, now_s)
        has_waited = worker.seen_s >= PROBE_PATIENCE_S or bool(self.shares[node].status.unprobed)
        self.is_unprobed[rank] = is_unprobed = report is None and process != Process.EXITED and has_waited
        self.oddities.put(rank, report, is_unprobed=is_unprobed)

    def sample_steps(self, now_s: float) -> None:
        """Look from time to time at how far the rank that is behind has come; the rate is its."""
        if now_s - self._sampled_s < STEP_SAMPLE_S:
            return
        self._sampled_s = now_s
        is_asked = (self.step >= 0) & (now_s - self.received_s <= HEARD_S)
        if not is_asked.any():
            return
        lowest = int(self.step[is_asked].min())
        # One rank is followed, by its node's clock, while others are behind by no more than reports are old.
        if not is_asked[self._pacer] or self.step_rate.is_ahead_of(lowest, HEARD_S):
            pacer = int(np.flatnonzero(is_asked & (self.step == lowest))[0])
            self._pacer, self.step_rate = pacer, StepRate(self.step_rate.step_s)
        worker = self.workers[self._pacer]
        if worker is not None:
            self.step_rate.put(worker.seen_s, int(self.step[self._pacer]))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate of the slowest rank over the last seconds; None while it is not known, or not heard."""
        is_heard = now_s - self.received_s[self._pacer] <= HEARD_S
        return self.step_rate.per_s() if is_heard else None

    def remaining_s(self, last_step: int | None, steps_per_s: float | None) -> float | None:
        """Return how long it is to a step at a rate, None while that is not known."""
        step = self.lowest_step()
        return None if step is None or last_step is None or not steps_per_s else max(0, last_step - step) / steps_per_s

    def lowest_step(self) -> int | None:
        """Return the lowest step of the ranks that tell one."""
        told = self.step[self.step >= 0]
        return int(told.min()) if len(told) else None

    def state(self) -> str:
        """Return the job's state over its nodes: one node's failure is the job's."""
        states = {share.status.state for share in self.shares.values()}
        for state in WORST_FIRST:
            if state in states:
                return "starting" if state is JobState.RUNNING and self.is_starting() else str(state)
        return str(WORST_FIRST[-1])

    def is_starting(self) -> bool:
        """Return whether some rank has not opened its process group, and none has made a step."""
        is_early = self.is_outside & ~self.is_unprobed
        return bool(is_early.any()) and not bool((self.step >= 0).any())

    @property
    def is_outside(self) -> NDArray[np.bool_]:
        """Which ranks have not opened their process group, as far as they have told."""
        is_outside: NDArray[np.bool_] = np.isin(self.phase, (PHASE_CODE[Phase.STARTING], PHASE_CODE[Phase.JOINING]))
        return is_outside

    def notes(self) -> dict[str, str]:
        """Return what limits what can be seen of the ranks, a sentence for each, by what it is."""
        whys = (share.status.unprobed for share in self.shares.values())
        return self.oddities.notes(next(filter(None, whys), ""))

    def is_ended(self) -> bool:
        """Return whether the job is over on every node that has told of it."""
        return all(share.status.state in ENDED_STATES for share in self.shares.values())

    def ranks_of(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        share = self.shares.get(node)
        return [] if share is None else list(range(share.status.first_rank, self._end_rank(share.status)))

    def _end_rank(self, status: JobStatus) -> int:
        return status.first_rank + status.local_world_size

    def _put_death(self, rank: int, worker: WorkerReport, now_s: float) -> None:
        """Remember how a rank ended; the earliest estimate of the time is the nearest, for delays only add."""
        known = self.deaths.get(rank)
        if worker.exit is None or worker.process is not ProcessState.EXITED:
            if known is not None:
                del self.deaths[rank]
                self.died_at_s[rank] = np.nan
                self.deaths_version += 1
            return
        at_s = now_s - worker.exit.age_s
        if known is not None:
            same = msgspec.structs.replace(worker.exit, age_s=known.exit.age_s) == known.exit
            if same and at_s >= known.at_s:
                return
            at_s = min(at_s, known.at_s)
        self.deaths[rank] = Death(rank, at_s, worker.exit)
        self.died_at_s[rank] = at_s
        self.died_badly[rank] = worker.exit.signal is not None or worker.exit.code not in (0, None)
        self.deaths_version += 1

    def _put_progress(self, rank: int, worker: WorkerReport) -> None:
        """Take a rank's step and loss, which it reports or prints.

        Where any rank tells its step, the counts of the others' optimizers say nothing: they begin elsewhere.
        """
        step, loss, is_counted = step_of(worker), loss_of(worker), is_step_counted(worker)
        if step is not None and not is_counted and not self._tells_steps:
            self._tells_steps, self.is_step_counted = True, False
            self.step[:] = -1
            self.step_rate = StepRate()
        elif is_counted:
            self.is_step_counted = not self._tells_steps
        self.step[rank] = -1 if step is None or (is_counted and self._tells_steps) else step
        self.has_loss[rank] = loss is not None
        if loss is not None:
            self.loss[rank] = loss

    def _put_report(self, rank: int, report: RankReport, report_at_s: float) -> None:
        if report.rank != rank or report.job_id != self.job_id or report.attempt != self.attempt:
            self.num_ignored += 1
            return
        self.report_at_s[rank] = report_at_s
        self.phase[rank] = PHASE_CODE[report.phase]
        self.phase_since_s[rank] = report_at_s - report.phase_s
        self.is_ending[rank] = report.is_ending
        self.observed_s[rank] = report.observed_s
        self.waited_s[rank] = report.waited_s
        if len(report.worked_s) == len(PHASES):
            self.worked_s[:, rank] = report.worked_s
        stamp = int(self.stamp[rank]) + 1
        self.stamp[rank] = stamp
        for group in report.groups:
            table = self.groups.get(group.group) or self._open_group(group)
            slot = None if table is None else self._slot(table, rank, group)
            if table is None or slot is None:
                self.num_ignored += 1
                continue
            table.put(slot, group, report_at_s, self._code_of(group), stamp)

    def _slot(self, table: GroupTable, rank: int, group: GroupReport) -> int | None:
        if table.slot_of is None:
            return rank if len(group.ranks) in (0, self.world_size) else None
        return table.slot_of.get(rank) if len(group.ranks) == len(table.members) else None

    def _open_group(self, group: GroupReport) -> GroupTable | None:
        members = None if group.group in (DEFAULT_GROUP, BARRIER_GROUP) or not group.ranks else sorted(set(group.ranks))
        if members is not None and (members[-1] >= self.world_size or len(members) != len(group.ranks)):
            return None
        if members is not None and len(members) == self.world_size:
            members = None
        num_members = self.world_size if members is None else len(members)
        if len(self.groups) >= MAX_GROUPS or self._num_memberships + num_members > MAX_MEMBERSHIPS:
            return None
        self._num_memberships += num_members
        table = GroupTable(group.group, members, self.world_size)
        self.groups[group.group] = table
        return table

    def _code_of(self, group: GroupReport) -> int:
        call = (group.op, group.label)
        code = self._call_code.get(call)
        if code is None:
            if len(self.calls) >= MAX_CALLS:
                return 0
            code = self._call_code[call] = len(self.calls)
            self.calls.append(call)
        return code

    def validate(self) -> None:
        """State the invariants."""
        for node, share in self.shares.items():
            owned = np.flatnonzero(self.node_of == node)
            assert owned.tolist() == self.ranks_of(node)
            assert (share.status.job_id, share.status.attempt) == (self.job_id, self.attempt)
        seen = self.process != Process.UNSEEN
        assert all((worker is not None) == known for worker, known in zip(self.workers, seen.tolist(), strict=True))
        assert {rank for rank in self.deaths if self.process[rank] != Process.EXITED} == set()
        assert np.flatnonzero(~np.isnan(self.died_at_s)).tolist() == sorted(self.deaths)
        self.step_rate.validate()
        for table in self.groups.values():
            table.validate(self.world_size)


def _is_same(before: RankReport, after: RankReport) -> bool:
    return before.report_seq == after.report_seq and before.pid == after.pid
