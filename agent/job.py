"""A job's lifecycle on this node: events in, effects out.

The words and the transition table are in `agent.lifecycle`. An event that is not in the table is a defect of our own
shell and raises `InvalidTransitionError` with the job's last events; what a peer asks for is refused by a value.

Stopping begins with a request to the ranks, if all of them can end at a step that they agree on (`ddpcore.Engine`):
they have `save_s` for that step and a checkpoint. Then, and for every other program at once, it is SIGTERM for the
launcher, `grace_s` of patience, and the whole tree is killed. A launcher that lingers after a rank has failed gets the
same patience: torchrun waits up to 30 s for a survivor that does not react to its SIGTERM (a frozen one), and up to 300
s for other nodes.
"""

from __future__ import annotations

from collections import deque
from signal import Signals
from typing import assert_never

import msgspec

from agent.errors import InvalidTransitionError
from agent.lifecycle import (
    TRANSITIONS,
    AbortReceived,
    Answer,
    AskToStop,
    CommitReceived,
    Effect,
    Event,
    FaultReceived,
    ForgetJob,
    KillReceived,
    KillTree,
    LauncherFailed,
    LauncherNotStarted,
    LauncherStarted,
    LauncherSucceeded,
    ReleasePort,
    SignalWorker,
    SlowWorker,
    StartLauncher,
    StopReceived,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.wire import ENDED_STATES, Accepted, JobSpec, JobState, JobStatus, RefusalReason, Refused
from ddpcore.wire import FaultKind

STORY_LENGTH = 32

LAUNCHER_END_S = 3.0
"""The least time a launcher gets to end by itself after a rank has failed. Source: torchrun takes about 2 s."""
KILL_AGAIN_S = 5.0
"""A tree that still lives this long after it was killed is killed again."""


class _Worker(msgspec.Struct):
    """What the lifecycle needs to know of a rank's process."""

    has_exited: bool = False
    has_failed: bool = False


class Job:
    """One job on this node, from `Prepare` to its end."""

    def __init__(self, spec: JobSpec, now_s: float) -> None:
        self.spec = spec
        self.state = JobState.PREPARED
        self.exit_code: int | None = None
        """Of the launcher, once it has ended."""
        self._since_s = now_s
        self._cause = ""
        """The first thing that went wrong, as a sentence."""
        self._kill_at_s: float | None = None
        """When patience ends: set while stopping, and after a rank has failed."""
        self._terminate_at_s: float | None = None
        """When patience with an agreed stop ends: set while there is one."""
        self._workers: dict[int, _Worker] = {}
        self._last_request_id = 0
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event and return what is to be done, in order.

        Raises:
            InvalidTransitionError: Our own shell reports what cannot be.
        """
        self._story.append(f"{now_s:.3f} {self.state} {event}")
        after = TRANSITIONS.get((self.state, type(event)))
        if after is None:
            raise InvalidTransitionError(
                f"job {self.spec.job_id} is {self.state}: {type(event).__name__} cannot happen", self._story
            )
        before = self.state
        if after is not before:
            self.state, self._since_s = after, now_s
        return self._effects(before, event, now_s)

    def status(self, now_s: float) -> JobStatus:
        """Return the job as a console sees it."""
        spec = self.spec
        return JobStatus(
            job_id=spec.job_id,
            attempt=spec.attempt,
            state=self.state,
            state_s=max(0.0, now_s - self._since_s),
            world_size=spec.world_size,
            num_nodes=spec.num_nodes,
            node_rank=spec.node_rank,
            first_rank=spec.first_rank,
            local_world_size=spec.local_world_size,
            exit_code=self.exit_code,
            detail=self._detail(now_s)[:4096],
        )

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        return range(self.spec.first_rank, self.spec.first_rank + self.spec.local_world_size)

    @property
    def has_ended(self) -> bool:
        """True when nothing of the job runs here any more."""
        return self.state in ENDED_STATES

    def validate(self) -> None:
        """Assert what holds after every event."""
        assert set(self._workers) <= set(self.ranks)
        assert self.exit_code is None or self.has_ended
        assert self.state is not JobState.SUCCEEDED or self.exit_code == 0
        assert self.state is not JobState.STOPPING or self._kill_at_s is not None
        assert self.state is not JobState.PREPARED or (not self._workers and self._kill_at_s is None)
        assert self._terminate_at_s is None or self._kill_at_s is not None
        assert all(worker.has_exited for worker in self._workers.values() if worker.has_failed)
        assert not any(worker.has_failed for worker in self._workers.values()) or self._cause
        assert len(self._story) <= STORY_LENGTH

    def _effects(  # noqa: C901 - one case for each event
        self, before: JobState, event: Event, now_s: float
    ) -> list[Effect]:
        match event:
            case CommitReceived():
                return self._on_commit()
            case AbortReceived():
                return self._on_abort(before)
            case StopReceived() | KillReceived():
                return self._on_end_wanted(before, event, now_s)
            case FaultReceived():
                return self._on_fault(event)
            case LauncherStarted():
                return [ReleasePort(), Answer(Accepted())]
            case LauncherNotStarted(message=message):
                return [_refuse(RefusalReason.CANNOT_SPAWN, message)]
            case LauncherSucceeded():
                self.exit_code = 0
                return []
            case LauncherFailed():
                return self._on_launcher_failed(event)
            case WorkerFound(rank=rank):
                self._workers.setdefault(rank, _Worker())
                return []
            case WorkerExited():
                self._on_worker_exited(event, now_s)
                return []
            case Ticked():
                return self._on_tick(now_s)
        assert_never(event)

    def _on_commit(self) -> list[Effect]:
        if self.state is JobState.PREPARED:
            return [StartLauncher()]
        if self.state is JobState.RUNNING:
            return [Answer(Accepted())]
        return [self._refuse_by_state("prepare it again under a new attempt")]

    def _on_abort(self, before: JobState) -> list[Effect]:
        if before is JobState.PREPARED:
            return [ReleasePort(), ForgetJob(), Answer(Accepted())]
        if self.has_ended:
            return [Answer(Accepted())]
        return [self._refuse_by_state("stop it or kill it")]

    def _on_end_wanted(self, before: JobState, event: StopReceived | KillReceived, now_s: float) -> list[Effect]:
        if before is JobState.PREPARED:
            return [ReleasePort(), Answer(Accepted())]
        if self.has_ended:
            return [Answer(Accepted())]
        if isinstance(event, KillReceived):
            self._terminate_at_s, self._kill_at_s = None, now_s + KILL_AGAIN_S
            return [KillTree(), Answer(Accepted())]
        if before is JobState.RUNNING and event.is_agreed and event.can_agree:
            self._terminate_at_s = now_s + self.spec.save_s
            self._kill_at_s = self._terminate_at_s + self.spec.grace_s
            return [AskToStop(self._new_request_id()), Answer(Accepted())]
        if before is JobState.RUNNING or (self._terminate_at_s is not None and not event.is_agreed):
            return [self._terminate(now_s), Answer(Accepted())]
        return [Answer(Accepted())]

    def _terminate(self, now_s: float) -> Effect:
        self._terminate_at_s, self._kill_at_s = None, now_s + self.spec.grace_s
        return TerminateLauncher()

    def _new_request_id(self) -> int:
        self._last_request_id += 1
        return self._last_request_id

    def _on_fault(self, fault: FaultReceived) -> list[Effect]:
        rank = fault.rank
        if rank not in self.ranks:
            first, last = self.ranks[0], self.ranks[-1]
            return [
                _refuse(RefusalReason.UNKNOWN_RANK, f"rank {rank} is not here: this node has ranks {first} to {last}")
            ]
        if self.state is not JobState.RUNNING:
            return [self._refuse_by_state("faults are for running jobs")]
        worker = self._workers.get(rank)
        if worker is None:
            return [_refuse(RefusalReason.WRONG_STATE, f"rank {rank} has not started yet: try again in a moment")]
        if worker.has_exited:
            return [_refuse(RefusalReason.WRONG_STATE, f"rank {rank} has exited")]
        match fault.kind:
            case FaultKind.FREEZE:
                return [SignalWorker(rank, Signals.SIGSTOP), Answer(Accepted())]
            case FaultKind.THAW:
                return [SignalWorker(rank, Signals.SIGCONT), Answer(Accepted())]
            case FaultKind.KILL:
                return [SignalWorker(rank, Signals.SIGKILL), Answer(Accepted())]
            case FaultKind.SLOW:
                return [SlowWorker(rank, self._new_request_id(), fault.factor), Answer(Accepted())]
        assert_never(fault.kind)

    def _on_launcher_failed(self, event: LauncherFailed) -> list[Effect]:
        self.exit_code = event.exit_code
        if not self._cause:
            self._cause = _launcher_end_words(event)
        # A shim that left no record was killed itself: what it watched over may still live.
        return [KillTree()] if event.exit_code is None else []

    def _on_worker_exited(self, event: WorkerExited, now_s: float) -> None:
        worker = self._workers.setdefault(event.rank, _Worker())
        worker.has_exited = True
        worker.has_failed = event.signal is not None or event.code not in {0, None}
        if not worker.has_failed:
            return
        self._cause = self._cause or _worker_end_words(event)
        if not self.has_ended and (self._kill_at_s is None or self._terminate_at_s is not None):
            # The launcher ends the others now: nobody can agree any more.
            self._terminate_at_s = None
            self._kill_at_s = now_s + max(self.spec.grace_s, LAUNCHER_END_S)

    def _on_tick(self, now_s: float) -> list[Effect]:
        if self.has_ended or self._kill_at_s is None:
            return []
        if self._terminate_at_s is not None and now_s >= self._terminate_at_s:
            return [self._terminate(now_s)]
        if now_s < self._kill_at_s:
            return []
        self._kill_at_s = now_s + KILL_AGAIN_S
        return [KillTree()]

    def _detail(self, now_s: float) -> str:
        match self.state:
            case JobState.STOPPING if self._terminate_at_s is not None:
                left_s = max(0.0, self._terminate_at_s - now_s)
                return f"stopping after a step and a checkpoint; SIGTERM in {left_s:.0f} s"
            case JobState.STOPPING:
                assert self._kill_at_s is not None
                return f"stopping; what is left in {max(0.0, self._kill_at_s - now_s):.0f} s is killed"
            case JobState.FAILED:
                return self._cause
            case JobState.RUNNING if self._cause:
                return f"{self._cause}; waiting for the launcher to end the others"
            case JobState.RUNNING if self._num_exited == self.spec.local_world_size:
                return "all ranks of this node have ended; the launcher waits for the other nodes"
            case _:
                return ""

    @property
    def _num_exited(self) -> int:
        return sum(worker.has_exited for worker in self._workers.values())

    def _refuse_by_state(self, advice: str) -> Answer:
        return _refuse(RefusalReason.WRONG_STATE, f"job {self.spec.job_id} is {self.state}: {advice}")


def launcher_ended(exit_code: int | None, error: str = "") -> LauncherSucceeded | LauncherFailed:
    """Return the event for a launcher's end."""
    return LauncherSucceeded() if exit_code == 0 else LauncherFailed(exit_code, error)


def refusal_to_prepare(spec: JobSpec, existing: Job | None) -> Refused | None:
    """Return why a spec is not taken, judged by itself and by the job of the same id on this node; None if it is."""
    if contradiction := _contradiction(spec):
        return Refused(RefusalReason.MALFORMED, f"job {spec.job_id}: {contradiction}")
    if existing is None or (existing.has_ended and spec.attempt > existing.spec.attempt):
        return None
    return Refused(
        RefusalReason.JOB_EXISTS,
        f"job {spec.job_id} is {existing.state} here in attempt {existing.spec.attempt}: "
        "end it and choose a higher attempt, or choose another id",
    )


def _contradiction(spec: JobSpec) -> str:
    if spec.node_rank >= spec.num_nodes:
        return f"node_rank {spec.node_rank} of {spec.num_nodes} nodes"
    if spec.first_rank + spec.local_world_size > spec.world_size:
        return f"ranks {spec.first_rank} to {spec.first_rank + spec.local_world_size - 1} of {spec.world_size}"
    if spec.node_rank > 0 and spec.master_port == 0:
        return "only the node with node_rank 0 can choose the port: give the others its master_port"
    if any("\0" in text for text in (spec.python, spec.workdir, *spec.command, *spec.env, *spec.env.values())):
        return "a NUL byte in an argument or a variable"
    if any("=" in name or not name for name in spec.env):
        return "a variable's name is empty or holds '='"
    return ""


def _refuse(reason: RefusalReason, message: str) -> Answer:
    return Answer(Refused(reason, message[:4096]))


def _worker_end_words(event: WorkerExited) -> str:
    if event.signal is not None:
        words = f"rank {event.rank} was killed by {signal_name(event.signal)}"
    else:
        words = f"rank {event.rank} exited with code {event.code}"
    return f"{words}: {event.error}" if event.error else words


def _launcher_end_words(event: LauncherFailed) -> str:
    if event.exit_code is None:
        words = "the shim was killed, and the launcher with it"
    elif event.exit_code < 0:
        words = f"the launcher was killed by {signal_name(-event.exit_code)}"
    else:
        words = f"the launcher exited with code {event.exit_code}"
    return f"{words}: {event.error}" if event.error else words


def signal_name(number: int) -> str:
    """Return a signal's name for people; real-time signals have only numbers."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
