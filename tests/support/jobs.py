"""Job specs for tests of the agent."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from agent.logs.traceback_text import FailureText, FoundFailure
from agent.wire.jobs import JobSpec

if TYPE_CHECKING:
    from pathlib import Path

_SPEC = JobSpec(
    job_id="train",
    attempt=0,
    python=sys.executable,
    command=["train.py"],
    workdir="/",
    num_nodes=2,
    node_rank=1,
    local_world_size=2,
    first_rank=2,
    world_size=4,
    master_addr="127.0.0.1",
    master_port=29500,
    grace_s=10.0,
    allow_faults=True,
)


def make_spec(**changes: Any) -> JobSpec:
    """Return the second node's share of a job of two nodes with two ranks each, with some fields changed."""
    return msgspec.structs.replace(_SPEC, **changes)


def make_local_spec(workdir: Path, num_ranks: int = 2, **changes: Any) -> JobSpec:
    """Return a job of one node whose ranks meet on loopback at a free port, with some fields changed."""
    shape = {
        "workdir": str(workdir),
        "num_nodes": 1,
        "node_rank": 0,
        "first_rank": 0,
        "local_world_size": num_ranks,
        "world_size": num_ranks,
        "master_port": 0,
        "interface": "lo",
        "grace_s": 5.0,
    }
    return make_spec(**{**shape, **changes})


def left(exception: str, *, rank: int = -1, failed_s: float | None = None) -> FoundFailure:
    """Return what is found in the files of a rank that an exception has ended."""
    text = FailureText(exception, "", "train.py:3 in main", f"Traceback (most recent call last):\n{exception}")
    return FoundFailure(text, rank, failed_s)
