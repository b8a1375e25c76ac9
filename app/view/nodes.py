"""The rows of nodes, and the lines about new nodes and about other jobs of the same nodes.

`new_nodes_text` reports nodes that registered since the start and that this console does not show. `other_job_rows` has
a row for each job that is not shown, `other_jobs_text` one line about all of them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.wire.machine import HostReport
from app.diagnosis.causes import Severity
from app.model.cluster import ended_s
from app.model.job_model import Process
from app.text import LINE_LIMIT, clean, clean_name, finite, nodes_text, ranges_text, ranks_text
from app.view.rows import NodeRow, OtherJobRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from enum import StrEnum

    import numpy as np
    from numpy.typing import NDArray

    from app.diagnosis.diagnoser import Diagnosis, JobDiagnosis
    from app.diagnosis.rank_facts import AllNodes, NodeFacts
    from app.diagnosis.verdicts import Verdict
    from app.model.cluster import Cluster, Node
    from app.model.job_model import JobModel
    from app.model.new_nodes import NewNodes


class Progress(Protocol):
    """The progress of an action on several nodes."""

    @property
    def nodes(self) -> list[str]:
        """Nodes of the action, in their order."""

    @property
    def text(self) -> str:
        """Short line about all nodes."""

    def stage(self, node: str) -> StrEnum:
        """Return the stage of a node, whose value is its text."""


LITTLE_MEMORY_FRAC = 0.05
"""Share of available memory below which a node is about to lose a process."""
STATE_SEVERITY = {
    "connecting": Severity.QUIET,
    "up": Severity.OK,
    "stale": Severity.WARNING,
    "lost": Severity.CRITICAL,
    "down": Severity.QUIET,
}


def node_severity(node: Node, facts: NodeFacts) -> Severity:
    """Return how urgently a node needs attention."""
    severity, report = STATE_SEVERITY[facts.state], node.report
    if severity is not Severity.OK or report is None:
        return severity
    total = report.memory_total_bytes
    is_tight = total and report.memory_available_bytes < LITTLE_MEMORY_FRAC * total
    return Severity.WARNING if is_tight else Severity.OK


def are_well(cluster: Cluster, nodes: AllNodes) -> NDArray[np.bool_]:
    """Return for each node whether `node_severity` is OK."""
    return nodes.is_up & (cluster.available_frac >= LITTLE_MEMORY_FRAC)


@lru_cache(maxsize=4)
def clean_names(names: tuple[str, ...]) -> list[str]:
    """Return the nodes' names, clean; the list is shared and must not be changed."""
    return [clean_name(name) for name in names]


def disbelief_text(names: Sequence[str], job: JobModel | None, node: int) -> str:
    """Return `not believed: ranks 0-1 of job gpt, which it claims, run on h1`; empty of a node that is believed."""
    status = None if job is None else job.refused.get(node)
    if job is None or status is None:
        return ""
    claimed = set(status.ranks) or status.own_ranks
    taken = [rank for rank in range(job.world_size) if rank in claimed and job.node_of[rank] not in {-1, node}]
    if not taken:
        return f"not believed: its part of job {clean_name(job.job_id)} does not fit the others'"
    owners = nodes_text([clean_name(names[owner]) for owner in sorted({int(job.node_of[rank]) for rank in taken})])
    run = "runs" if len(taken) == 1 else "run"
    return f"not believed: {ranks_text(taken)} of job {clean_name(job.job_id)}, which it claims, {run} on {owners}"


def node_row(
    node: Node, facts: NodeFacts, job: JobModel | None, found: JobDiagnosis | None, disbelief: str = ""
) -> NodeRow:
    report = node.report
    ranks = [] if job is None else job.ranks_of(node.index)
    num_running = 0
    if ranks and job is not None and found is not None:
        num_running = int((found.facts.is_alive[ranks] & (job.process[ranks] != Process.UNSEEN)).sum())
    total = report.memory_total_bytes if report is not None else 0
    free = min(report.memory_available_bytes, total) if report is not None else 0
    return NodeRow(
        node=clean_name(node.name),
        hostname="" if report is None else clean_name(report.hostname),
        state=facts.state,
        severity=Severity.WARNING if disbelief and facts.state == "up" else node_severity(node, facts),
        ranks=ranges_text(ranks),
        num_running=num_running,
        num_ranks=len(ranks),
        cpu_frac=None if report is None else finite(report.cpu_frac),
        memory_used_bytes=total - free if total else None,
        memory_total_bytes=total or None,
        agent_rss_bytes=None if report is None else report.agent_rss_bytes or None,
        gpu_watch="" if report is None else report.gpus.state,
        gpu_detail="" if report is None else clean(report.gpus.detail, LINE_LIMIT),
        **msgspec.structs.asdict(HostReport() if report is None else report.host),
        age_s=facts.age_s,
        trouble=disbelief
        if facts.state == "up" or node.unreachable_reason is None
        else clean(node.unreachable_reason.beside_name, LINE_LIMIT),
    )


def reading_text(nodes: Sequence[str], unread: Sequence[str]) -> str:
    """Return `reading what happened before: 1 of 2 done, waiting for h2`, as long as what nodes remember is read."""
    if not unread:
        return "replaying what happened before"
    if len(nodes) == 1:
        return f"reading what happened before on {clean_name(nodes[0])}"
    waiting = nodes_text([clean_name(node) for node in unread])
    return f"reading what happened before: {len(nodes) - len(unread)} of {len(nodes)} done, waiting for {waiting}"


def new_nodes_text(new_nodes: NewNodes) -> str:
    """Return `2 more nodes have come to the relay: leave and come in again`; empty when there is no new node."""
    return f"{_have_come(new_nodes)} the relay: leave and come in again" if new_nodes.nodes else ""


def new_nodes_notice(new_nodes: NewNodes, way_in: str) -> str:
    """Return the same with the nodes' names and the command that opens the console again."""
    named = nodes_text([clean_name(node) for node in new_nodes.nodes])
    where = f"the relay on {clean_name(new_nodes.relay)} ({named})"
    return clean(f"{_have_come(new_nodes)} {where}: leave and come in again to see them, by {way_in}", LINE_LIMIT)


def _have_come(new_nodes: NewNodes) -> str:
    num = len(new_nodes.nodes)
    return "1 more node has come to" if num == 1 else f"{num:,} more nodes have come to"


MAX_JOBS_NAMED = 3
JUST_ENDED_S = 10.0
"""Seconds for which the end of a job that is not shown is news."""
MAX_ENDED_NAMED = 8
_BAD_ENDS = frozenset({"failed", "lost"})
_URGENT = frozenset({Severity.WARNING, Severity.CRITICAL})
_NAMED_ENDS = _BAD_ENDS | {"stopped"}


def job_severity(state: str, verdicts: Sequence[Verdict]) -> Severity:
    """Return how urgently a job needs attention.

    Args:
        state: The value of `JobModel.state`.
        verdicts: The job's verdicts, the worst first.
    """
    if state in _BAD_ENDS:
        return Severity.CRITICAL
    if state == "restarting":
        return Severity.WARNING
    if verdicts:
        return verdicts[0].severity
    return Severity.OK if state in ("running", "succeeded") else Severity.QUIET


def other_job_rows(cluster: Cluster, diagnosis: Diagnosis, shown: JobModel | None) -> list[OtherJobRow]:
    """Return a row for each job but the one shown, the latest start first."""
    others = [job for job in cluster.jobs.values() if job is not shown]
    return [_row(job, diagnosis, shown) for job in sorted(others, key=lambda job: -job.started_s)]


def _row(job: JobModel, diagnosis: Diagnosis, shown: JobModel | None) -> OtherJobRow:
    verdicts = diagnosis.jobs[job.job_id].verdicts if job.job_id in diagnosis.jobs else []
    state, job_id = job.state(), clean_name(job.job_id)
    worst = verdicts[0] if verdicts and verdicts[0].severity is not Severity.QUIET else None
    has_failed_beside = state in _BAD_ENDS and shown is not None and ended_s(job) > shown.started_s
    if worst is None or job.is_ended():
        how = state
    else:
        whose = ranks_text(worst.culprits) if worst.culprits else ""
        how = " ".join(filter(None, (worst.cause.replace("_", " "), whose)))
    return OtherJobRow(
        job_id=job_id,
        attempt=job.attempt,
        state=state,
        severity=job_severity(state, verdicts),
        cause=None if worst is None else worst.cause,
        culprits=[] if worst is None else list(worst.culprits),
        is_concurrent=not job.is_ended() or has_failed_beside,
        text=f"job {job_id}, {how}",
    )


def other_jobs_text(others: Sequence[OtherJobRow], shown: str, attach: str) -> str:
    """Return the line about other jobs: their states, and the command, if any, that shows one of them.

    Empty when no other job runs or ran beside the one shown.
    """
    beside = _beside(others)
    if not beside:
        return ""
    named = [row.text for row in beside[:MAX_JOBS_NAMED]]
    if len(beside) > MAX_JOBS_NAMED:
        named.append(f"{len(beside) - MAX_JOBS_NAMED} more")
    also = f"job {shown} is shown; also on these nodes" if shown else "on these nodes"
    parts = filter(None, ("; ".join(named), _command(beside, attach)))
    return clean(f"{also}: {'; '.join(parts)}", LINE_LIMIT)


def ended_jobs_text(ended: Iterable[tuple[str, str]], attach: str, verb: str = "status") -> str:
    """Return `ended: boom (failed), gpt; rankdeck status JOB`; empty without any.

    Args:
        ended: Id, clean, and state of each, as they are to be named; the state where the job has not ended well.
        attach: As of a view.
        verb: What shows one of them.
    """
    jobs = list(ended)
    if not jobs:
        return ""
    named = [f"{job_id} ({state})" if state in _NAMED_ENDS else job_id for job_id, state in jobs]
    more = f" and {len(named) - MAX_ENDED_NAMED} more" if len(named) > MAX_ENDED_NAMED else ""
    which = jobs[0][0] if len(jobs) == 1 else "JOB"
    command = attach.replace("attach JOB", f"{verb} {which}", 1)
    return "; ".join(filter(None, (f"ended: {', '.join(named[:MAX_ENDED_NAMED])}{more}", command)))


def beside_sentences(others: Sequence[OtherJobRow], shown: str, attach: str) -> dict[str, OtherJobRow]:
    """Return `job b, frozen rank 2, beside job a; rankdeck attach b` of each job, those that are not well first."""
    where = f", beside job {shown}" if shown else ""
    urgent_first = sorted(others, key=lambda row: row.severity not in _URGENT)[:MAX_JOBS_NAMED]
    found = {"; ".join(filter(None, (f"{row.text}{where}", _command([row], attach)))): row for row in urgent_first}
    return {clean(sentence, LINE_LIMIT): row for sentence, row in found.items()}


def short_other_jobs_texts(others: Sequence[OtherJobRow], attach: str) -> list[str]:
    """Return shorter lines about other jobs, the longest first.

    All keep the whole command; beside a job that is not well, the shortest keep what it suffers from instead.
    """
    beside = _beside(others)
    command = _command(beside, attach)
    if not beside or not command:
        return []
    more = f"; {len(beside) - 1} more" if len(beside) > 1 else ""
    lines = [f"{beside[0].text}{more}; {command}"]
    if beside[0].severity in _URGENT:
        lines += [f"{beside[0].text}{more}", *[beside[0].text] * bool(more)]
    else:
        named = f"job {beside[0].job_id}" if len(beside) == 1 else f"{len(beside)} jobs"
        lines = [*lines[: len(beside) == 1], f"{named}: {command}", command]
    return [clean(line, LINE_LIMIT) for line in lines]


def _beside(others: Sequence[OtherJobRow]) -> list[OtherJobRow]:
    """Return the jobs that run beside the one shown, those that are not well first."""
    return sorted((row for row in others if row.is_concurrent), key=lambda row: row.severity not in _URGENT)


def _command(beside: Sequence[OtherJobRow], attach: str) -> str:
    return attach.replace("JOB", beside[0].job_id) if len(beside) == 1 else attach
