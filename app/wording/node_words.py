"""The row of a node."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from agent.wire.machine import HostReport
from app.model.job_model import Process
from app.rows import NodeRow, Severity
from app.safe_text import LINE_LIMIT, clean, clean_name
from app.words import finite, ranges_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from app.diagnosis.diagnoser import JobDiagnosis
    from app.diagnosis.node_facts import AllNodes, NodeFacts
    from app.model.cluster import Cluster, Node
    from app.model.job_model import JobModel

LITTLE_MEMORY_FRAC = 0.05
"""A node with less memory available than this is about to lose a process."""
STATE_SEVERITY = {
    "connecting": Severity.QUIET,
    "up": Severity.OK,
    "stale": Severity.WARNING,
    "lost": Severity.CRITICAL,
}


def node_severity(node: Node, facts: NodeFacts) -> Severity:
    """Return how much a node wants to be looked at."""
    severity, report = STATE_SEVERITY[facts.state], node.report
    if severity is not Severity.OK or report is None:
        return severity
    total = report.memory_total_bytes
    is_tight = total and report.memory_available_bytes < LITTLE_MEMORY_FRAC * total
    return Severity.WARNING if is_tight else Severity.OK


def are_well(cluster: Cluster, nodes: AllNodes) -> NDArray[np.bool_]:
    """Return of which nodes `node_severity` is OK."""
    return nodes.is_up & (cluster.available_frac >= LITTLE_MEMORY_FRAC)


@lru_cache(maxsize=4)
def clean_names(names: tuple[str, ...]) -> list[str]:
    """Return the nodes' names, clean; the list is shared, and not to be changed."""
    return [clean_name(name) for name in names]


def node_row(node: Node, facts: NodeFacts, job: JobModel | None, found: JobDiagnosis | None) -> NodeRow:
    """Return the row of a node, with its share of a job."""
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
        severity=node_severity(node, facts),
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
        trouble="" if facts.state == "up" or node.absence is None else clean(node.absence.beside_name, LINE_LIMIT),
    )
