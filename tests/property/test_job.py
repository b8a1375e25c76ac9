"""The job's lifecycle under any order of events that the world can produce."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.jobs.job import Job
from agent.jobs.lifecycle import (
    AbortReceived,
    Answer,
    AskAll,
    AskProbe,
    CommitReceived,
    Effect,
    Event,
    FaultReceived,
    FollowRanks,
    ForgetJob,
    KillReceived,
    KillTree,
    LauncherFound,
    LauncherLost,
    LauncherNotStarted,
    LauncherStarted,
    ReleasePort,
    RestartAttempt,
    Round,
    RoundBegan,
    ShimKilled,
    SignalWorker,
    StartLauncher,
    StopReceived,
    TerminateLauncher,
    Ticked,
    WorkerExited,
    WorkerFound,
)
from agent.wire.commands import decode_reply, encode_reply
from agent.wire.jobs import ENDED_STATES, JobState
from ddpcore.wire import Fault, FaultKind
from tests.support.jobs import left, make_spec

MAX_TICK_S = 20.0
MAX_RESTARTS = 2
ABANDON_S = 600.0


class JobInTheWorld(RuleBasedStateMachine):
    """Plays the shell, the processes and the consoles of one job."""

    spec = make_spec(max_restarts=MAX_RESTARTS, abandon_s=ABANDON_S)

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.job = Job(self.spec, self.now_s)
        self.is_launcher_alive = False
        self.is_port_held = True
        self.alive: set[int] = set()
        self.unseen = set(self.job.ranks)
        self.end_wanted_at_s: float | None = None
        self.patience_s = self.job.spec.grace_s
        self.killed_at_s: float | None = None
        self.may_restart = False
        self.states = [self.job.state]

    def feed(self, event: Event) -> list[Effect]:
        effects = self.job.handle(event, self.now_s)
        if self.job.state is not self.states[-1]:
            self.states.append(self.job.state)
        for effect in effects:
            self.perform(effect)
        return effects

    def perform(self, effect: Effect) -> None:
        match effect:
            case StartLauncher():
                assert not self.is_launcher_alive, "a launcher is started twice"
            case RestartAttempt(attempt=attempt):
                assert not self.is_launcher_alive, "two attempts at once"
                assert attempt == self.job.spec.attempt + 1
                self.may_restart = True
            case AskAll():
                assert self.is_launcher_alive
                self.patience_s += self.job.spec.save_s
            case TerminateLauncher() | KillTree():
                assert self.is_launcher_alive or self.job.exit_code is None
                if isinstance(effect, KillTree):
                    self.killed_at_s = self.now_s
            case ReleasePort():
                self.is_port_held = False
            case SignalWorker(rank=rank) | AskProbe(rank=rank):
                assert rank in self.alive, "harm to a rank that is not there"
            case ForgetJob():
                assert not self.is_launcher_alive
            case Answer(reply=reply):
                assert decode_reply(encode_reply(reply)) == reply

    @rule(seconds=st.floats(0.0, MAX_TICK_S))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.feed(Ticked())
        if self.end_wanted_at_s is not None and self.is_launcher_alive:
            self.feed(Ticked())  # the first tick may have ended one patience and begun the next
            overdue_s = self.now_s - self.end_wanted_at_s - self.patience_s
            assert overdue_s < MAX_TICK_S or self.killed_at_s is not None, "patience has no end"

    @rule(abandoned_s=st.floats(0.0, 2 * ABANDON_S))
    def nobody_watches(self, abandoned_s: float) -> None:
        was_running = self.job.state is JobState.RUNNING
        effects = self.feed(Ticked(abandoned_s=abandoned_s))
        if TerminateLauncher() in effects and was_running:
            assert abandoned_s >= ABANDON_S, "ranks are ended for nothing"
            self.end_wanted_at_s = self.now_s

    @rule(can_start=st.booleans())
    def commit(self, *, can_start: bool) -> None:
        if StartLauncher() in self.feed(CommitReceived()):
            self.is_launcher_alive = can_start
            self.feed(LauncherStarted() if can_start else LauncherNotStarted("no memory"))

    @precondition(lambda self: self.may_restart)
    @rule(can_start=st.booleans())
    def the_next_attempt_begins(self, *, can_start: bool) -> None:
        self.may_restart = False
        if self.job.state is not JobState.RESTARTING:
            return
        self.is_launcher_alive, self.end_wanted_at_s, self.killed_at_s = can_start, None, None
        self.alive, self.unseen = set(), set(self.job.ranks)
        self.feed(LauncherStarted() if can_start else LauncherNotStarted("no port"))

    @rule()
    def the_agent_is_replaced(self) -> None:
        written, status = msgspec.json.encode(self.job), self.job.status(self.now_s)
        self.job = msgspec.json.decode(written, type=Job)
        assert msgspec.json.encode(self.job) == written
        kept = msgspec.structs.replace(status, is_past=self.job.has_ended, detail="")
        assert msgspec.structs.replace(self.job.status(self.now_s), detail="") == kept
        if self.is_launcher_alive:
            self.feed(LauncherFound())
            self.unseen |= self.alive
            self.alive = set()

    @precondition(lambda self: self.is_launcher_alive)
    @rule()
    def everything_is_killed_with_the_agent(self) -> None:
        self.is_launcher_alive = False
        was_told_to_end = self.job.state is JobState.STOPPING
        self.feed(LauncherLost("the node was rebooted"))
        assert self.job.state is (JobState.STOPPED if was_told_to_end else JobState.LOST)

    @rule(
        event=st.sampled_from(
            [
                AbortReceived(),
                StopReceived(),
                StopReceived(is_agreed=True),
                StopReceived(is_agreed=True, can_agree=True),
                KillReceived(),
            ]
        )
    )
    def a_console_wants_an_end(self, event: Event) -> None:
        self.feed(event)
        if self.is_launcher_alive and not isinstance(event, AbortReceived):
            self.end_wanted_at_s = self.end_wanted_at_s if self.end_wanted_at_s is not None else self.now_s
            assert self.job.state is JobState.STOPPING

    @rule(
        kind=st.sampled_from(FaultKind),
        rank=st.integers(0, 5),
        at_step=st.none() | st.integers(0, 20),
        step=st.none() | st.integers(0, 20),
    )
    def a_console_wants_harm(self, kind: FaultKind, rank: int, at_step: int | None, step: int | None) -> None:
        effects = self.feed(FaultReceived(Fault(kind, rank, at_step, factor=4.0), step))
        if at_step is not None:
            assert not any(isinstance(effect, SignalWorker) for effect in effects), "it does not wait for its step"

    @precondition(lambda self: self.is_launcher_alive and self.unseen)
    @rule()
    def a_worker_is_found(self) -> None:
        rank = self.unseen.pop()
        self.alive.add(rank)
        self.feed(WorkerFound(rank))

    @precondition(lambda self: self.alive)
    @rule(how=st.sampled_from([(0, None), (1, None), (None, 9), (None, None)]))
    def a_worker_exits(self, how: tuple[int | None, int | None]) -> None:
        self.feed(WorkerExited(self.alive.pop(), *how))

    @precondition(lambda self: self.is_launcher_alive)
    @rule()
    def the_shim_is_killed(self) -> None:
        before = self.job.state
        assert self.feed(ShimKilled()) == []
        assert self.job.state is before

    @precondition(lambda self: self.is_launcher_alive)
    @rule(exit_code=st.sampled_from([0, 1, -9, None]))
    def the_launcher_ends(self, exit_code: int | None) -> None:
        self.is_launcher_alive = False
        self.feed(self.job.launcher_ended(exit_code, left("RuntimeError: boom")))

    @invariant()
    def the_job_is_consistent(self) -> None:
        self.job.validate()
        assert self.job.has_ended == (self.job.state in ENDED_STATES)
        assert sum(state in ENDED_STATES for state in self.states) <= 1, "an end is left again"
        if self.is_launcher_alive:
            assert self.job.state in {JobState.RUNNING, JobState.STOPPING}
            assert not self.is_port_held
        status = self.job.status(self.now_s)
        assert status.state_s >= 0
        assert self.job.state is not JobState.FAILED or status.detail


class ElasticJobInTheWorld(JobInTheWorld):
    """The same, with a launcher that starts its ranks once more whenever it likes."""

    spec = make_spec(max_restarts=MAX_RESTARTS, abandon_s=ABANDON_S, elastic_min_nodes=1)
    num_rounds = 0

    @precondition(lambda self: self.is_launcher_alive)
    @rule(num_nodes=st.integers(1, 2), node_rank=st.integers(0, 1))
    def the_nodes_are_gathered(self, num_nodes: int, node_rank: int) -> None:
        self.num_rounds += 1
        here = min(node_rank, num_nodes - 1)
        begun = Round(self.num_rounds, 2 * here, 2 * num_nodes, here, num_nodes)
        assert FollowRanks() in self.feed(RoundBegan(begun))
        assert self.feed(RoundBegan(begun)) == []
        self.alive, self.unseen = set(), set(self.job.ranks)
        told = self.job.status(self.now_s)
        assert (told.attempt, told.world_size, told.first_rank) == (self.num_rounds, 2 * num_nodes, 2 * here)

    @invariant()
    def the_agent_begins_nothing_again(self) -> None:
        assert self.job.state is not JobState.RESTARTING


for machine in (JobInTheWorld, ElasticJobInTheWorld):
    machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestJobInTheWorld = JobInTheWorld.TestCase
TestElasticJobInTheWorld = ElasticJobInTheWorld.TestCase
