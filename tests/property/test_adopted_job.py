"""A job of another launcher under any order of reports, ends and wishes that ranks, host and people can produce."""

from __future__ import annotations

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agent.jobs.adopted_job import GRACE_S, SAVE_S, Action, AdoptedJob
from agent.wire.jobs import JobState, JobStatus
from tests.support.node_reports import rank_report

WORLD = 4
PIDS = st.integers(100, 107)
ENDS = [(0, None), (3, None), (None, 2), (None, 9), (None, 15), (None, None)]
MAX_TICK_S = 20.0


class AdoptedInTheWorld(RuleBasedStateMachine):
    """Plays the ranks, their launcher, the kernel and the consoles of one job."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.job = AdoptedJob(rank_report(0, WORLD, pid=100, is_adopted=True), self.now_s)
        self.lives_launcher = True
        self.wanted_s: float | None = None
        self.killed_s: float | None = None

    def carry_out(self, actions: list[Action]) -> None:
        assert not actions or self.wanted_s is not None, "nobody has asked for an end"
        if Action.KILL in actions:
            self.killed_s = self.now_s

    @rule(rank=st.integers(0, WORLD - 1), pid=PIDS, attempt=st.integers(0, 2), world=st.sampled_from([WORLD, WORLD, 5]))
    def report(self, rank: int, pid: int, attempt: int, world: int) -> None:
        report = rank_report(rank, world, pid=pid, attempt=attempt, is_adopted=True)
        if self.job.is_succeeded_by(report):
            known = [number for number, member in self.job.members.items() if member.pid == pid]
            is_other = world != self.job.world_size or (known and known != [rank]) or self.job.is_interrupted
            assert attempt > self.job.attempt or self.job.has_ended or is_other
            self.job = AdoptedJob(report, self.now_s)
            self.wanted_s = self.killed_s = None
            self.lives_launcher = True
            return
        before = self.job.members.get(rank)
        was_heard = before is not None and before.why_mute is None
        was_running = before is not None and was_heard and not before.has_ended and before.pid != pid
        is_over = self.job.has_ended or self.job.is_interrupted
        is_of_this_run = not is_over and (attempt, world) == (self.job.attempt, self.job.world_size)
        is_taken = self.job.take(report, pid, self.now_s)
        assert is_taken == (is_of_this_run and self.job.members[rank].pid == pid)
        assert not (is_taken and was_running), "a rank that runs is replaced by another process"

    @rule(rank=st.integers(0, WORLD - 1), why=st.sampled_from(["python -E", "python -I"]))
    def see_without_a_probe(self, rank: int, why: str) -> None:
        if self.job.has_ended or self.job.is_interrupted:
            return
        before = self.job.members.get(rank)
        is_taken = self.job.add_mute(rank, 200 + rank, why)
        assert is_taken is (before is None or (before.has_ended and before.why_mute is not None))
        assert not is_taken or why in self.job.status(self.now_s).unprobed
        assert rank in self.job.ranks

    @rule(
        data=st.data(),
        how=st.sampled_from(ENDS),
        last_report=st.booleans(),
    )
    def end(self, data: st.DataObject, how: tuple[int | None, int | None], last_report: bool) -> None:
        running = [rank for rank, member in self.job.members.items() if not member.has_ended]
        if not running or self.job.has_ended:
            return
        rank = data.draw(st.sampled_from(running))
        member = self.job.members[rank]
        if last_report:
            same = (self.job.world_size, self.job.attempt)
            ending = rank_report(rank, same[0], attempt=same[1], pid=member.pid, is_ending=True)
            assert self.job.take(ending, member.pid, self.now_s)
        event = self.job.rank_ended(rank, *how, self.now_s)
        assert event.code == (0 if how == (None, None) and last_report else how[0])

    @rule()
    def launcher_ends(self) -> None:
        self.lives_launcher = False

    @rule(is_agreed=st.booleans())
    def stop(self, is_agreed: bool) -> None:
        self.wanted_s = self.now_s
        self.carry_out(self.job.stop(self.now_s, is_agreed=is_agreed))

    @rule()
    def kill(self) -> None:
        self.wanted_s = self.now_s
        actions = self.job.kill(self.now_s)
        self.carry_out(actions)
        assert self.job.has_ended or Action.KILL in actions

    @rule(passed_s=st.floats(0.0, MAX_TICK_S), code=st.sampled_from([None, 0, 1, -15, -2]), is_shared=st.booleans())
    def tick(self, passed_s: float, code: int | None, is_shared: bool) -> None:
        self.now_s += passed_s
        lives, exit_code = self.lives_launcher, None if self.lives_launcher else code
        self.carry_out(self.job.tick(self.now_s, lives_launcher=lives, exit_code=exit_code, is_shared=is_shared))
        if self.wanted_s is not None and not self.job.has_ended and self.now_s > self.wanted_s + SAVE_S + 2 * GRACE_S:
            assert self.killed_s is not None, "who does not end is killed"

    @precondition(lambda self: self.job.has_ended)
    @rule()
    def what_has_ended_is_left_alone(self) -> None:
        assert self.job.stop(self.now_s, is_agreed=True) == self.job.kill(self.now_s) == []

    @invariant()
    def it_holds(self) -> None:
        self.job.validate()
        status = self.job.status(self.now_s)
        assert msgspec.json.decode(msgspec.json.encode(status), type=JobStatus) == status
        assert status.is_adopted
        assert list(status.own_ranks) == self.job.ranks
        has_failed = any(member.has_failed for member in self.job.members.values())
        assert not (status.state is JobState.SUCCEEDED and (has_failed or status.exit_code not in {0, None}))
        assert status.state is not JobState.FAILED or status.detail
        ends = [member.exit for member in self.job.members.values() if member.exit is not None]
        if status.state in {JobState.STOPPING, JobState.STOPPED} and self.wanted_s is None:
            assert self.job.is_interrupted
            assert all(end.code != 3 for end in ends), "a failure is hidden"
            assert any(end.signal == 2 for end in ends) or self.job.exit_code == -2 or not self.job.has_ended


TestAdoptedInTheWorld = AdoptedInTheWorld.TestCase
TestAdoptedInTheWorld.settings = settings(max_examples=150, stateful_step_count=40)
