"""A job's lifecycle on this node: events in, effects out.

`Job` is the machine; the states and the transition table are in `agent.jobs.lifecycle`. An event that is not in the
table is a defect of our own shell and raises `InvalidTransitionError` with the job's last events; what a peer asks for
is refused by a value.

Stopping begins with a request to the ranks, if all of them can end at a step that they agree on (`ddpcore.Engine`):
they have `save_s` for that step and a checkpoint. Then, and for every other program immediately, it is SIGTERM for the
launcher, `grace_s` of patience, and the whole tree is killed. A launcher that lingers after a rank has failed gets the
same patience: torchrun waits up to 30 s for a survivor that does not react to its SIGTERM (a frozen one), and up to 300
s for other nodes.

A job that fails restarts by itself while its budget lasts, after a pause that doubles, and not before everything of the
last attempt is gone.

`detail` returns a job's state as a sentence for people, empty when all is well.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, assert_never

import msgspec

from agent.errors import InvalidTransitionError
from agent.jobs.fault_order import fault_effect, refusal_of_fault
from agent.jobs.lifecycle import (
    TRANSITIONS,
    AbortReceived,
    Answer,
    AskAll,
    AttemptFailed,
    CommitReceived,
    Effect,
    Event,
    FaultReceived,
    FollowRanks,
    ForgetJob,
    KillReceived,
    KillTree,
    LauncherFailed,
    LauncherFound,
    LauncherLost,
    LauncherNotStarted,
    LauncherStarted,
    LauncherSucceeded,
    ReleasePort,
    RestartAttempt,
    Round,
    RoundBegan,
    SeenWorker,
    ShimKilled,
    StartLauncher,
    StopReceived,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.jobs.root_cause import (
    Failure,
    failure_of_launcher,
    failure_of_worker,
    first_of,
    killed_text,
    launcher_end_text,
    worker_end_text,
)
from agent.wire.commands import Accepted, RefusalReason, Refused
from agent.wire.jobs import ENDED_STATES, JobSpec, JobState, JobStatus
from ddpcore.wire import ReportNow, StopTraining

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.logs.traceback_text import FoundFailure

STORY_LENGTH = 32

LAUNCHER_END_S = 3.0
"""Shortest time in seconds for a launcher to end by itself after a rank has failed. Source: torchrun takes about 2
s."""
DONE_S = 10.0
"""Seconds for the launcher in an agreed stop, once all ranks of this node have ended: torchrun waits for those of other
nodes for 300 s, and some may be gone."""
KILL_AGAIN_S = 5.0
"""Seconds after which a tree that still lives is killed again."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""Longest pause in seconds before a failed job restarts; doubled each time, so that a lasting fault spares the
budget."""
UNCOMMITTED_S = 120.0
"""Seconds after which a prepared job is taken back: a console has given its start up after 30 s, or is gone."""
_TAKE_BACK = (ReleasePort(), ForgetJob())


class Job(msgspec.Struct, dict=True):
    """One job on this node, from `Prepare` to its end.

    Its fields are what is written to disk (`agent.jobs.record`). Times are of the machine's monotonic clock. A job that
    is read from disk continues with `LauncherFound` or `LauncherLost`. What else it knows is of this agent's life.
    """

    spec: JobSpec
    """The current attempt."""
    since_s: float
    """Time of the last change of state."""
    state: JobState = JobState.PREPARED
    exit_code: int | None = None
    """The launcher's exit code, once the last attempt has ended."""
    cause: str = ""
    """The first thing that went wrong, as a sentence."""
    failure: Failure | None = None
    """The failure that the others followed from, as far as this node knows."""
    num_restarts: int = 0
    kill_at_s: float | None = None
    """Time of the next SIGKILL: set while stopping, and after a rank has failed."""
    terminate_at_s: float | None = None
    """Time of SIGTERM if the ranks do not end before: set during an agreed stop."""
    restart_at_s: float | None = msgspec.field(default=None, name="begin_again_at_s")
    """Earliest time of the next attempt: set while restarting."""
    round: Round | None = None
    """The nodes of an elastic job, once the launcher has gathered them."""
    is_abandoned: bool = False
    """The ranks are being ended because they hang and nobody watches."""
    unprobed: str = ""
    """The reason why no rank has a probe, as of the launcher's start; empty where they should have one."""
    started_s: float | None = None
    """Time of the launcher's start in this attempt; None before it, and after a reboot."""
    is_lone: bool = False
    """The shim of this attempt was killed, and its launcher goes on: how it ends is known only where the kernel
    reports it to others than its parent."""
    stop_began_s: float | None = None
    """Time at which its stop began; None where it was not stopped."""
    last_request_id: int = 0
    """The last request to a probe: ranks outlive an agent, and take no id twice."""

    def __post_init__(self) -> None:
        self._is_past = self.has_ended
        self._workers: dict[int, SeenWorker] = {}
        self.killed_s: float | None = None  # time of this attempt's first SIGKILL
        self.last_tick = Ticked()
        self._story: deque[str] = deque(maxlen=STORY_LENGTH)

    def of_another_boot(self, ahead_s: float) -> Job:
        """Return it with times by the clock of this boot, which is `ahead_s` ahead of that of the other one."""
        names = ("since_s", "stop_began_s", "kill_at_s", "terminate_at_s", "restart_at_s")
        times = {name: at_s + ahead_s for name in names if (at_s := getattr(self, name)) is not None}
        failure = self.failure and msgspec.structs.replace(self.failure, at_s=self.failure.at_s + ahead_s)
        return msgspec.structs.replace(self, started_s=None, failure=failure, **times)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Take one event and return what is to be done, in order; raise InvalidTransitionError if it cannot happen."""
        self._story.append(f"{now_s:.3f} {self.state} {event}")
        after = TRANSITIONS.get((self.state, type(event)))
        if after is None:
            raise InvalidTransitionError(
                f"job {self.spec.job_id} is {self.state}: {type(event).__name__} cannot happen", self._story
            )
        before = self.state
        if after is not before:
            self.state, self.since_s = after, now_s
            self.restart_at_s = None
            if after is JobState.STOPPING:
                self.stop_began_s = now_s
            if after is JobState.RUNNING:
                self.started_s = now_s
        effects = self._effects(before, event, now_s)
        if self.killed_s is None and any(isinstance(effect, KillTree) for effect in effects):
            self.killed_s = now_s
        return effects

    def status(self, now_s: float) -> JobStatus:
        """Return the job as a console sees it."""
        spec, shape = self.spec, self.round or self.spec
        failure, is_running = self.failure, self.state is JobState.RUNNING
        return JobStatus(
            job_id=spec.job_id,
            attempt=self.attempt,
            state=self.state,
            state_s=max(0.0, now_s - self.since_s),
            world_size=shape.world_size,
            num_nodes=shape.num_nodes,
            node_rank=shape.node_rank,
            first_rank=shape.first_rank,
            local_world_size=spec.local_world_size,
            exit_code=self.exit_code,
            num_restarts=self.round.number - 1 if self.round else self.num_restarts,
            max_restarts=spec.max_restarts,
            allow_faults=spec.allow_faults,
            is_elastic=spec.elastic_min_nodes > 0,
            unprobed=self.unprobed,
            detail=detail(self, self._workers.values(), now_s)[:4096],
            root_cause=failure.as_root_cause(now_s, is_running=is_running) if failure else None,
            age_s=None if self.started_s is None else max(0.0, now_s - self.started_s),
            is_past=self._is_past,
            stop_s=None if self.stop_began_s is None else max(0.0, now_s - self.stop_began_s),
        )

    @property
    def ranks(self) -> range:
        """Global ranks of this node."""
        first_rank = (self.round or self.spec).first_rank
        return range(first_rank, first_rank + self.spec.local_world_size)

    @property
    def attempt(self) -> int:
        """Number of the ranks' last start; for an elastic job it counts each gathering of nodes."""
        return self.spec.attempt + (self.round.number if self.round else 0)

    @property
    def is_gathering(self) -> bool:
        """True before the launcher of an elastic job has decided which ranks are this node's."""
        return self.spec.elastic_min_nodes > 0 and self.round is None

    @property
    def has_ended(self) -> bool:
        """True when nothing of the job runs here any more."""
        return self.state in ENDED_STATES

    def launcher_ended(self, exit_code: int | None, found: FoundFailure | None = None) -> Event:
        """Return the event for the launcher's end: whether the job may restart is decided here."""
        if exit_code == 0:
            return LauncherSucceeded()
        if exit_code is None and self.is_lone and self.failure is None:
            return LauncherLost("nobody knows how it ended: its shim was killed before")
        may_restart = not self.spec.elastic_min_nodes and self.num_restarts < self.spec.max_restarts
        if self.state is JobState.RUNNING and may_restart:
            return AttemptFailed(exit_code, found)
        return LauncherFailed(exit_code, found)

    def validate(self) -> None:
        """Assert what holds after every event."""
        assert set(self._workers) <= set(self.ranks)
        assert self.exit_code is None or self.has_ended
        assert self.state is not JobState.SUCCEEDED or self.exit_code == 0
        assert self.state is not JobState.STOPPING or self.kill_at_s is not None
        assert self.state is not JobState.PREPARED or (not self._workers and self.kill_at_s is None)
        assert self.terminate_at_s is None or self.kill_at_s is not None
        assert (self.restart_at_s is not None) == (self.state is JobState.RESTARTING)
        assert self.num_restarts <= self.spec.max_restarts
        assert all(worker.has_exited for worker in self._workers.values() if worker.has_failed)
        assert not any(worker.has_failed for worker in self._workers.values()) or self.cause
        assert len(self._story) <= STORY_LENGTH

    def _effects(  # noqa: C901, PLR0912 - one case for each event
        self, before: JobState, event: Event, now_s: float
    ) -> list[Effect]:
        match event:
            case CommitReceived(late_s=late_s):
                return self._on_commit(late_s)
            case AbortReceived() | StopReceived() | KillReceived() if before is JobState.PREPARED:
                return [*_TAKE_BACK, Answer(Accepted())]
            case AbortReceived():
                return [Answer(Accepted()) if self.has_ended else self._refuse_by_state("stop it or kill it")]
            case StopReceived() | KillReceived():
                return self._on_end_wanted(before, event, now_s)
            case FaultReceived():
                return self._on_fault(event)
            case LauncherStarted(unprobed=why):
                self.unprobed, self.is_lone = why, False
                self._take_next_attempt(before)
                return [ReleasePort()] if before is JobState.RESTARTING else [ReleasePort(), Answer(Accepted())]
            case LauncherNotStarted(message=message):
                return self._on_not_started(before, message)
            case LauncherSucceeded():
                self.exit_code = 0
                return []
            case AttemptFailed() | LauncherFailed():
                return self._on_launcher_failed(event, now_s)
            case LauncherFound():
                self._take_next_attempt(before)
                return []
            case LauncherLost(why=why):
                self.cause = f"{self.cause}; {why}" if self.cause else why
                return [KillTree()]
            case ShimKilled():
                self.is_lone = True
                return []
            case WorkerFound(rank=rank):
                self._workers.setdefault(rank, SeenWorker())
                return []
            case WorkerExited():
                return self._on_worker_exited(event, now_s)
            case RoundBegan(round=begun):
                return self._on_round(begun, now_s)
            case Ticked():
                return self._on_tick(event, now_s)
        assert_never(event)

    def _on_commit(self, late_s: float) -> list[Effect]:
        if self.state is JobState.PREPARED and late_s > 0:
            why = f"the start of job {self.spec.job_id} was given up {late_s:.1f} s ago: start it again on all nodes"
            return [_refuse(RefusalReason.TOO_LATE, why)]
        if self.state is JobState.PREPARED:
            return [StartLauncher()]
        if self.state is JobState.RUNNING:
            return [Answer(Accepted())]
        return [self._refuse_by_state("prepare it again under a new attempt")]

    def _on_end_wanted(self, before: JobState, event: StopReceived | KillReceived, now_s: float) -> list[Effect]:
        if self.has_ended:  # as it has when nothing runs between two attempts
            return [Answer(Accepted())]
        if isinstance(event, KillReceived):
            self.terminate_at_s, self.kill_at_s = None, now_s + KILL_AGAIN_S
            return [KillTree(), Answer(Accepted())]
        if before is JobState.RUNNING and event.is_agreed and event.can_agree:
            self.terminate_at_s = now_s + self.spec.save_s
            self.kill_at_s = self.terminate_at_s + self.spec.grace_s
            return [AskAll(StopTraining(self.new_request_id())), Answer(Accepted())]
        if before is JobState.RUNNING or (self.terminate_at_s is not None and not event.is_agreed):
            return [self._terminate(now_s), Answer(Accepted())]
        return [Answer(Accepted())]

    def _terminate(self, now_s: float) -> Effect:
        self.terminate_at_s, self.kill_at_s = None, now_s + self.spec.grace_s
        return TerminateLauncher()

    def new_request_id(self) -> int:
        """Return a number that no other request to a probe of this job has."""
        self.last_request_id += 1
        return self.last_request_id

    def _on_fault(self, event: FaultReceived) -> list[Effect]:
        if self.state is not JobState.RUNNING:
            return [self._refuse_by_state("faults are for running jobs")]
        if refused := refusal_of_fault(event, self.spec, self.ranks, self._workers.get(event.fault.rank)):
            return [Answer(refused)]
        return [fault_effect(event.fault, self.new_request_id()), Answer(Accepted())]

    def _on_not_started(self, before: JobState, message: str) -> list[Effect]:
        if before is JobState.RESTARTING:
            self.cause = f"the job could not restart: {message}"
            return [ReleasePort()]
        return [_refuse(RefusalReason.CANNOT_SPAWN, message)]

    def _on_launcher_failed(self, event: AttemptFailed | LauncherFailed, now_s: float) -> list[Effect]:
        if not self.is_abandoned and self.state in {JobState.FAILED, JobState.RESTARTING}:
            self._blame_launcher(event, now_s)
        self.cause = self.cause or launcher_end_text(event)
        if isinstance(event, AttemptFailed):
            self.restart_at_s = now_s + min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0**self.num_restarts)
        else:
            self.exit_code = event.exit_code
        # A shim that left no record was killed itself: what it watched over may still live.
        return [KillTree()] if event.exit_code is None else []

    def _blame_launcher(self, event: AttemptFailed | LauncherFailed, now_s: float) -> None:
        """Note a launcher's failure, unless it followed from a rank's."""
        failure = failure_of_launcher(event, now_s)
        if self.failure is None:
            self.failure = failure
        elif failure.is_launcher_ended and first_of(self.failure, failure) is failure:
            self.failure, self.cause = failure, launcher_end_text(event)

    def _on_worker_exited(self, event: WorkerExited, now_s: float) -> list[Effect]:
        is_first = not any(worker.has_failed for worker in self._workers.values())
        worker = self._workers.setdefault(event.rank, SeenWorker())
        worker.has_exited = True
        worker.has_failed = event.signal is not None or event.code not in {0, None}
        if not worker.has_failed:
            self._hasten_stop(now_s)
            return []
        self._blame(event, now_s)
        # The launcher ends the others at its next look: what they have called is reported before.
        is_asked = is_first and self.state is JobState.RUNNING
        effects: list[Effect] = [AskAll(ReportNow(self.new_request_id()))] if is_asked else []
        # In an elastic job the launcher has patience of its own, and then gathers the nodes that are left.
        if self.has_ended or (self.spec.elastic_min_nodes and self.state is JobState.RUNNING):
            return effects
        if self.kill_at_s is None or self.terminate_at_s is not None:
            # The launcher ends the others now: nobody can agree any more.
            self.terminate_at_s = None
            self.kill_at_s = now_s + max(self.spec.grace_s, LAUNCHER_END_S)
        return effects

    def _hasten_stop(self, now_s: float) -> None:
        """Have an agreed stop end soon once there is no rank here any more that could save."""
        have_ended = all(worker.has_exited for worker in self._workers.values())
        if self.terminate_at_s is not None and have_ended and len(self._workers) == self.spec.local_world_size:
            self.terminate_at_s = min(self.terminate_at_s, now_s + DONE_S)
            self.kill_at_s = self.terminate_at_s + self.spec.grace_s

    def _blame(self, event: WorkerExited, now_s: float) -> None:
        """Note a rank's failure, unless the job was stopping or another rank failed first."""
        if self.is_abandoned or self.state in {JobState.STOPPING, JobState.STOPPED}:
            self.cause = self.cause or worker_end_text(event)
            return
        failure = failure_of_worker(event, now_s, self.failure)
        if first_of(self.failure, failure) is failure:
            # The sentence is about the same rank: a victim may be noticed before who made it one.
            self.failure, self.cause = failure, worker_end_text(event)

    def _on_tick(self, tick: Ticked, now_s: float) -> list[Effect]:
        self.last_tick = tick
        if self.state is JobState.PREPARED:
            return [*_TAKE_BACK] if now_s - self.since_s >= UNCOMMITTED_S else []
        if self.restart_at_s is not None:
            is_time = now_s >= self.restart_at_s and not tick.has_leftovers
            return [RestartAttempt(self.spec.attempt + 1)] if is_time else []
        if self.state is JobState.RUNNING and self.kill_at_s is None and 0 < self.spec.abandon_s <= tick.abandoned_s:
            return [self._abandon(tick.abandoned_s, now_s)]
        if self.has_ended or self.kill_at_s is None:
            return []
        if self.terminate_at_s is not None and now_s >= self.terminate_at_s:
            return [self._terminate(now_s)]
        if now_s < self.kill_at_s:
            return []
        self.kill_at_s = now_s + KILL_AGAIN_S
        return [KillTree(spares_writers=True)]

    def _abandon(self, abandoned_s: float, now_s: float) -> Effect:
        self.is_abandoned = True
        self.cause = f"no rank of this node got any further for {abandoned_s:.0f} s, and nobody was watching: ended"
        return self._terminate(now_s)

    def _on_round(self, begun: Round, now_s: float) -> list[Effect]:
        if begun == self.round:
            return []
        self.round = begun
        if self.state is JobState.RUNNING:
            self.since_s = now_s
        self._forget_ranks()
        return [FollowRanks()]

    def _take_next_attempt(self, before: JobState) -> None:
        if before is not JobState.RESTARTING:
            return
        # A fault is tried out once.
        self.spec = msgspec.structs.replace(self.spec, attempt=self.spec.attempt + 1, faults=[])
        self.num_restarts += 1
        self._forget_ranks()
        self.kill_at_s, self.terminate_at_s, self.killed_s = None, None, None

    def _forget_ranks(self) -> None:
        self._workers.clear()
        self.cause, self.failure, self.is_abandoned = "", None, False

    def _refuse_by_state(self, advice: str) -> Answer:
        return _refuse(RefusalReason.WRONG_STATE, f"job {self.spec.job_id} is {self.state}: {advice}")


def _refuse(reason: RefusalReason, message: str) -> Answer:
    return Answer(Refused(reason, message[:4096]))


UNWATCHED = (
    "the process that watches over it (its shim) was killed: training goes on, stop and restart work, "
    "its exit status may not be known"
)
QUIET_START_S = 10.0
"""Seconds from a launcher's start until ranks are missed: it imports torch."""


def detail(job: Job, workers: Collection[SeenWorker], now_s: float) -> str:
    """Return what a job is waiting for, or why it ended; `workers` have been seen in this attempt."""
    killed = "" if job.killed_s is None else killed_text(now_s - job.killed_s, job.last_tick.undying)
    match job.state:
        case JobState.STOPPING if killed:
            return f"stopping by {killed}"
        case JobState.STOPPING if job.terminate_at_s is not None:
            return f"stopping after a step and a checkpoint; SIGTERM in {_left(job.terminate_at_s, now_s)}"
        case JobState.STOPPING:
            return f"stopping by SIGTERM; what is left in {_left(job.kill_at_s, now_s)} is killed"
        case JobState.RESTARTING:
            left = f"{job.spec.max_restarts - job.num_restarts} of {job.spec.max_restarts} restarts left"
            if job.last_tick.has_leftovers and now_s >= (job.restart_at_s or now_s):
                return f"{job.cause}; restarts once the rest is gone, {left}; ending it by {killed or 'SIGKILL'}"
            return f"{job.cause}; restarts in {_left(job.restart_at_s, now_s)}, {left}"
        case JobState.STOPPED if killed:
            return "by SIGKILL"
        case JobState.FAILED | JobState.LOST:
            return job.cause
        case JobState.RUNNING:
            return f"{job.cause}; ending the others by {killed}" if killed else _running(job, workers, now_s)
        case _:
            return ""


def _running(job: Job, workers: Collection[SeenWorker], now_s: float) -> str:
    running_s, num_exited = now_s - job.since_s, sum(worker.has_exited for worker in workers)
    if job.cause and job.spec.elastic_min_nodes and not job.is_abandoned:
        return f"{job.cause}; the launcher gathers the nodes again, at least {job.spec.elastic_min_nodes}"
    if job.cause:
        return f"{job.cause}; waiting for the launcher to end the others"
    if not workers and running_s > QUIET_START_S:
        whom = "the other nodes" if job.spec.num_nodes > 1 else "torch"
        return f"no rank has been started for {running_s:.0f} s: the launcher waits for {whom}"
    if num_exited == job.spec.local_world_size:
        does = "waits for the other nodes" if job.spec.num_nodes > 1 else "has not ended yet"
        return f"all ranks of this node have ended; the launcher {does}"
    return UNWATCHED if job.is_lone else ""


def _left(at_s: float | None, now_s: float) -> str:
    return f"{max(0.0, (at_s or now_s) - now_s):.0f} s"
