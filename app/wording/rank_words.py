"""One rank as a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from agent.wire.progress import epoch_of, loss_of, step_of
from agent.wire.reports import ProcessState
from app.diagnosis.rank_facts import STATES
from app.model.outside import outside_text
from app.rows import RankRow, RankState, Severity
from app.safe_text import clean, clean_name
from app.wording.gpu_words import held_by
from app.words import call_text, place_text, seconds_text, signal_text
from ddpcore.wire import DEFAULT_GROUP

if TYPE_CHECKING:
    from agent.wire.reports import ExitReport, WorkerReport
    from app.diagnosis.diagnoser import JobDiagnosis
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel
    from ddpcore.wire import GroupReport, RankReport

LATE_MISSING_S = 1.0
"""A rank that has kept others waiting for less is just on its way."""

STATE_SEVERITY = {
    RankState.STARTING: Severity.QUIET,
    RankState.UNPROBED: Severity.OK,
    RankState.RUNNING: Severity.OK,
    RankState.WAITING: Severity.OK,
    RankState.MISSING: Severity.OK,
    RankState.FROZEN: Severity.CRITICAL,
    RankState.SILENT: Severity.WARNING,
    RankState.EXITED: Severity.WARNING,
    RankState.DONE: Severity.QUIET,
    RankState.STOPPED: Severity.QUIET,
    RankState.LOST: Severity.CRITICAL,
}


def rank_row(cluster: Cluster, job: JobModel, found: JobDiagnosis, rank: int, now_s: float) -> RankRow:
    """Return the row of one rank."""
    state = STATES[found.states[rank]]
    if state is RankState.STARTING and job.is_unprobed[rank]:
        state = RankState.UNPROBED
    worker = job.worker(rank)
    report = None if worker is None else worker.report
    group = None if report is None else told_group(report)
    owner = int(job.node_of[rank])
    is_waiting = state is RankState.WAITING and group is not None and group.is_waiting
    since_report_s = now_s - float(job.report_at_s[rank])
    wait_frac = float(found.wait_frac[rank])
    is_dead = worker is None or worker.exit is not None
    held = held_by(cluster, job, rank)
    return RankRow(
        rank=rank,
        node=clean_name(_node_name(cluster, job, owner)),
        local_rank=None if worker is None else worker.local_rank,
        pid=None if worker is None else worker.pid or None,
        state=state,
        severity=_severity(found, rank, state),
        step=None if worker is None else step_of(worker),
        epoch=None if worker is None else epoch_of(worker),
        loss=None if worker is None else loss_of(worker),
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
        where="" if report is None else place_text(report.place),
        detail=_detail(job, worker, report, state),
    )


def _node_name(cluster: Cluster, job: JobModel, owner: int) -> str:
    """Return the node of a rank, also one that has not been reached, where only one can be it."""
    if owner >= 0:
        return cluster.node_names[owner]
    others = [node.name for node in cluster.nodes.values() if node.index not in job.shares and node.report is None]
    return others[0] if len(others) == 1 and job.num_nodes == len(job.shares) + 1 else ""


def rank_call(row: RankRow) -> str:
    """Return the last collective of a rank in words, with its seq only while the rank waits in it.

    The seq of a rank that moves is up to seconds old: beside the seq that others wait in it would read as a lag.
    """
    seq = row.seq if row.waiting_s is not None else None
    return call_text(row.group, seq, row.op, row.label) if row.op else ""


def rank_text(row: RankRow) -> str:
    """Return a rank in one line: what is searched for words, and what is copied."""
    waiting = "" if row.waiting_s is None else f"waiting for {seconds_text(row.waiting_s)}"
    step = "" if row.step is None else f"step {row.step}"
    call = rank_call(row)
    told = (f"rank {row.rank}", row.node, row.state, step, row.phase, call, waiting, row.where, row.detail)
    return "  ".join(filter(None, told))


def told_group(report: RankReport) -> GroupReport | None:
    """Return the group that tells most about a rank: the one it has waited in longest, else the one of all ranks."""
    waiting = [group for group in report.groups if group.is_waiting]
    if waiting:
        return max(waiting, key=lambda group: group.waiting_s)
    return min(report.groups, key=lambda group: group.group != DEFAULT_GROUP, default=None)


def exit_text(exit_report: ExitReport) -> str:
    """Return `killed by SIGKILL`, `exited with code 1: ValueError: boom` or `finished`."""
    if exit_report.signal is not None:
        return f"killed by {signal_text(exit_report.signal)}"
    if exit_report.code is None:
        return "ended, it is not known how"
    if exit_report.code == 0:
        return "finished"
    last = f"; its last line: {exit_report.last_line}" if exit_report.last_line else ""
    return f"exited with code {exit_report.code}" + (f": {exit_report.error}" if exit_report.error else last)


def _over_text(job: JobModel, rank: int) -> str:
    """Return why a node has lost its part of the job, as the end of a sentence."""
    detail = job.shares[int(job.node_of[rank])].status.detail
    return f": {detail}" if detail else ""


def _severity(found: JobDiagnosis, rank: int, state: RankState) -> Severity:
    blamed = [verdict.severity for verdict in found.verdicts if rank in verdict.culprits]
    if blamed:
        return blamed[0]
    if state is RankState.MISSING and any(
        wait.waited_s >= LATE_MISSING_S and rank in wait.missing for wait in found.waits
    ):
        return Severity.WARNING
    return STATE_SEVERITY[state]


def _detail(job: JobModel, worker: WorkerReport | None, report: RankReport | None, state: RankState) -> str:
    if worker is None:
        return "not known" if state is RankState.LOST else "not started"
    if state is RankState.LOST and job.is_over_on(int(job.node_of[worker.rank])):
        return clean(f"how it ended is not known{_over_text(job, worker.rank)}")
    if worker.exit is not None:
        death = job.deaths.get(worker.rank)
        asked = " on request" if death is not None and death.at_s >= job.stop_began_s else ""
        return clean(exit_text(worker.exit) + asked)
    parts = []
    if state is RankState.FROZEN:
        parts.append(f"frozen for {seconds_text(worker.process_s)}")
    if worker.process is ProcessState.BLOCKED:
        parts.append("in uninterruptible sleep")
    if report is None:
        parts.append(outside_text(worker) if job.is_unprobed[worker.rank] else "importing torch")
    parts += job.oddities.of_rank(worker.rank)
    if report is not None and report.slow_factor > 1:
        parts.append(f"slowed {report.slow_factor:g}x on request")
    return clean("; ".join(parts))
