"""The vocabulary of a job's lifecycle: what happens to it, what is done about it, and which state leads to which.

Events are in the past tense, effects in the imperative; both unions are closed. `TRANSITIONS` holds every (state,
event) that can happen. What a peer asks for (`COMMAND_EVENTS`) can happen in every state: `agent.jobs.job` refuses what
does not fit. What our own shell reports appears only where it can happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

from agent.wire.jobs import JobState
from ddpcore.wire import Rank  # noqa: TC001 - msgspec looks at it

if TYPE_CHECKING:
    from signal import Signals

    from agent.logs.traceback_text import FoundFailure
    from agent.wire.commands import Accepted, Refused
    from ddpcore.wire import Fault, ReportNow, SlowDown, StopTraining, StrikeAt


class Round(msgspec.Struct, frozen=True):
    """torchrun's decision when it has gathered the nodes of an elastic job."""

    number: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    """Number over all nodes, from 1."""
    first_rank: Rank
    """First global rank of this node."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    node_rank: Rank
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)]


class SeenWorker(msgspec.Struct):
    """The process of a rank, once it has been seen in this attempt."""

    has_exited: bool = False
    has_failed: bool = False


class CommitReceived(msgspec.Struct, frozen=True):
    """A console commits the prepared job."""

    late_s: float = 0.0
    """Seconds for which it has been given up."""


class AbortReceived(msgspec.Struct, frozen=True):
    """A console takes the preparation back."""


class StopReceived(msgspec.Struct, frozen=True):
    """A console stops the job in order."""

    is_agreed: bool = False
    """The ranks may finish a step and write a checkpoint, if they can."""
    can_agree: bool = False
    """All ranks of this node run and have reported that they can."""


class KillReceived(msgspec.Struct, frozen=True):
    """A console kills the job."""


class FaultReceived(msgspec.Struct, frozen=True):
    """A console injects a fault into one rank."""

    fault: Fault
    step: int | None = None
    """The last step that the rank has reported."""


class LauncherStarted(msgspec.Struct, frozen=True):
    """The shim runs, and with it the launcher."""

    unprobed: str = ""
    """Reason why no rank will have a probe, empty where they should have one."""


class LauncherNotStarted(msgspec.Struct, frozen=True):
    """The shim could not be started; nothing runs."""

    message: str


class LauncherSucceeded(msgspec.Struct, frozen=True):
    """The launcher ended with exit code 0, and nothing of its tree is left."""


class AttemptFailed(msgspec.Struct, frozen=True):
    """The launcher ended otherwise, and the job may restart."""

    exit_code: int | None
    """Exit code of the launcher, as in `LauncherFailed`."""
    found: FoundFailure | None = None


class LauncherFailed(msgspec.Struct, frozen=True):
    """The launcher ended otherwise, and the job does not restart."""

    exit_code: int | None
    """Negative is a signal; None is unknown, since the shim itself was killed."""
    found: FoundFailure | None = None
    """The first failure in the job's files."""


class LauncherFound(msgspec.Struct, frozen=True):
    """A new agent has found the launcher of an earlier agent's job."""


class ShimKilled(msgspec.Struct, frozen=True):
    """The shim was killed, and the launcher goes on without it."""


class LauncherLost(msgspec.Struct, frozen=True):
    """A new agent has found a job that should run, no launcher, and no record of its end."""

    why: str


class WorkerFound(msgspec.Struct, frozen=True):
    """The process of a rank has been seen."""

    rank: int


class WorkerExited(msgspec.Struct, frozen=True):
    """The process of a rank that was seen has ended."""

    rank: int
    code: int | None
    signal: int | None
    found: FoundFailure | None = None
    """The failure in the rank's files."""


class RoundBegan(msgspec.Struct, frozen=True):
    """The launcher of an elastic job has gathered nodes and is about to start the ranks."""

    round: Round


class Ticked(msgspec.Struct, frozen=True):
    """Time has passed."""

    has_leftovers: bool = False
    """Processes of this node's jobs are being killed and are not gone yet."""
    abandoned_s: float = 0.0
    """Seconds for which this node's ranks have made no progress and nobody watched."""
    undying: str = ""
    """A rank that SIGKILL has not ended, and what the kernel shows of it; empty where none is known."""


Event: TypeAlias = (
    CommitReceived
    | AbortReceived
    | StopReceived
    | KillReceived
    | FaultReceived
    | LauncherStarted
    | LauncherNotStarted
    | LauncherSucceeded
    | AttemptFailed
    | LauncherFailed
    | LauncherFound
    | LauncherLost
    | ShimKilled
    | WorkerFound
    | WorkerExited
    | RoundBegan
    | Ticked
)


class StartLauncher(msgspec.Struct, frozen=True):
    """Spawn the shim with torchrun; the answer is `LauncherStarted` or `LauncherNotStarted`."""


class RestartAttempt(msgspec.Struct, frozen=True):
    """Prepare the job's next attempt and spawn its shim; the answer is as to `StartLauncher`."""

    attempt: int


class TerminateLauncher(msgspec.Struct, frozen=True):
    """Ask the launcher's tree to end: SIGTERM, and SIGCONT for what is frozen."""


class KillTree(msgspec.Struct, frozen=True):
    """Kill every process of the job."""

    spares_writers: bool = False
    """A checkpoint that is being written may be finished."""


class FollowRanks(msgspec.Struct, frozen=True):
    """Look for the processes and files of the ranks, which are new ones."""


class ReleasePort(msgspec.Struct, frozen=True):
    """Close this process's hold on the store's port."""


class ForgetJob(msgspec.Struct, frozen=True):
    """Drop the job and what it has on disk."""


class SignalWorker(msgspec.Struct, frozen=True):
    """Send a signal to the process of a rank."""

    rank: int
    signal: Signals


class AskAll(msgspec.Struct, frozen=True):
    """Send a request to the probes of all ranks of this node."""

    request: StopTraining | ReportNow


class AskProbe(msgspec.Struct, frozen=True):
    """Send a request to the probe of a rank."""

    rank: int
    request: SlowDown | StrikeAt


class Answer(msgspec.Struct, frozen=True):
    """Reply to the command that the event came from."""

    reply: Accepted | Refused


Effect: TypeAlias = (
    StartLauncher
    | RestartAttempt
    | AskAll
    | TerminateLauncher
    | KillTree
    | FollowRanks
    | ReleasePort
    | ForgetJob
    | SignalWorker
    | AskProbe
    | Answer
)

COMMAND_EVENTS = (CommitReceived, AbortReceived, StopReceived, KillReceived, FaultReceived)
"""Events that a peer causes: possible in every state."""

_PREPARED, _RUNNING, _RESTARTING = JobState.PREPARED, JobState.RUNNING, JobState.RESTARTING
_STOPPING, _SUCCEEDED, _FAILED = JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED
_STOPPED, _LOST = JobState.STOPPED, JobState.LOST

TRANSITIONS: dict[tuple[JobState, type[Event]], JobState] = {
    (_PREPARED, CommitReceived): _PREPARED,
    (_PREPARED, AbortReceived): _STOPPED,
    (_PREPARED, StopReceived): _STOPPED,
    (_PREPARED, KillReceived): _STOPPED,
    (_PREPARED, FaultReceived): _PREPARED,
    (_PREPARED, LauncherStarted): _RUNNING,
    (_PREPARED, LauncherNotStarted): _PREPARED,
    (_PREPARED, LauncherFound): _RUNNING,
    (_PREPARED, Ticked): _PREPARED,
    (_RUNNING, CommitReceived): _RUNNING,
    (_RUNNING, AbortReceived): _RUNNING,
    (_RUNNING, StopReceived): _STOPPING,
    (_RUNNING, KillReceived): _STOPPING,
    (_RUNNING, FaultReceived): _RUNNING,
    (_RUNNING, LauncherSucceeded): _SUCCEEDED,
    (_RUNNING, AttemptFailed): _RESTARTING,
    (_RUNNING, LauncherFailed): _FAILED,
    (_RUNNING, LauncherFound): _RUNNING,
    (_RUNNING, LauncherLost): _LOST,
    (_RUNNING, ShimKilled): _RUNNING,
    (_RUNNING, WorkerFound): _RUNNING,
    (_RUNNING, WorkerExited): _RUNNING,
    (_RUNNING, RoundBegan): _RUNNING,
    (_RUNNING, Ticked): _RUNNING,
    (_RESTARTING, CommitReceived): _RESTARTING,
    (_RESTARTING, AbortReceived): _RESTARTING,
    (_RESTARTING, StopReceived): _STOPPED,
    (_RESTARTING, KillReceived): _STOPPED,
    (_RESTARTING, FaultReceived): _RESTARTING,
    (_RESTARTING, LauncherStarted): _RUNNING,
    (_RESTARTING, LauncherNotStarted): _FAILED,
    (_RESTARTING, LauncherFound): _RUNNING,
    (_RESTARTING, WorkerExited): _RESTARTING,
    (_RESTARTING, Ticked): _RESTARTING,
    (_STOPPING, CommitReceived): _STOPPING,
    (_STOPPING, AbortReceived): _STOPPING,
    (_STOPPING, StopReceived): _STOPPING,
    (_STOPPING, KillReceived): _STOPPING,
    (_STOPPING, FaultReceived): _STOPPING,
    (_STOPPING, LauncherSucceeded): _STOPPED,
    (_STOPPING, LauncherFailed): _STOPPED,
    (_STOPPING, LauncherFound): _STOPPING,
    (_STOPPING, LauncherLost): _STOPPED,
    (_STOPPING, ShimKilled): _STOPPING,
    (_STOPPING, WorkerFound): _STOPPING,
    (_STOPPING, WorkerExited): _STOPPING,
    (_STOPPING, RoundBegan): _STOPPING,
    (_STOPPING, Ticked): _STOPPING,
    **{
        (ended, event): ended
        for ended in (_SUCCEEDED, _FAILED, _STOPPED, _LOST)
        for event in (*COMMAND_EVENTS, WorkerExited, Ticked)
    },
}
"""A worker's exit may be noticed after its launcher's."""
