"""A job on hosts: what a person asks for, as the share of each node. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.jobs import ENDED_STATES, MAX_PATTERN_CHARS, MAX_PATTERNS, JobSpec, JobState
from app.errors import UsageError
from app.safe_text import clean_name
from app.settings.nearness import nearest_text
from app.ssh.config import LOOPBACK
from app.words import nodes_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agent.wire.jobs import JobStatus
    from agent.wire.reports import NodeReport
    from app.inventory.inventory import HostEntry
    from app.ssh.agent_link import AgentPlace


class RunRequest(msgspec.Struct, frozen=True):
    """What is to run."""

    command: tuple[str, ...]
    """`train.py ...` or `-m pkg.train ...`, as after torchrun's own options."""
    job_id: str
    num_ranks: int | None = None
    """Of each node. None is what the inventory says, else one for each GPU, without GPUs one for every two cores."""
    python: str = ""
    """Of the job; empty is the agent's own. May begin with `~/`."""
    workdir: str = ""
    """Empty is what the inventory says, else the home."""
    master_addr: str = ""
    """Under which the other hosts reach the first one; empty tries those that it has."""
    max_restarts: int = 0
    abandon_s: float = 0.0
    """How long ranks may hang while nobody watches; 0 is for ever."""
    shares_gpus: bool = False
    """More ranks than GPUs are meant so."""
    metrics: tuple[str, ...] = ()
    """Patterns that find figures in what the ranks print."""
    is_probed: bool = True
    allow_faults: bool = False
    """Harm may be done to its ranks on request."""
    env: tuple[tuple[str, str], ...] = ()
    """Added to what the agents have."""
    grace_s: float | None = None
    """Between SIGTERM and SIGKILL; None is the usual time, and so below."""
    save_s: float | None = None
    """For a step and a checkpoint before SIGTERM."""


def check_metrics(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns for figures in lines; whether they are sound is the agent's to say.

    Raises:
        UsageError: They are too many or too long.
    """
    if len(patterns) > MAX_PATTERNS or any(not 0 < len(text) <= MAX_PATTERN_CHARS for text in patterns):
        raise UsageError(f"at most {MAX_PATTERNS} patterns of at most {MAX_PATTERN_CHARS} characters are taken")
    return patterns


def unknown_job_text(job_id: str, known: Sequence[str], asked: Sequence[str], away: Sequence[str] = ()) -> str:
    """Return that no node knows a job, which ones they know, and which of those was perhaps meant."""
    there = f"those there: {', '.join(known)}" if known else "none is there"
    unasked = f"; {nodes_text(away)} cannot be asked" if away else ""
    return f"there is no job {job_id} on {nodes_text(asked)}; {there}{nearest_text(job_id, known)}{unasked}"


def running_jobs(reports: Mapping[str, NodeReport]) -> list[str]:
    """Return the ids of the jobs that run on any of some nodes, each once."""
    jobs = (job for report in reports.values() for job in report.jobs)
    return list(dict.fromkeys(clean_name(job.job_id) for job in jobs if job.state not in ENDED_STATES))


def only_running_job(reports: Mapping[str, NodeReport]) -> str:
    """Return the id of the job that runs on some nodes.

    Raises:
        UsageError: None does, or several do.
    """
    jobs = (job for report in reports.values() for job in report.jobs)
    begun = {clean_name(job.job_id) for job in jobs if job.state is not JobState.PREPARED}
    running, where = [job_id for job_id in running_jobs(reports) if job_id in begun], nodes_text(list(reports))
    if len(running) == 1:
        return running[0]
    if not running:
        raise UsageError(f"no job runs on {where}")
    raise UsageError(f"several jobs run on {where}: {', '.join(running)}", "say which by --job")


def node_of_rank(statuses: Mapping[str, JobStatus], rank: int) -> str:
    """Return the node on which a rank of a job runs.

    Raises:
        UsageError: None of them has it.
    """
    for node, status in statuses.items():
        if status.first_rank <= rank < status.first_rank + status.local_world_size:
            return node
    raise UsageError(f"no node has rank {rank}", f"it would be on {nodes_text(list(statuses))}")


def usual_num_ranks(report: NodeReport) -> int:
    """Return how many ranks a node runs unless a person says otherwise."""
    return len(report.gpus.gpus) or max(1, report.num_cpus // 2)


class JobHost(NamedTuple):
    """A host that takes part in a job.

    Attributes:
        entry: What the inventory says of it.
        place: Where its agent serves.
        report: Of its agent, after the first look at its GPUs.
    """

    entry: HostEntry
    place: AgentPlace
    report: NodeReport


def next_number(job_id: str, reports: Iterable[NodeReport]) -> int:
    """Return which attempt of a job a new start of it is: above all that its nodes know of."""
    attempts = (job.attempt for report in reports for job in report.jobs if job.job_id == job_id)
    return 1 + max(attempts, default=-1)


def job_specs(request: RunRequest, hosts: Sequence[JobHost], master_addr: str = "") -> dict[str, JobSpec]:
    """Return each node's share of a job, the first one's first.

    Args:
        request: What is to run.
        hosts: Where, in the order in which they get their ranks.
        master_addr: Of the first one. The ranks of a single host meet on its loopback, where nobody else can reach
            them, whatever this is.
    """
    patience = {name: value for name in ("grace_s", "save_s") if (value := getattr(request, name)) is not None}
    attempt = next_number(request.job_id, (host.report for host in hosts))
    shares = [request.num_ranks or host.entry.num_ranks or usual_num_ranks(host.report) for host in hosts]
    return {
        host.entry.host: JobSpec(
            job_id=request.job_id,
            attempt=attempt,
            python=_python(request.python, host.place),
            command=list(request.command),
            workdir=_workdir(request.workdir or host.entry.workdir, host.place.home),
            num_nodes=len(hosts),
            node_rank=node_rank,
            local_world_size=shares[node_rank],
            first_rank=sum(shares[:node_rank]),
            world_size=sum(shares),
            master_addr=LOOPBACK if len(hosts) == 1 else master_addr,
            max_restarts=request.max_restarts,
            abandon_s=request.abandon_s,
            shares_gpus=request.shares_gpus,
            metrics=list(request.metrics),
            is_probed=request.is_probed,
            allow_faults=request.allow_faults,
            env=dict(request.env),
            **patience,
        )
        for node_rank, host in enumerate(hosts)
    }


def _python(python: str, place: AgentPlace) -> str:
    expanded = _expanded(python, place.home)
    if "/" in expanded:
        return str(PurePosixPath(place.home, expanded))
    return expanded or place.python


def _workdir(workdir: str, home: str) -> str:
    return str(PurePosixPath(home, _expanded(workdir or "~", home)))


def _expanded(path: str, home: str) -> str:
    """Return a path of the host with `~` for what it stands for there."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path
