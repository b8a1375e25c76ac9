"""One attempt of one job over all its nodes: arrays by rank, updated in place by every batch of reports.

The arrays of `JobModel` make a question about 16,384 ranks, and the intake of their reports, a few vector operations.

`AssignmentSummary` sums up what nodes report of the job as a whole (`NodeAssignment`). Such reports come a few times a
second from each node and seldom hold anything new, so the sum is rebuilt only then (`is_news`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agent.wire.digest import HAS_LOSS, HAS_REPORT, IS_STEP_COUNTED, IS_STEP_PRINTED, IS_STRANGE, PHASES
from agent.wire.jobs import ENDED_STATES, JobState
from app.model.group_table import GroupTables
from app.model.outside import PROBE_PATIENCE_S, UNPROBED_BIT, AnomalyRanks, Output
from app.model.rank_batch import COUNT, SECOND
from app.model.rank_columns import PHASE_CODE, Death, Process, RankColumns, which_phases
from app.model.steps import HISTORY_S, STILL_FACTOR, StepRate, StepsTogether
from app.text import nodes_text, ranks_text
from ddpcore.wire import DEFAULT_GROUP, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from agent.wire.jobs import JobStatus
    from app.model.group_table import GroupTable
    from app.model.rank_batch import RankBatch

__all__ = ["PHASES", "PHASE_CODE", "Death", "JobModel", "NodeAssignment", "Process", "which_phases"]

STOP_MARGIN_S = 0.5
"""Seconds before a stop within which a death may be its effect: a death's age is sampled."""
STEP_SAMPLE_S = 0.5
"""Seconds between two samples of the step: often enough to date a step, seldom enough for 16,384 ranks."""
FRESH_S = 2.0
"""Seconds since a node last reported a rank (ten of its reports) after which the rank's step is not sampled."""
MET_CALLS = 3
"""Complete collectives of the group of all ranks by which each of these has come; a single one, as a broadcast, may be
complete for some members while others are still to come."""
_PRINTED, _COUNTED, _REPORTED = 1, 2, 3
"""Where a step is from, the best last; 0 is that none is known."""
_OUTSIDE = which_phases(Phase.STARTING, Phase.JOINING)


class JobModel(RankColumns):
    """One attempt of a job: its ranks, and its own state.

    Attributes:
        is_unprobed: Whether the rank's process runs and no probe reports from it, nor is expected to.
        is_step_counted: Whether the steps are only the optimizers' counts of some rank.
        anomalies: Conditions that limit what can be seen of the ranks.
        output: Times at which the ranks print.
        step_rate: Step rate of the rank that is behind.
        steps_together: When the ranks' latest steps ended.
        assignments: Assignments by node.
        together: Summary of the assignments.
        reported_s: When each node last reported the job, by its index; NaN before, and not for all nodes.
        stop_began_s: When the stop of the job began; infinity before.
        started_s: When the attempt was started, as its nodes report; infinity while it is only prepared.
        num_ignored: Facts that were refused: ranks of other nodes, unknown members, contradictions.
        refused: Latest status of each node that claims ranks of another node, or another size of the job.
    """

    def __init__(self, job_id: str, attempt: int, world_size: int, num_nodes: int) -> None:
        super().__init__(job_id, attempt, world_size)
        self._num_nodes = num_nodes
        self.is_unprobed = np.zeros(world_size, np.bool_)
        self._odd_bits = np.zeros(world_size, np.int64)
        self.anomalies, self.output, self.is_step_counted, self._step_kind = AnomalyRanks(), Output(), False, 0
        self.group_tables = GroupTables(world_size)
        self.assignments: dict[int, NodeAssignment] = {}
        self.together = AssignmentSummary(self.assignments)
        self.reported_s = np.full(num_nodes, np.nan)
        self.stop_began_s = self.started_s = float("inf")
        self.num_ignored = 0
        self.refused: dict[int, JobStatus] = {}
        self.follows_a_run = False
        """It was made of a run of a job that no agent has launched, after another run that this console saw."""
        self.step_rate, self._pacer, self._sampled_s = StepRate(), 0, -np.inf
        self.steps_together = StepsTogether(world_size)
        self._shown_step: NDArray[np.int64] | None = None

    def put_assignment(self, node: int, status: JobStatus, now_s: float) -> None:
        """Take a node's status of the job, and which ranks are its own."""
        if (status.world_size, status.num_nodes) != (self.world_size, self._num_nodes):
            self._refuse(node, status)
            return
        before = self.assignments.get(node)
        if before is None or not holds_same_ranks(before.status, status):
            is_whole = max(status.ranks, default=status.first_rank + status.local_world_size - 1) < self.world_size
            places = np.array(status.own_ranks if is_whole else [], np.int64)
            if not is_whole or np.any(~np.isin(self.node_of[places], (-1, node))):
                self._refuse(node, status)
                return
            self.node_of[self.node_of == node] = -1
            self.node_of[places] = node
        self.assignments[node] = NodeAssignment(status, now_s)
        if node >= len(self.reported_s):
            self.reported_s = np.concatenate([self.reported_s, np.full(node + 1, np.nan)])
        self.reported_s[node] = now_s
        if before is None or is_news(before.status, status):
            self.together = AssignmentSummary(self.assignments)
        if status.state is not JobState.PREPARED:
            # Of several reports, the one that was in transit for the shortest time is right.
            age_s = status.state_s if status.age_s is None else status.age_s
            self.started_s = min(self.started_s, now_s - age_s)
        if status.stop_s is not None:
            self.stop_began_s = min(self.stop_began_s, now_s - status.stop_s)
        elif status.state is JobState.STOPPING:
            self.stop_began_s = min(self.stop_began_s, now_s - status.state_s)
        elif status.state is JobState.STOPPED and self.stop_began_s == float("inf"):
            # The stop itself went unseen: it came between the node's previous report, if any, and this one. Where the
            # node knows of no failure before it, what has ended since then, or since the last known end, ended by it.
            since_s = -float("inf") if before is None else before.received_s
            known_s = self.died_at_s[~np.isnan(self.died_at_s)]
            after_s = max(since_s, float(known_s.max()) + STOP_MARGIN_S) if len(known_s) else since_s
            self.stop_began_s = after_s if status.root_cause is None else (since_s + now_s) / 2

    def _refuse(self, node: int, status: JobStatus) -> None:
        self.num_ignored, self.refused[node] = self.num_ignored + 1, status

    @property
    def num_nodes(self) -> int:
        """Nodes of the job: as it was launched; where no agent has launched it, those known."""
        return max(self._num_nodes, len(self.assignments))

    @property
    def groups(self) -> dict[str, GroupTable]:
        """Process groups by name."""
        return self.group_tables.tables

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(operation, label) by the groups' codes."""
        return self.group_tables.calls

    def put_ranks(self, batch: RankBatch, rows: NDArray[np.int64]) -> None:
        """Take the nodes' records of ranks: those of the batch that are of this attempt."""
        ranks = batch.records["rank"][rows].astype(np.int64)
        nodes = batch.nodes[batch.place[rows]]
        is_own = (ranks < self.world_size) & (self.node_of[np.minimum(ranks, self.world_size - 1)] == nodes)
        if not is_own.all():
            self.num_ignored += int((~is_own).sum())
            rows, ranks = rows[is_own], ranks[is_own]
        if not len(rows):
            return
        records, at_s = batch.records[rows], batch.at_s[rows]
        is_new = self.put(ranks, records, batch.frames[batch.place[rows]], at_s)
        is_strange = is_new & (records["flags"] & IS_STRANGE != 0)
        if is_strange.any():
            self.num_ignored += int(is_strange.sum())
            is_new &= ~is_strange
        if is_new.any():
            self.put_reports(ranks[is_new], records[is_new], at_s[is_new])
            self._put_standings(batch, rows[is_new], ranks[is_new])
        self._put_progress(ranks, records)
        self.steps_together.put(ranks, records, at_s, is_new)
        self._put_step_ages(batch, rows, ranks, is_new)
        self._put_anomalies(ranks, records)
        quiet_s, seen_s = records["seconds"][:, SECOND["quiet_s"]], records["seconds"][:, SECOND["seen_s"]]
        self.output.put((at_s - quiet_s)[quiet_s < seen_s])

    def sample_steps(self, now_s: float) -> None:
        """Sample the step of the rank that is behind, from which the rate is taken."""
        if now_s - self._sampled_s < STEP_SAMPLE_S:
            return
        self._sampled_s = now_s
        is_asked = (self.step >= 0) & (now_s - self.received_s <= FRESH_S) & (self.process != Process.EXITED)
        if not is_asked.any():
            return
        lowest = int(self.step[is_asked].min())
        # One rank is followed, by its node's clock, while others are behind by no more than reports are old.
        if not is_asked[self._pacer] or self.step_rate.is_ahead_of(lowest, FRESH_S):
            pacer = int(np.flatnonzero(is_asked & (self.step == lowest))[0])
            self._pacer, self.step_rate = pacer, StepRate(self.step_rate.step_s)
        self.step_rate.put(float(self.seen_s[self._pacer]), int(self.step[self._pacer]))

    def steps_per_s(self, now_s: float) -> float | None:
        """Return the rate of the slowest rank over the last seconds; None while it is not known, or not reported."""
        pacer = self._pacer
        if now_s - self.received_s[pacer] > FRESH_S or self.process[pacer] == Process.EXITED:
            return None
        # Its probe knows for how long it has stood, also before this console came; NaN is not known.
        still_s = max(HISTORY_S, float(self.step_limit_s[pacer]), STILL_FACTOR * (self.step_rate.step_s or 0.0))
        return 0.0 if now_s - self.stepped_at_s[pacer] > still_s else self.step_rate.per_s()

    def remaining_s(self, last_step: int | None, steps_per_s: float | None) -> float | None:
        """Return the seconds until a step at a rate; None while that is not known."""
        step = self.lowest_step()
        return None if step is None or last_step is None or not steps_per_s else max(0, last_step - step) / steps_per_s

    @property
    def shown_step(self) -> NDArray[np.int64]:
        """Step of each rank as of one moment; -1 while it is not known."""
        if self._shown_step is None:
            is_frozen, is_dead = self.process == Process.FROZEN, self.process == Process.EXITED
            self._shown_step = self.steps_together.at_one_moment(self.step, is_frozen, is_dead)
        return self._shown_step

    def lowest_shown_step(self, among: NDArray[np.bool_]) -> int | None:
        known = self.shown_step[among & (self.shown_step >= 0)]
        return int(known.min()) if len(known) else None

    def mean_loss(self) -> tuple[float | None, int | None]:
        """Return the mean of the ranks' latest losses, and the lowest step of them; None where it is not known."""
        losses, steps = self.loss[self.has_loss], self.loss_step[self.has_loss]
        if not len(losses):
            return None, None
        with np.errstate(invalid="ignore", over="ignore"):
            return float(losses.mean()), int(steps.min()) if bool((steps >= 0).all()) else None

    def lowest_step(self) -> int | None:
        known = self.step[self.step >= 0]
        return int(known.min()) if len(known) else None

    def state(self) -> str:
        """Return the job's state over its nodes: one node's failure is the job's."""
        state = self.together.state
        if state is JobState.FAILED and self._has_failed_since_stop():
            return str(JobState.STOPPED)
        return "starting" if state is JobState.RUNNING and self.is_starting() else str(state)

    def state_s(self, now_s: float) -> float:
        """Return for how long it has been in its state, by its nodes' clocks; 0 where no node reports that one."""
        shown, is_ended = self.state(), self.is_ended()
        state = "running" if shown == "starting" else shown
        of_it = (one for one in self.assignments.values() if is_ended or one.status.state == state)
        ages = (now_s - one.received_s + one.status.state_s for one in of_it)
        # The last node ends a job; the first one brings it into another state.
        return max(0.0, (min if is_ended else max)(ages, default=0.0))

    def _has_failed_since_stop(self) -> bool:
        """Return whether it failed only on nodes that the stop did not reach: their ranks lost the stopped peers."""
        if self.stop_began_s == float("inf"):
            return False
        failed = [assignment for assignment in self.assignments.values() if assignment.status.state is JobState.FAILED]
        is_before = self.died_badly & (self.died_at_s < self.stop_began_s - STOP_MARGIN_S)
        return all(assignment.began_s >= self.stop_began_s for assignment in failed) and not bool(is_before.any())

    def is_starting(self) -> bool:
        """Return whether some rank has not opened its process group, and none has made a step."""
        is_early = self.is_outside & ~self.is_unprobed & ~self.is_elsewhere
        return bool(is_early.any()) and not bool((self.step >= 0).any())

    @property
    def is_outside(self) -> NDArray[np.bool_]:
        """Which ranks have not opened their process group, as last reported."""
        return _OUTSIDE[self.phase]

    @property
    def is_elsewhere(self) -> NDArray[np.bool_]:
        """Ranks that no node has reported, though the others have met them: they are no longer starting."""
        has_owner = self.node_of >= 0
        if has_owner.all() or not self._has_met_all(has_owner):
            return np.zeros(self.world_size, np.bool_)
        return ~has_owner

    def _has_met_all(self, has_owner: NDArray[np.bool_]) -> bool:
        """Return whether the ranks with an owner show that all ranks have come to the process group."""
        if self.together.is_adopted:
            return not self.is_outside[has_owner & ~self.is_unprobed].any()
        table = self.groups.get(DEFAULT_GROUP)
        is_missed = self.num_nodes > len(self.assignments)
        return is_missed and table is not None and int(table.completed.max(initial=0)) >= MET_CALLS

    def notes(self, unreported: Sequence[str] = ()) -> dict[str, str]:
        """Return a sentence for each condition that limits what can be seen of the ranks, by the condition.

        `unreported` are nodes that have reported nothing and must have the ranks that no node has.
        """
        notes = self.anomalies.notes(self.together.why_unprobed, is_adopted=self.together.is_adopted)
        if self.is_elsewhere.any():
            ranks = ranks_text(np.flatnonzero(self.is_elsewhere).tolist())
            or_unprobed = ", or without a probe (--name, rankdeck up)" if self.together.is_adopted else ""
            hosts = nodes_text(unreported)
            where = f"nothing came from {hosts}" if hosts else "on a host that is not watched here"
            notes["unknown"] = f"{ranks}: {where}{or_unprobed}"
        return notes

    def is_ended(self) -> bool:
        """Return whether the job is over on every node that has reported it."""
        return self.together.is_ended

    def is_under_way(self) -> bool:
        """Return whether it has begun on some node and has not ended on all."""
        return not self.is_ended() and not self.is_only_prepared()

    def is_only_prepared(self) -> bool:
        """Return whether it has begun on no node that has reported it."""
        return all(assignment.status.state is JobState.PREPARED for assignment in self.assignments.values())

    def is_over_on(self, node: int) -> bool:
        """Return whether a node reports the job as over."""
        return node in self.together.over_nodes

    def may_be_on(self, num_nodes: int) -> NDArray[np.bool_]:
        """Return which of the cluster's nodes run the job, or may: all, while a node of it has not reported it."""
        is_on = np.zeros(num_nodes, np.bool_)
        is_on[list(self.assignments)] = True
        return is_on | (self._num_nodes > len(self.assignments))

    def ranks_of(self, node: int) -> list[int]:
        return list(self.assignments[node].status.own_ranks) if node in self.assignments else []

    def _put_progress(self, ranks: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Take the ranks' steps and losses, which they report or print.

        Where any rank reports its step, the optimizers' counts of the others are ignored: they begin elsewhere. So are
        printed steps where any rank's are counted.
        """
        step, flags = records["counts"][:, COUNT["step"]], records["flags"]
        is_counted, is_printed = flags & IS_STEP_COUNTED != 0, flags & IS_STEP_PRINTED != 0
        kind = np.select([step < 0, is_printed, is_counted], [0, _PRINTED, _COUNTED], _REPORTED)
        if (best := int(kind.max(initial=0))) > self._step_kind:
            self._step_kind, self.is_step_counted, self.step_rate = best, best == _COUNTED, StepRate()
            self.step[:] = -1
        self.step[ranks] = np.where(kind == self._step_kind, step, -1)
        self.has_loss[ranks] = has_loss = flags & HAS_LOSS != 0
        self.loss[ranks[has_loss]] = records["loss"][has_loss]

    def _put_step_ages(
        self, batch: RankBatch, rows: NDArray[np.int64], ranks: NDArray[np.int64], is_new: NDArray[np.bool_]
    ) -> None:
        """Take the steps of the ranks' losses and, of new reports, when the latest steps ended."""
        rank_of = np.full((2, len(batch.records)), -1)
        rank_of[0, rows], rank_of[1, rows[is_new]] = ranks, ranks[is_new]
        found, row = batch.progress()
        own, new = rank_of[:, row]
        self.loss_step[ranks] = -1
        self.loss_step[own[own >= 0]] = found["loss_step"][own >= 0]
        self.steps_together.put_ages(new[new >= 0], found[new >= 0])
        self._shown_step = None

    def _put_anomalies(self, ranks: NDArray[np.int64], records: NDArray[np.void]) -> None:
        has_report = records["flags"] & HAS_REPORT != 0
        has_waited = records["seconds"][:, SECOND["seen_s"]] >= PROBE_PATIENCE_S
        if not has_report.all():
            has_waited |= np.isin(self.node_of[ranks], self.together.unprobed_nodes)
        is_unprobed = ~has_report & (records["process"] != Process.EXITED) & has_waited
        self.is_unprobed[ranks] = is_unprobed
        bits = np.where(has_report, records["anomalies"], 0) | np.where(is_unprobed, UNPROBED_BIT, 0)
        is_news = self._odd_bits[ranks] != bits
        self._odd_bits[ranks] = bits
        for at in np.flatnonzero(is_news).tolist():
            self.anomalies.put(int(ranks[at]), int(bits[at]))

    def _put_standings(self, batch: RankBatch, rows: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
        """Take the ranks' positions in their groups."""
        rank_of = np.full(len(batch.records), -1)
        rank_of[rows] = ranks
        self.num_ignored += self.group_tables.put(batch, rank_of, self.report_at_s, self.stamp)

    def seen_before_s(self, rank: int) -> float | None:
        """Return the seconds from a rank's last report to its end; None while it lives, or when it never reported."""
        seconds = float(self.died_at_s[rank] - self.report_at_s[rank])
        return None if np.isnan(seconds) else max(0.0, seconds)

    def validate(self) -> None:
        for node, assignment in self.assignments.items():
            owned = np.flatnonzero(self.node_of == node)
            assert owned.tolist() == self.ranks_of(node)
            assert (assignment.status.job_id, assignment.status.attempt) == (self.job_id, self.attempt)
        seen = self.process != Process.UNSEEN
        assert [frame is not None for frame in self._frames] == seen.tolist()
        assert {rank for rank in self.deaths if self.process[rank] != Process.EXITED} == set()
        assert np.flatnonzero(~np.isnan(self.died_at_s)).tolist() == sorted(self.deaths)
        self.step_rate.validate()
        for table in self.groups.values():
            table.validate(self.world_size)


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
"""Order of node states; a job's state is the first of them that any node has."""


class NodeAssignment(NamedTuple):
    """A node's latest status of the job as a whole."""

    status: JobStatus
    received_s: float

    @property
    def began_s(self) -> float:
        """Time since which the job has been in its state on this node."""
        return self.received_s - self.status.state_s


class AssignmentSummary:
    """Summary of all nodes' statuses of the job; rebuilt when `is_news` returns True."""

    def __init__(self, assignments: Mapping[int, NodeAssignment]) -> None:
        self._assignments = assignments

    @cached_property
    def _worst_first(self) -> list[JobStatus]:
        statuses = [assignment.status for _, assignment in sorted(self._assignments.items())]
        return sorted(statuses, key=lambda status: WORST_FIRST.index(status.state))

    @cached_property
    def state(self) -> JobState:
        return self._worst_first[0].state if self._worst_first else WORST_FIRST[-1]

    @cached_property
    def states(self) -> frozenset[JobState]:
        """States that any node has."""
        return frozenset(status.state for status in self._worst_first)

    @cached_property
    def is_ended(self) -> bool:
        """Whether the job is over on every node that has reported it."""
        return all(status.state in ENDED_STATES for status in self._worst_first)

    @cached_property
    def over_nodes(self) -> list[int]:
        """Indices of the nodes that report the job as over."""
        return [node for node, assignment in self._assignments.items() if assignment.status.state in ENDED_STATES]

    @cached_property
    def is_past(self) -> bool:
        """Whether it had ended on every node before the agent there began."""
        return self.is_ended and all(status.is_past for status in self._worst_first)

    @cached_property
    def exit_code(self) -> int | None:
        """The first exit code other than 0."""
        codes = [status.exit_code for status in self._worst_first if status.exit_code is not None]
        return next((code for code in codes if code), codes[0] if codes else None)

    @cached_property
    def detail(self) -> str:
        """The first node's detail that is not empty."""
        return next((status.detail for status in self._worst_first if status.detail), "")

    @cached_property
    def allows_faults(self) -> bool:
        """Whether every node allows fault injection into the ranks."""
        return all(status.allow_faults for status in self._worst_first)

    @cached_property
    def is_adopted(self) -> bool:
        """Whether no agent has launched it."""
        return any(status.is_adopted for status in self._worst_first)

    @cached_property
    def is_elastic(self) -> bool:
        """Whether torchrun gathers the nodes again when one leaves."""
        return any(status.is_elastic for status in self._worst_first)

    @cached_property
    def why_unprobed(self) -> str:
        """Why ranks have no probe, by each node that knows."""
        reasons = (assignment.status.unprobed for assignment in self._assignments.values())
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    @cached_property
    def unprobed_nodes(self) -> list[int]:
        """Indices of the nodes that know that their ranks have no probe."""
        return [node for node, assignment in self._assignments.items() if assignment.status.unprobed]

    @cached_property
    def nodes_with_cause(self) -> list[int]:
        """Indices of the nodes that report why the job failed."""
        return [node for node, assignment in self._assignments.items() if assignment.status.root_cause is not None]


def holds_same_ranks(one: JobStatus, other: JobStatus) -> bool:
    """Return whether two statuses of a node name the same ranks as its own."""
    return (
        one.first_rank == other.first_rank
        and one.local_world_size == other.local_world_size
        and one.ranks == other.ranks
    )


def is_news(before: JobStatus, after: JobStatus) -> bool:
    """Return whether a node's new status may change the summary of all nodes."""
    return (
        before.state is not after.state
        or before.exit_code != after.exit_code
        or before.detail != after.detail
        or before.allow_faults is not after.allow_faults
        or before.unprobed != after.unprobed
        or before.is_past is not after.is_past
        or (before.root_cause is None) is not (after.root_cause is None)
    )
