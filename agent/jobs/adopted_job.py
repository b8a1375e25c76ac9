"""A job that no agent has launched: its ranks on this node as they report, and what is done to end it. Pure.

The job is known from its first rank on, which reports or is seen by its process, and grows: a rank that has not
reported yet is not missed. There is no launcher of ours, so no restart, no logs and no exit code but what the kernel
and the probes show. A stop asks the ranks to end at an agreed step where all of them can, else it is SIGTERM for the
launcher, then for each rank, then SIGKILL.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from signal import Signals
from typing import TYPE_CHECKING, Protocol

import msgspec

from agent.jobs.lifecycle import LauncherFailed, WorkerExited
from agent.jobs.root_cause import TOGETHER_S, Failure, failure_of_worker, first_of, launcher_end_text, worker_end_text
from agent.logs.traceback_text import FailureText, FoundFailure
from agent.wire.jobs import ENDED_STATES, JobState, JobStatus
from agent.wire.logs import INTERRUPTED, LOST_PEER

if TYPE_CHECKING:
    from ddpcore.wire import RankReport

SAVE_S = 120.0
"""Seconds that an agreed stop may take for a step and a checkpoint before SIGTERM, as for launched jobs."""
ASK_RANKS_S = 5.0
"""Seconds from SIGTERM for the launcher to SIGTERM for ranks that still run: most launchers pass it on at once."""
GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
LAUNCHER_END_S = 3.0
"""Seconds that a job goes on without a process of a rank, while its launcher lives: it may start the ranks again."""
RESTART_S = 60.0
"""Seconds for which it may have none and start its ranks again, while a launcher lives that has started another job."""
MAX_WHY_CHARS = 1024
"""Longest text of the reasons why ranks have no probe."""
RIVAL_S = 5.0
"""Seconds after its last report for which a second process of a rank is shown."""

_LEFT = "its launcher has other jobs and goes on"

INTERRUPTED_CODE = 128 + Signals.SIGINT
"""Exit code of a shell, and by custom of a program, that SIGINT has ended."""


class Action(StrEnum):
    """What is to be done to the job's processes."""

    ASK_TO_STOP = "ask to stop"
    """Ask the probes for an agreed stop."""
    END_LAUNCHER = "end launcher"
    """SIGTERM for the launcher, and its process group if it leads one."""
    END_RANKS = "end ranks"
    """SIGTERM for each rank that runs."""
    KILL = "kill"
    """SIGKILL for the launcher, what it has started, and each rank."""


class Member(msgspec.Struct):
    """The process of a rank on this node."""

    pid: int
    local_rank: int
    has_ended: bool = False
    raised: str = ""
    """The exception that ends it, as its probe has reported."""
    is_ending: bool = False
    """Its probe has sent its last report: the interpreter ends."""
    exit: WorkerExited | None = None
    """Its end, as far as it is known."""
    ended_s: float = 0.0
    interrupted_s: float | None = None
    """Time at which it was known that SIGINT ends it."""
    why_mute: str | None = None
    """Why it has no probe; None for one that has."""

    @property
    def has_failed(self) -> bool:
        return self.exit is not None and self.exit.code != 0

    def note_interrupt(self, now_s: float) -> None:
        """Note whether SIGINT ends it."""
        by_signal = self.exit is not None and Signals.SIGINT in {self.exit.signal, (self.exit.code or 0) - 128}
        if self.interrupted_s is None and (by_signal or self.raised.startswith(INTERRUPTED)):
            self.interrupted_s = now_s

    def follows(self, interrupt_s: float) -> bool:
        """Return whether it may have ended because SIGINT ended others, or its launcher, at that time."""
        assert self.exit is not None
        if self.exit.signal == Signals.SIGTERM or LOST_PEER.search(self.raised):
            return self.ended_s >= interrupt_s - TOGETHER_S
        is_killed = self.exit.signal == Signals.SIGKILL or self.exit.code is self.exit.signal is None
        return is_killed and self.ended_s >= interrupt_s


class Seen(Protocol):
    """A rank that has reported, or whose process has been seen."""

    @property
    def job_id(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...


class AdoptedJob:
    """One run of a job, from its first rank on.

    Args:
        first: The first rank.
        now_s: Time at which it was seen.
        why_mute: Reason why it has no probe; None for one that has reported.
    """

    def __init__(self, first: Seen, now_s: float, why_mute: str | None = None) -> None:
        self.job_id = first.job_id
        self.attempt = first.attempt
        self.world_size = first.world_size
        self.members: dict[int, Member] = {first.rank: Member(first.pid, first.local_rank, why_mute=why_mute)}
        self.state = JobState.RUNNING
        self.since_s = self.started_s = now_s
        self.exit_code: int | None = None
        self.cause = ""
        self.failure: Failure | None = None
        self.is_interrupted = False
        """SIGINT has ended it, as Ctrl-C sends it to the launcher and the ranks."""
        self.leaves_launcher = False
        """Its end is not that of its launcher, which has other jobs."""
        self._due: deque[tuple[float, Action]] = deque()
        """What is done next, and when, if the job has not ended by then."""
        self._stop_began_s: float | None = None
        self._idle_since_s: float | None = None
        """Time from which on no rank of it has had a process."""
        self._rival: tuple[float, int, int] | None = None
        """The last report of a second process as a rank that runs: when, which rank, pid. It is left out."""

    @property
    def ranks(self) -> list[int]:
        """Global ranks on this node that have reported, in order."""
        return sorted(self.members)

    @property
    def has_ended(self) -> bool:
        """True when no process of it is left."""
        return self.state in ENDED_STATES

    @property
    def is_idle(self) -> bool:
        """True while no rank of it has a process."""
        return all(member.has_ended for member in self.members.values())

    @property
    def is_stopping(self) -> bool:
        """True once it was asked to end and has not ended."""
        return self.state is JobState.STOPPING

    def is_succeeded_by(self, seen: Seen) -> bool:
        """Return whether a rank under this job's name is of another run of it: the job restarts.

        Its launcher has started the ranks again, or somebody the program. Or torch has another rank or world than the
        environment: then all ranks join again by their next reports.
        """
        known = next((rank for rank, member in self.members.items() if member.pid == seen.pid), None)
        if seen.attempt > self.attempt or self.has_ended or self.is_interrupted:
            return known is None
        if known is not None:
            return (seen.rank, seen.world_size) != (known, self.world_size)
        none_reports = all(member.has_ended or member.why_mute is not None for member in self.members.values())
        return seen.world_size != self.world_size and none_reports

    def is_of(self, seen: Seen) -> bool:
        """Return whether a rank under this job's name belongs to this run."""
        is_over = self.has_ended or self.is_interrupted
        return not is_over and (seen.attempt, seen.world_size) == (self.attempt, self.world_size)

    def take(self, report: RankReport, pid: int, now_s: float) -> bool:
        """Take a report of this run; return whether it is of a rank that is a member now."""
        if not self.is_of(report):
            return False
        member = self.members.get(report.rank)
        if member is None or (member.pid != pid and (member.has_ended or member.why_mute is not None)):
            # A process that was only seen may be a wrapper around the rank's own.
            member = self.members[report.rank] = Member(pid, report.local_rank)
        elif member.pid != pid:
            self._rival = (now_s, report.rank, pid)
            return False
        member.why_mute = None
        member.raised, member.is_ending = report.raised or member.raised, report.is_ending
        member.note_interrupt(now_s)
        return True

    def add_mute(self, rank: int, pid: int, why: str) -> bool:
        """Take in a rank that no probe reports, seen by its process; return False where one is known.

        Its probe may report later, also from another process.
        """
        member = self.members.get(rank)
        if rank >= self.world_size or (member and (member.why_mute is None or not member.has_ended)):
            return False
        self.members[rank] = Member(pid, rank, why_mute=why)
        return True

    def rank_ended(self, rank: int, code: int | None, signal: int | None, now_s: float) -> WorkerExited:
        """Take the end of a rank's process; return it with what its probe has reported of it.

        The code is None where the kernel does not show it: then a probe that has sent its last report has ended well,
        or by an exception, which a code of 1 stands for.
        """
        member = self.members[rank]
        member.has_ended = True
        if code is None and signal is None and (member.is_ending or member.raised):
            code = 1 if member.raised else 0
        found = FoundFailure(FailureText(exception=member.raised), rank) if member.raised else None
        event = member.exit = WorkerExited(rank, code, signal, found)
        member.ended_s = now_s
        member.note_interrupt(now_s)
        if member.has_failed and not self.is_stopping:
            failure = failure_of_worker(event, now_s, self.failure)
            if first_of(self.failure, failure) is failure:
                self.failure, self.cause = failure, worker_end_text(event)
        return event

    def stop(self, now_s: float, *, is_agreed: bool) -> list[Action]:
        """Begin to end it in order; `is_agreed`: all ranks can stop at an agreed step."""
        if self.has_ended:
            return []
        self._go(JobState.STOPPING, now_s)
        at_s = now_s + SAVE_S if is_agreed else now_s
        plan = [(at_s, Action.END_LAUNCHER), (at_s + ASK_RANKS_S, Action.END_RANKS), (at_s + GRACE_S, Action.KILL)]
        self._due = deque(plan)
        return [Action.ASK_TO_STOP] if is_agreed else self._what_is_due(now_s)

    def kill(self, now_s: float) -> list[Action]:
        """Begin to end it at once."""
        if self.has_ended:
            return []
        self._go(JobState.STOPPING, now_s)
        self._due = deque([(now_s, Action.KILL)])
        return self._what_is_due(now_s)

    def tick(
        self, now_s: float, *, lives_launcher: bool, exit_code: int | None, is_shared: bool = False
    ) -> list[Action]:
        """Let time pass; return what is to be done.

        Args:
            now_s: Now.
            lives_launcher: Whether its launcher runs, as far as one is known.
            exit_code: Exit code of a launcher that has ended; negative is a signal, None is unknown.
            is_shared: Whether its launcher has started another job, too, so that it may outlive this one.
        """
        if self.has_ended:
            return []
        if not self.is_idle:
            self._idle_since_s = None
            return self._what_is_due(now_s)
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        patience_s = LAUNCHER_END_S if self.is_stopping else RESTART_S
        lives_launcher = lives_launcher and not (is_shared and now_s - self._idle_since_s >= patience_s)
        # An interrupt is reported before the end: what ended since then, ended by it.
        if not self._note_interrupt(exit_code, self._idle_since_s) and not lives_launcher:
            self._end(exit_code, now_s)
            return []
        return self._what_is_due(now_s)

    def status(self, now_s: float) -> JobStatus:
        """Return the job as a console sees it."""
        ranks = self.ranks
        return JobStatus(
            job_id=self.job_id,
            attempt=self.attempt,
            state=self.state,
            state_s=max(0.0, now_s - self.since_s),
            world_size=self.world_size,
            num_nodes=1,
            node_rank=0,
            first_rank=ranks[0],
            local_world_size=len(ranks),
            exit_code=self.exit_code,
            detail=self._detail(now_s),
            root_cause=self.failure.as_root_cause(now_s) if self.failure else None,
            age_s=max(0.0, now_s - self.started_s),
            stop_s=None if self._stop_began_s is None else max(0.0, now_s - self._stop_began_s),
            ranks=ranks,
            unprobed=self._why_mute(),
        )

    def validate(self) -> None:
        """Assert what holds after every event."""
        assert self.members
        assert all(0 <= rank < self.world_size for rank in self.members)
        running = [member.pid for member in self.members.values() if not member.has_ended]
        assert len(running) == len(set(running))
        assert not (self.has_ended and running)
        assert self.exit_code is None or self.has_ended

    def _what_is_due(self, now_s: float) -> list[Action]:
        due = []
        while self._due and self._due[0][0] <= now_s:
            at_s, action = self._due.popleft()
            due.append(action)
            if action is Action.KILL:
                self._due.append((max(now_s, at_s) + GRACE_S, Action.KILL))
        return due

    def _note_interrupt(self, launcher_code: int | None, idle_s: float) -> bool:
        """Begin to stop if SIGINT has ended this job's ranks here or its launcher, and nothing has failed by itself.

        Ranks of `torch.multiprocessing` get SIGINT also when their launcher is killed (torch 2.13, spawn.py, `_wrap`).

        Args:
            launcher_code: Exit code of the launcher, None while it runs.
            idle_s: Time at which the last rank ended.
        """
        if self.is_stopping:
            return False
        by_launcher = launcher_code in {-Signals.SIGINT, INTERRUPTED_CODE}
        ranks = {rank: one.interrupted_s for rank, one in self.members.items() if one.interrupted_s is not None}
        began_s = min(ranks.values(), default=idle_s)
        failed = [member for member in self.members.values() if member.has_failed]
        # A launcher that is a rank has its end.
        signals = {None, Signals.SIGINT, Signals.SIGTERM, *(member.exit.signal for member in failed if member.exit)}
        is_launcher_killed = launcher_code is not None and launcher_code < 0 and -launcher_code not in signals
        by_others = [member for member in failed if member.interrupted_s is None]
        has_failure = is_launcher_killed or not all(member.follows(began_s) for member in by_others)
        if has_failure or not (ranks or by_launcher):
            return False
        who = "" if by_launcher or ranks.keys() == self.members.keys() else f": {_ranks_text(sorted(ranks))}"
        self.is_interrupted, self.failure, self.cause = True, None, f"interrupted by SIGINT{who}"
        # Consoles date an end and its beginning by different reports.
        self._go(JobState.STOPPING, min([began_s, *(member.ended_s for member in failed)]) - TOGETHER_S)
        return True

    def _end(self, exit_code: int | None, now_s: float) -> None:
        self.exit_code = exit_code
        was_stopping = self.is_stopping
        has_failed = any(member.has_failed for member in self.members.values()) or exit_code not in {0, None}
        self._go(JobState.STOPPED if was_stopping else JobState.FAILED if has_failed else JobState.SUCCEEDED, now_s)
        if self.state is JobState.FAILED and not self.cause:
            self.cause = launcher_end_text(LauncherFailed(exit_code))

    def _go(self, state: JobState, now_s: float) -> None:
        if self.state is not state:
            self.state, self.since_s = state, now_s
            if state is JobState.STOPPING:
                self._stop_began_s = now_s

    def _why_mute(self) -> str:
        """Return why ranks have no probe: `python -I`, or `rank 1: python -I; rank 3: torch not imported`."""
        ranks: dict[str, list[int]] = {}
        for rank, member in sorted(self.members.items()):
            if member.why_mute:
                ranks.setdefault(member.why_mute, []).append(rank)
        if len(ranks) <= 1:
            return "".join(ranks)
        return "; ".join(f"{_ranks_text(of)}: {why}" for why, of in ranks.items())[:MAX_WHY_CHARS]

    def _detail(self, now_s: float) -> str:
        if self.has_ended or self.cause:
            return self.cause or _LEFT * self.leaves_launcher
        if self.is_stopping and self._due:
            due_s, action = self._due[0]
            what = {
                Action.END_LAUNCHER: "SIGTERM",
                Action.END_RANKS: "SIGTERM for each rank",
                Action.KILL: "SIGKILL",
            }[action]
            left = f"; {_LEFT}" * self.leaves_launcher
            return f"stopping; {what} in {max(0.0, due_s - now_s):.0f} s{left}"
        if self._rival is not None and now_s - self._rival[0] < RIVAL_S:
            _, rank, pid = self._rival
            return f"two processes report as rank {rank}: {self.members[rank].pid}, and {pid}, which is left out"
        if self._idle_since_s is not None and now_s - self._idle_since_s > LAUNCHER_END_S:
            return "all its ranks here have ended; their launcher has not"
        return ""


def _ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
