"""A job on one host: what a person asks for, as the share of the only node."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from agent.wire.jobs import ENDED_STATES, MAX_PATTERN_CHARS, MAX_PATTERNS, JobSpec
from app.errors import UsageError
from app.safe_text import clean_name

if TYPE_CHECKING:
    from agent.wire.reports import NodeReport
    from app.ssh.agent_link import AgentPlace

LOOPBACK = "127.0.0.1"
_NOT_IN_IDS = re.compile(r"[^a-z0-9]+")
_JOB_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
MAX_STEM_CHARS = 40


class RunRequest(msgspec.Struct, frozen=True):
    """What is to run."""

    command: tuple[str, ...]
    """`train.py ...` or `-m pkg.train ...`, as after torchrun's own options."""
    job_id: str
    num_ranks: int | None = None
    """None: one for each GPU of the node, without GPUs one for every two cores."""
    python: str = ""
    """Of the job; empty is the agent's own. May begin with `~/`."""
    workdir: str = "~"
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


def check_job_id(job_id: str) -> str:
    """Return a job's id.

    Raises:
        UsageError: It cannot be one.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} cannot be a job's name", "up to 64 of a-z, 0-9 and -, not beginning with -")
    return job_id


def check_metrics(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Return patterns for figures in lines; whether they are sound is the agent's to say.

    Raises:
        UsageError: They are too many or too long.
    """
    if len(patterns) > MAX_PATTERNS or any(not 0 < len(text) <= MAX_PATTERN_CHARS for text in patterns):
        raise UsageError(f"at most {MAX_PATTERNS} patterns of at most {MAX_PATTERN_CHARS} characters are taken")
    return patterns


def make_job_id(command: tuple[str, ...], salt: str) -> str:
    """Return an id that says what runs: `train-3f2a`."""
    is_module = len(command) > 1 and command[0] == "-m"
    name = command[1].rpartition(".")[2] if is_module else command[0].rpartition("/")[2].removesuffix(".py")
    stem = _NOT_IN_IDS.sub("-", name.lower()).strip("-")[:MAX_STEM_CHARS].strip("-")
    return f"{stem or 'job'}-{salt}"


def only_running_job(report: NodeReport) -> str:
    """Return the id of the job that runs on a node.

    Raises:
        UsageError: None does, or several do.
    """
    running = [clean_name(job.job_id) for job in report.jobs if job.state not in ENDED_STATES]
    if len(running) == 1:
        return running[0]
    if not running:
        raise UsageError(f"no job runs on {clean_name(report.node)}")
    raise UsageError(f"several jobs run on {clean_name(report.node)}: {', '.join(running)}", "say which by --job")


def usual_num_ranks(report: NodeReport) -> int:
    """Return how many ranks a node runs unless a person says otherwise."""
    return len(report.gpus.gpus) or max(1, report.num_cpus // 2)


def job_spec(request: RunRequest, place: AgentPlace, report: NodeReport) -> JobSpec:
    """Return the whole job: its ranks meet on the host's loopback, where nobody else can reach them.

    Args:
        request: What is to run.
        place: Where the agent serves.
        report: Of the node, after the first look at its GPUs.
    """
    python = _expanded(request.python, place.home)
    if "/" in python:
        python = str(PurePosixPath(place.home, python))
    num_ranks = request.num_ranks or usual_num_ranks(report)
    return JobSpec(
        job_id=request.job_id,
        attempt=0,
        python=python or place.python,
        command=list(request.command),
        workdir=str(PurePosixPath(place.home, _expanded(request.workdir, place.home))),
        num_nodes=1,
        node_rank=0,
        local_world_size=num_ranks,
        first_rank=0,
        world_size=num_ranks,
        master_addr=LOOPBACK,
        interface="lo",
        max_restarts=request.max_restarts,
        abandon_s=request.abandon_s,
        shares_gpus=request.shares_gpus,
        metrics=list(request.metrics),
        is_probed=request.is_probed,
        allow_faults=request.allow_faults,
    )


def _expanded(path: str, home: str) -> str:
    """Return a path of the host with `~` for what it stands for there."""
    return home + path[1:] if path == "~" or path.startswith("~/") else path
