"""A job's share on one node: what it is made of, and where it stands."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec

from agent.wire.codec import JobId, LongText, Port
from agent.wire.logs import RootCause
from ddpcore.wire import Count, Fault, FilePath, Name, Rank, Seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_PATTERNS = 8
MAX_PATTERN_CHARS = 512

Pattern = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN_CHARS)]


class JobState(StrEnum):
    """State of a job on this node."""

    PREPARED = "prepared"
    """Checked and reserved; nothing runs."""
    RUNNING = "running"
    """The launcher runs."""
    RESTARTING = "restarting"
    """An attempt has failed, nothing runs, and the next one starts after a pause."""
    STOPPING = "stopping"
    """The job was stopped or killed, and its processes are ending."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The last attempt failed."""
    STOPPED = "stopped"
    """The job ended because it was stopped."""
    LOST = "lost"
    """Nothing runs any more, and its end is unknown: the node was rebooted, or everything was killed at one time."""


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.LOST})


MAX_LOCAL_WORLD_SIZE = 4096
"""Ranks of one job on one node."""
MAX_RESTARTS = 1000
GRACE_S = 10.0
"""Default of `JobSpec.grace_s`."""

LocalWorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_LOCAL_WORLD_SIZE)]


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A job on this node."""

    job_id: Name
    attempt: Count
    state: JobState
    state_s: Seconds
    """Seconds for which the job has been in this state."""
    world_size: Count
    num_nodes: Count
    node_rank: Rank
    first_rank: Rank
    """Global rank of this node's local rank 0."""
    local_world_size: Count
    exit_code: int | None = None
    """The launcher's exit code, once it has ended; negative is a signal."""
    num_restarts: Count = 0
    """Number of restarts of the job by its node."""
    max_restarts: Count = 0
    allow_faults: bool = False
    """True if a console may inject faults into its ranks."""
    is_elastic: bool = False
    """True if torchrun gathers the nodes again when one fails."""
    detail: LongText = ""
    """Sentence about the job, empty when all is well."""
    unprobed: LongText = ""
    """Reason why no rank here has a probe, empty where they should: then only processes and output are known."""
    root_cause: RootCause | None = None
    """Cause of the failure, once a rank of this node has failed, until the job restarts."""
    age_s: Seconds | None = None
    """Seconds since this node started the attempt; None before that, and where the clock has restarted since."""
    is_past: bool = False
    """True if it had ended before this agent started."""
    stop_s: Seconds | None = None
    """Seconds since its stop began; None of a job that was not stopped."""
    ranks: list[Rank] = []
    """Global ranks on this node of a job that no agent has launched, in order, as far as they have reported."""

    @property
    def is_adopted(self) -> bool:
        """True of a job that no agent has launched: it can be stopped and killed, not restarted."""
        return bool(self.ranks)

    @property
    def own_ranks(self) -> Sequence[int]:
        """Global ranks on this node, in order, each once."""
        return sorted(set(self.ranks)) or range(self.first_rank, self.first_rank + self.local_world_size)


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Part of a job on this node."""

    job_id: JobId
    attempt: Count
    python: FilePath
    """Interpreter of torchrun and the ranks."""
    command: Annotated[list[LongText], msgspec.Meta(min_length=1)]
    """`["train.py", ...]` or `["-m", "pkg.train", ...]`, passed byte for byte."""
    workdir: FilePath
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    node_rank: Rank
    local_world_size: LocalWorldSize
    first_rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    master_addr: Name
    master_port: Port = 0
    """Port of the store; 0 on node 0: the agent binds a free one and returns it in its reply to `Prepare`."""
    interface: Name = ""
    """Network interface for gloo and NCCL; empty is the one on the route to the first node."""
    env: dict[str, str] = {}
    """Variables added to the agent's own environment."""
    allow_faults: bool = False
    """True if its ranks may be harmed, by `faults` or by a console."""
    faults: list[Fault] = []
    """Faults that strike at their steps, in the first attempt."""
    save_s: Seconds = 120.0
    """Seconds that an agreed stop may take for a step and a checkpoint before SIGTERM."""
    grace_s: Seconds = GRACE_S
    """Seconds between SIGTERM and SIGKILL when the job is stopped."""
    metrics: Annotated[list[Pattern], msgspec.Meta(max_length=MAX_PATTERNS)] = []
    """Patterns (RE2's syntax) that find figures in what the ranks print. A named group is the metric of that name; a
    pattern's only group without a name is the loss. The latest value counts."""
    is_probed: bool = True
    """False leaves the ranks without a probe: they are watched from outside, by their processes and their output."""
    shares_gpus: bool = False
    """True if more ranks than GPUs are intended."""
    max_restarts: Annotated[int, msgspec.Meta(ge=0, le=MAX_RESTARTS)] = 0
    """Number of times that the node restarts a failed job; over several nodes the console does that or, in an elastic
    job, torchrun."""
    elastic_min_nodes: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0
    """Least number of nodes of an elastic job: torchrun gathers at most `num_nodes`, numbers the ranks itself, and
    gathers the nodes again when one fails. Its state is pickle on an open port: only for networks of which every
    machine is trusted. 0 is a job of exactly `num_nodes` nodes, whose ranks are as above."""
    abandon_s: Seconds = 0.0
    """Seconds for which the ranks of this node may make no progress, with nobody watching, before the node ends them; 0
    is without limit."""
