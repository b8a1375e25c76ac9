"""Node reports by hand: a healthy cluster of ranks in a few words, each field to be overridden."""

from __future__ import annotations

from typing import Any

from agent.wire.jobs import JobState, JobStatus
from agent.wire.reports import WIRE_VERSION, ExitReport, NodeReport, ProcessState, WorkerReport
from ddpcore.wire import DEFAULT_GROUP, GroupReport, Phase, Place, RankReport

PLACE = Place("/home/user/train.py", 42, "train_step")


def group_report(seq: int = 5, waiting_s: float | None = None, **fields: Any) -> GroupReport:
    """Return a group at `seq`, waited in for `waiting_s` (None: completed)."""
    is_waiting = waiting_s is not None
    facts: dict[str, Any] = {
        "group": DEFAULT_GROUP,
        "enqueued_seq": seq,
        "completed_seq": seq - 1 if is_waiting else seq,
        "op": "all_reduce",
        "waiting_s": waiting_s or 0.0,
        "is_waiting": is_waiting,
    }
    return GroupReport(**(facts | fields))


def rank_report(rank: int, world_size: int = 4, **fields: Any) -> RankReport:
    """Return a rank in its forward, in no group unless told."""
    facts: dict[str, Any] = {
        "wire_version": 1,
        "rank": rank,
        "local_rank": rank % 2,
        "world_size": world_size,
        "pid": 4000 + rank,
        "job_id": "job",
        "attempt": 0,
        "report_seq": 1,
        "phase": Phase.FORWARD,
        "place": PLACE,
    }
    return RankReport(**(facts | fields))


def worker_report(rank: int, report: RankReport | None = None, **fields: Any) -> WorkerReport:
    """Return a running worker."""
    facts: dict[str, Any] = {
        "job_id": "job",
        "attempt": 0,
        "rank": rank,
        "local_rank": rank % 2,
        "pid": 4000 + rank,
        "process": ProcessState.RUNNING,
        "rss_bytes": 2**28,
        "report": report,
    }
    return WorkerReport(**(facts | fields))


def dead_worker(rank: int, report: RankReport | None = None, job_id: str = "job", **end: Any) -> WorkerReport:
    """Return a worker that has ended."""
    exit_report = ExitReport(**end)
    return worker_report(rank, report, process=ProcessState.EXITED, rss_bytes=0, exit=exit_report, job_id=job_id)


def job_status(first_rank: int = 0, **fields: Any) -> JobStatus:
    """Return a running job of 4 ranks on 2 nodes, this node's share 2 of them."""
    facts: dict[str, Any] = {
        "job_id": "job",
        "attempt": 0,
        "state": JobState.RUNNING,
        "state_s": 1.0,
        "world_size": 4,
        "num_nodes": 2,
        "node_rank": first_rank // 2,
        "first_rank": first_rank,
        "local_world_size": 2,
    }
    return JobStatus(**(facts | fields))


def node_report(seq: int, jobs: list[JobStatus], workers: list[WorkerReport], **fields: Any) -> NodeReport:
    """Return a node."""
    facts: dict[str, Any] = {
        "wire_version": WIRE_VERSION,
        "node": "whatever it says",
        "epoch": "e",
        "report_seq": seq,
        "hostname": "host",
        "agent_pid": 9,
        "num_cpus": 4,
        "jobs": jobs,
        "workers": workers,
    }
    return NodeReport(**(facts | fields))
