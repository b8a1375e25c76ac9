"""The rows of ranks, one by one and as arrays, and of the collectives in which they wait.

`rank_row` is one rank. `barrier_row` is a collective, with the ranks that are missing and those that make another call
at its place. `RankTable` holds the facts of all ranks of a job as arrays, for questions about all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.reports import ProcessState, epoch_of, loss_of, loss_step_of, place_of, step_of
from app.diagnosis.causes import RankState, Severity
from app.diagnosis.rank_facts import STATE_CODE, STATES
from app.diagnosis.verdicts import is_at_exit
from app.diagnosis.waits import LATE_S
from app.model.job_model import Process
from app.model.outside import outside_text
from app.text import LINE_LIMIT, call_text, clean, clean_name, place_text, ranks_text, seconds_text, signal_text
from app.view.gpus import held_by
from app.view.headline import LATE_WAIT_S, wait_text
from app.view.nodes import clean_names
from app.view.rows import RankRow
from app.view.verdict_text import arguments_text, before_end_text
from ddpcore.wire import DEFAULT_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agent.wire.reports import ExitReport, WorkerReport
    from app.diagnosis.diagnoser import JobDiagnosis
    from app.diagnosis.verdicts import Side, Verdict
    from app.diagnosis.waits import Wait
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel
    from ddpcore.wire import GroupReport, RankReport

STATE_SEVERITY = {
    RankState.STARTING: Severity.QUIET,
    RankState.UNPROBED: Severity.OK,
    RankState.RUNNING: Severity.OK,
    RankState.SLOW: Severity.WARNING,
    RankState.WAITING: Severity.OK,
    RankState.MISSING: Severity.WARNING,
    RankState.FROZEN: Severity.CRITICAL,
    RankState.SILENT: Severity.WARNING,
    RankState.EXITED: Severity.WARNING,
    RankState.DONE: Severity.QUIET,
    RankState.STOPPED: Severity.QUIET,
    RankState.ENDED: Severity.QUIET,
    RankState.LOST: Severity.CRITICAL,
}

_IS_UNREPORTED = np.array([state in {RankState.FROZEN, RankState.SILENT, RankState.LOST} for state in STATES])
"""Whether a rank that lives does not report, by the code of its state."""


def rank_row(cluster: Cluster, job: JobModel, found: JobDiagnosis, rank: int, now_s: float) -> RankRow:
    state = STATES[found.states[rank]]
    if state is RankState.STARTING and (job.is_unprobed[rank] or job.is_elsewhere[rank]):
        state = RankState.UNPROBED
    worker = job.worker(rank)
    report = None if worker is None else worker.report
    group = None if report is None else shown_group(report)
    owner = int(job.node_of[rank])
    is_waiting = state is RankState.WAITING and group is not None and group.is_waiting
    since_report_s = now_s - float(job.report_at_s[rank])
    wait_frac = float(found.wait_frac[rank])
    is_dead = worker is None or worker.exit is not None
    held, place = held_by(cluster, job, rank), place_of(worker)
    return RankRow(
        rank=rank,
        node=clean_name(_node_name(cluster, job, owner)),
        local_rank=None if worker is None else worker.local_rank,
        pid=None if worker is None else worker.pid or None,
        state=state,
        severity=_severity(found, rank, state),
        step=None if worker is None else _step(job, worker),
        is_step_least=worker is not None and is_step_least(job, found, rank),
        epoch=None if worker is None else epoch_of(worker),
        loss=None if worker is None else loss_of(worker),
        loss_step=None if worker is None or loss_of(worker) is None else loss_step_of(worker),
        phase="" if report is None else str(report.phase),
        phase_s=None if report is None or is_dead else report.phase_s + since_report_s,
        group="" if group is None else clean_name(group.group),
        op="" if group is None else clean_name(group.op),
        label="" if group is None else clean_name(group.label),
        seq=None if group is None else (group.completed_seq + 1 if group.is_waiting else group.enqueued_seq),
        waiting_s=group.waiting_s + since_report_s if is_waiting and group is not None else None,
        wait_frac=None if math.isnan(wait_frac) else wait_frac,
        quiet_s=None if worker is None or is_dead else worker.quiet_s,
        cpu_cores=None if worker is None or is_dead else worker.cpu_cores,
        metrics={} if worker is None else {clean_name(name): value for name, value in worker.metrics.items()},
        rss_bytes=None if worker is None or is_dead else worker.rss_bytes,
        pss_bytes=None if worker is None or is_dead else worker.pss_bytes,
        gpu=held.gpu,
        gpu_used_bytes=held.used_bytes,
        torch_allocated_bytes=held.allocated_bytes,
        torch_reserved_bytes=held.reserved_bytes,
        torch_peak_bytes=held.peak_bytes,
        age_s=None if report is None else max(0.0, since_report_s),
        where="" if is_dead and is_at_exit(place) else place_text(place),
        detail=_detail(job, worker, report, state),
    )


def is_step_least(job: JobModel, found: JobDiagnosis, ranks: int | NDArray[np.bool_]) -> bool:
    """Return whether a rank, or each of some, may have come further than it has reported."""
    is_unreported = found.facts.is_dead[ranks] | _IS_UNREPORTED[found.states[ranks]]
    return bool(np.all(is_unreported & ~(job.is_ending[ranks] | job.has_raised[ranks])))


def _step(job: JobModel, worker: WorkerReport) -> int | None:
    """Return a rank's step as of the moment of which all are known; its own where others report or count theirs."""
    latest = step_of(worker)
    return int(job.shown_step[worker.rank]) if latest == job.step[worker.rank] else latest


def _node_name(cluster: Cluster, job: JobModel, owner: int) -> str:
    """Return the node of a rank; also a node that was never reached, when only one is possible."""
    if owner >= 0:
        return cluster.node_names[owner]
    others = [node.name for node in cluster.nodes.values() if node.index not in job.assignments and node.report is None]
    return others[0] if len(others) == 1 and job.num_nodes == len(job.assignments) + 1 else ""


def rank_call(row: RankRow) -> str:
    """Return the last collective of a rank as text, with its seq only while the rank waits in it.

    The seq of a moving rank is up to seconds old: beside the seq that others wait in, it would look like a lag.
    """
    seq = row.seq if row.waiting_s is not None else None
    return call_text(row.group, seq, row.op, row.label) if row.op else ""


def rank_text(row: RankRow) -> str:
    """Return a rank in one line, for searching and copying."""
    waiting = "" if row.waiting_s is None else f"waiting for {seconds_text(row.waiting_s)}"
    step = "" if row.step is None else f"step {row.step_text}"
    call = rank_call(row)
    fields = (f"rank {row.rank}", row.node, row.state, step, row.phase_text, call, waiting, row.where, row.detail)
    return "  ".join(filter(None, fields))


def shown_group(report: RankReport) -> GroupReport | None:
    """Return the most informative group of a rank: the one it has waited in longest, else the one of all ranks."""
    waiting = [group for group in report.groups if group.is_waiting]
    if waiting:
        return max(waiting, key=lambda group: group.waiting_s)
    return min(report.groups, key=lambda group: group.group != DEFAULT_GROUP, default=None)


def exit_text(exit_report: ExitReport, asked: str = "") -> str:
    """Return `killed by SIGKILL`, `exited with code 1: ValueError: boom` or `finished`, and `asked` behind it."""
    if exit_report.signal is not None:
        return f"killed by {signal_text(exit_report.signal)}{asked}"
    if exit_report.code is None:
        return f"ended{asked}, it is not known how"
    if exit_report.code == 0:
        return f"finished{asked}"
    last = f"; its last line: {exit_report.last_line}" if exit_report.last_line else ""
    return f"exited with code {exit_report.code}" + (f": {exit_report.error}" if exit_report.error else last) + asked


def _over_text(job: JobModel, rank: int) -> str:
    """Return why a node lost its part of the job, as the end of a sentence."""
    detail = job.assignments[int(job.node_of[rank])].status.detail
    return f": {detail}" if detail else ""


def _severity(found: JobDiagnosis, rank: int, state: RankState) -> Severity:
    blamed = [verdict.severity for verdict in found.verdicts if rank in verdict.culprits]
    if blamed:
        return blamed[0]
    return STATE_SEVERITY[state]


def _detail(job: JobModel, worker: WorkerReport | None, report: RankReport | None, state: RankState) -> str:
    if worker is None:
        unknown = {RankState.LOST: "not known", RankState.UNPROBED: "not reported here"}
        return unknown.get(state, "not started")
    if state is RankState.LOST and job.is_over_on(int(job.node_of[worker.rank])):
        return clean(f"how it ended is not known{_over_text(job, worker.rank)}")
    if worker.exit is not None:
        death = job.deaths.get(worker.rank)
        asked = " on request" if death is not None and death.at_s >= job.stop_began_s else ""
        is_sudden = state is RankState.EXITED and not worker.exit.error
        before = before_end_text(job.seen_before_s(worker.rank)) if is_sudden else ""
        return clean(exit_text(worker.exit, asked) + (before and f"; last seen{before[1:]}"))
    parts = []
    if state is RankState.FROZEN:
        parts.append(f"frozen for {seconds_text(worker.process_s)}")
    if worker.process is ProcessState.BLOCKED:
        parts.append("in uninterruptible sleep")
    if report is None:
        parts.append(_unreported_text(job, worker))
    parts += job.anomalies.of_rank(worker.rank)
    if report is not None and report.slow_factor > 1:
        parts.append(f"slowed {report.slow_factor:g}x on request")
    return clean("; ".join(parts))


def _unreported_text(job: JobModel, worker: WorkerReport) -> str:
    if job.is_unprobed[worker.rank]:
        assignment = job.assignments.get(int(job.node_of[worker.rank]))
        return outside_text(worker, assignment.status.unprobed if assignment and job.together.is_adopted else None)
    return "importing torch"


_IS_ODD = np.array([STATE_SEVERITY[state] in {Severity.WARNING, Severity.CRITICAL} for state in STATES])
_WAITING = STATE_CODE[RankState.WAITING]


class RankTable:
    """The ranks of a job at one moment, with the same facts as their rows."""

    def __init__(self, cluster: Cluster, job: JobModel, found: JobDiagnosis, now_s: float) -> None:
        self._cluster, self._job, self._found, self._now_s = cluster, job, found, now_s

    @property
    def num_ranks(self) -> int:
        """The world size."""
        return self._job.world_size

    @cached_property
    def states(self) -> NDArray[np.int8]:
        """Indices into `app.diagnosis.rank_facts.STATES`."""
        has_no_probe = self._job.is_unprobed | self._job.is_elsewhere
        is_unprobed = (self._found.states == STATE_CODE[RankState.STARTING]) & has_no_probe
        return np.where(is_unprobed, STATE_CODE[RankState.UNPROBED], self._found.states).astype(np.int8)

    @property
    def node_of(self) -> NDArray[np.int32]:
        """Indices into `node_names`; -1 while no node claims the rank."""
        return self._job.node_of

    @cached_property
    def node_names(self) -> list[str]:
        return clean_names(self._cluster.node_names)

    @property
    def phases(self) -> NDArray[np.int8]:
        """Indices into `app.model.job_model.PHASES`; -1 until the rank reports one."""
        return np.where(np.isnan(self._job.report_at_s), -1, self._job.phase).astype(np.int8)

    @property
    def step(self) -> NDArray[np.float64]:
        """Step of each rank; NaN while it is not known."""
        return np.where(self._job.shown_step < 0, np.nan, self._job.shown_step)

    @property
    def rss_bytes(self) -> NDArray[np.float64]:
        """Resident bytes of each rank; NaN without a process."""
        return np.where(self._job.process == Process.EXITED, np.nan, self._job.rss_bytes)

    @property
    def waiting_s(self) -> NDArray[np.float64]:
        """Seconds that each rank has waited; NaN when it does not wait."""
        since_s = np.full(self.num_ranks, np.inf)
        for group in self._job.groups.values():
            members = group.members[group.is_waiting]
            since_s[members] = np.minimum(since_s[members], group.wait_since_s[group.is_waiting])
        is_waiting = (self.states == _WAITING) & np.isfinite(since_s)
        return np.where(is_waiting, self._now_s - since_s, np.nan)

    @property
    def cpu_cores(self) -> NDArray[np.float64]:
        """Cores that each process keeps busy; NaN without a process."""
        is_there = (self._job.process != Process.UNSEEN) & (self._job.process != Process.EXITED)
        return np.where(is_there, self._job.cpu_cores, np.nan)

    @property
    def is_problem(self) -> NDArray[np.bool_]:
        """Ranks that need attention: those whose rows are not OK."""
        is_problem: NDArray[np.bool_] = _IS_ODD[self.states]
        for verdict in reversed(self._found.verdicts):
            is_problem[list(verdict.culprits)] = verdict.severity in {Severity.WARNING, Severity.CRITICAL}
        return is_problem


MAX_PLACES_ASKED = 64
"""Waiting ranks whose lines are compared for the most common one; nearly all stand at the same line."""


class OtherCallRow(msgspec.Struct, frozen=True):
    """Ranks that have made another call than the other ranks, at the same place of the group's order."""

    ranks: list[int]
    op: str
    label: str
    where: str
    """Line at which the first of them stands in it; empty where it is not known."""
    call: str
    """Their call with the arguments that differ: `broadcast`, `all_reduce with 3 elements`."""

    @property
    def text(self) -> str:
        """Text such as `rank 1 calls broadcast`."""
        return f"{ranks_text(self.ranks)} {self.verb} {self.call}"

    @property
    def verb(self) -> str:
        return "calls" if len(self.ranks) == 1 else "call"

    @property
    def at(self) -> str:
        """Text such as ` at train.py:18 in main`; empty where the line is not known."""
        return f" at {self.where}" if self.where else ""


class BarrierRow(msgspec.Struct, frozen=True):
    """A collective in which a rank waits now."""

    job: str
    attempt: int
    group: str
    seq: int
    op: str
    label: str
    waiting: list[int]
    """Ranks that wait, those with another call included."""
    missing: list[int]
    """Ranks that are waited for; in the first second only those that a verdict names."""
    is_settled: bool
    """Whether all that are missing are known."""
    waited_s: float
    """Seconds of its longest wait."""
    where: str
    """Most common line at which the waiting ranks stand that make this call."""
    missing_where: str
    """Line at which the first missing rank stands."""
    severity: Severity
    text: str
    """A sentence: `ranks 0-1, 3 wait in all_reduce #57 for rank 2, 1.7 s`."""
    other_calls: list[OtherCallRow] = []
    """Ranks that have made another call at its place in the group's order, by the verdict of a mismatch."""

    @property
    def in_this_call(self) -> list[int]:
        """Waiting ranks that make this call, as far as is known."""
        elsewhere = {rank for other in self.other_calls for rank in other.ranks}
        return [rank for rank in self.waiting if rank not in elsewhere] if elsewhere else self.waiting

    @property
    def other_calls_text(self) -> str:
        """The ranks with another call, without their lines: `rank 1 calls broadcast`; empty without any."""
        return ", ".join(other.text for other in self.other_calls)

    @property
    def placed_other_calls_text(self) -> str:
        """The same with their lines."""
        return ", ".join(f"{other.text}{other.at}" for other in self.other_calls)


def barrier_row(job: JobModel, wait: Wait, verdicts: Sequence[Verdict]) -> BarrierRow:
    """Return the row of a wait, by the verdicts on its job."""
    wait = _named_in_time(wait, verdicts)
    here = (wait.job, wait.group, wait.seq)
    about = [one for one in verdicts if (one.job, one.group, one.seq) == here]
    sides = next((one.sides for one in about if wait.peer_call is None and one.sides), ())
    own, others = _apart(wait, sides)
    elsewhere = [rank for side in others for rank in side.ranks]
    waiting, missing = wait.waiting.tolist(), wait.missing.tolist()
    in_call = np.setdiff1d(wait.waiting, elsewhere).tolist()
    places = Counter(_place_of(job, rank) for rank in (in_call or waiting)[:MAX_PLACES_ASKED])
    op, label = (wait.op, wait.label) if own is None or own.op == wait.op else (own.op, own.label)
    return BarrierRow(
        job=clean_name(wait.job),
        attempt=wait.attempt,
        group=clean_name(wait.group),
        seq=wait.seq,
        op=clean_name(op),
        label=clean_name(label),
        waiting=waiting,
        missing=missing,
        is_settled=wait.is_settled,
        waited_s=wait.waited_s,
        where=places.most_common(1)[0][0],
        missing_where=_place_of(job, missing[0]) if missing else "",
        severity=_wait_severity(wait, about),
        text=clean(wait_text(wait, sides if _is_all(wait, sides) else ()), LINE_LIMIT),
        other_calls=[_other_call(side, sides) for side in others],
    )


def _named_in_time(wait: Wait, verdicts: Sequence[Verdict]) -> Wait:
    """Return a wait, in its first second without missing ranks that no verdict names: they are on their way."""
    culprits = [rank for verdict in verdicts for rank in verdict.culprits]
    is_named = np.isin(wait.missing, culprits)
    if wait.waited_s >= LATE_S or is_named.all():
        return wait
    return msgspec.structs.replace(wait, missing=wait.missing[is_named], is_settled=False)


def _apart(wait: Wait, sides: Sequence[Side]) -> tuple[Side | None, list[Side]]:
    """Return the side of a mismatch whose call is that of the wait's row, and the other sides.

    It is the last one of which a rank waits here: the odd sides come first, then the smaller ones. None where sides
    are in different groups, or a rank of one has not come here.
    """
    are_here = all((side.group, side.seq) == (wait.group, wait.seq) and side.op for side in sides)
    ranks = [rank for side in sides for rank in side.ranks]
    here = [side for side in sides if np.isin(wait.waiting, side.ranks).any()]
    if len(sides) < 2 or not are_here or not here or np.isin(wait.missing, ranks).any():
        return None, []
    return here[-1], [side for side in sides if side is not here[-1]]


def _other_call(side: Side, sides: Sequence[Side]) -> OtherCallRow:
    return OtherCallRow(
        ranks=list(side.ranks),
        op=clean_name(side.op),
        label=clean_name(side.label),
        where=place_text(side.place) if side.place is not None else "",
        call=clean(call_text("", None, side.op, side.label) + arguments_text(side, sides), LINE_LIMIT),
    )


def _is_all(wait: Wait, sides: Sequence[Side]) -> bool:
    """Return whether the sides of a mismatch are exactly the waiting ranks."""
    return set(wait.waiting.tolist()) == {rank for side in sides for rank in side.ranks}


def _wait_severity(wait: Wait, about: Sequence[Verdict]) -> Severity:
    late = Severity.WARNING if wait.waited_s >= LATE_WAIT_S else Severity.OK
    return about[0].severity if about else late


def _place_of(job: JobModel, rank: int) -> str:
    return place_text(place_of(job.worker(rank)))
