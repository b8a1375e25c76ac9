"""A simulated rank: a process with a main thread that runs a program and a probe that watches it.

The probe is the real core (`ddpcore.probe.rank_state`); what the shell around it would read from torch is made up
here.
"""

from __future__ import annotations

from collections import deque
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from agent.wire.reports import ProcessState
from ddpcore.probe.progress import step_ages
from ddpcore.probe.rank_state import RankIdentity, RankState
from ddpcore.probe.reporting import Pace, tick_of
from ddpcore.probe.samples import (
    BarrierMark,
    CallArguments,
    CounterKey,
    GroupMembers,
    MainLook,
    RecorderDump,
    RecorderEntry,
    Sample,
    StepEnd,
    StepMark,
    Uncaught,
    is_gloo_pending,
)
from ddpcore.probe.stack import CodeRoots, StackLine, StackReader
from ddpcore.wire import (
    BARRIER_GROUP,
    FIRST_GROUP,
    MONITORED_BARRIER,
    ChildWait,
    ExitWait,
    GpuMemoryReport,
    PeerCall,
    PeerWait,
    Phase,
    Place,
    decode_report,
    encode_report,
)
from ddpcore.wire import RankReport as RankReport  # noqa: PLC0414 - for the simulation's other half
from tests.support.sim_program import (
    PROGRAM_FILE,
    Actions,
    BeginStep,
    Call,
    EndStep,
    Linger,
    Meeting,
    Peer,
    Program,
    WaitBehind,
    Work,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.node_state.observations import MemorySampled

TORCH = "/venv/torch/"
ROOTS = CodeRoots(torch=(TORCH,), ddpcore=("/venv/ddpcore/",), libraries=("/usr/lib/python3.11/", "/venv/"))
RING = 64
DUMP_COST_S = 0.0005
LATENCY_S = 0.001
RAISED_LINE = 139
"""Of the program, at which its exceptions are raised."""
MAX_ACTIONS = 10_000
CLOCK_S = 1.7e9
"""Of the machines' wall clocks at the simulation's zero."""

_TORCH_FRAMES: dict[Phase, list[StackLine]] = {
    Phase.BACKWARD: [
        (TORCH + "autograd/graph.py", 869, "_engine_run_backward"),
        (TORCH + "_tensor.py", 647, "backward"),
    ],
    Phase.BARRIER: [(TORCH + "distributed/distributed_c10d.py", 4823, "barrier")],
    Phase.JOINING: [(TORCH + "distributed/distributed_c10d.py", 1769, "init_process_group")],
}


class Meetings:
    """The collectives of a job."""

    def __init__(self, groups: dict[str, tuple[int, ...]], world_size: int) -> None:
        self.groups = groups
        self._everybody = tuple(range(world_size))
        self.is_cut = False
        self._open: dict[tuple[str, int], Meeting] = {}

    def members(self, group: str) -> tuple[int, ...]:
        """Return who takes part."""
        return self.groups.get(group, self._everybody)

    def mend(self) -> None:
        """Let all complete again, those too that were made while the network was cut."""
        self.is_cut = False
        for meeting in self._open.values():
            meeting.is_cut = False

    def join_peer(self, rank: int, number: int, call: Peer, now_s: float) -> Meeting:
        """Let a rank make its half of a send and a receive."""
        pair = (rank, call.peer) if call.op == "send" else (call.peer, rank)
        meeting = self._open.setdefault((f"peers {pair} {call.tag}", number), Meeting(pair, is_of_peers=True))
        meeting.is_cut |= self.is_cut
        meeting.join(rank, now_s)
        return meeting

    def join(self, rank: int, seq: int, call: Call, now_s: float) -> Meeting:
        """Let a rank make its call."""
        meeting = self._open.setdefault((call.group, seq), Meeting(self.members(call.group)))
        meeting.is_cut |= self.is_cut
        meeting.join(rank, now_s, call)
        return meeting


class SimRank:
    """One rank; `advance` moves its main thread, `report` its probe."""

    memory: Callable[[float], MemorySampled] | None = None
    """What its node reads of its memory at a time; a constant while this is None."""

    drags: Mapping[Phase, float] = MappingProxyType({})
    """By which factor its work in a phase takes longer, for a reason that its probe does not know."""

    stands_before_joining = False
    """Until it comes to init_process_group, it stands at one line, rather than import one module after another."""

    leaving_code = 0
    """Of `sys.exit`."""

    _has_left = False
    """Its probe has sent its last report."""

    def __init__(
        self, rank: int, local_rank: int, world_size: int, program: Program, job: tuple[str, int, int]
    ) -> None:
        self.rank = rank
        self.local_rank = local_rank
        job_id, attempt, seed = job
        self.pid = 4000 + 100 * attempt + rank
        self.slow_factor = 1.0
        self.can_stop = True
        self.gpu_memory: tuple[GpuMemoryReport, ...] = ()
        self.is_frozen = self.holds_gil = self.is_blocked = False
        self.end: tuple[int | None, int | None, str] | None = None
        self.faults: dict[int, list[tuple[str, float]]] = {}
        self.altered: Call | None = None
        self.finished_s: float | None = None
        self.failure: tuple[float, tuple[int | None, int | None, str]] | None = None
        self._raised_in = Phase.OTHER
        """When the interpreter that an exception, or `sys.exit`, has begun to end is gone, and how it ends."""
        self.meeting: Meeting | None = None
        self.begun_step = 0
        self.has_come = False
        """It stands in init_process_group."""
        self.has_joined = False
        self.oom_kills = 0
        self._actions = Actions(program(rank))
        self._doing: Work | Peer | Linger | Call | WaitBehind | None = None
        self._behind: list[tuple[Call, int, Meeting]] = []
        """Calls that are under way behind the work, with their seqs."""
        self._free_s = 0.0
        self._random = Random(1000 * seed + rank)
        self._identity = RankIdentity(
            rank=rank, local_rank=local_rank, world_size=world_size, pid=self.pid, job_id=job_id, attempt=attempt
        )
        self._probe = RankState(self._identity)
        self._reader = StackReader(ROOTS)
        self._pace = Pace(self.rank)
        self._was_waiting = False
        self._seqs: dict[str, int] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._ring: deque[RecorderEntry] = deque(maxlen=RING)
        self._barrier: BarrierMark | None = None
        self._firsts: dict[str, BarrierMark] = {}
        self._step: StepMark | None = None
        self._peer_numbers: dict[tuple[str, int, int], int] = {}
        self._step_ends: deque[StepEnd] = deque(maxlen=RING)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.end is None

    @property
    def process(self) -> ProcessState:
        """What the kernel says."""
        if self.is_frozen:
            return ProcessState.FROZEN
        return ProcessState.BLOCKED if self.is_blocked else ProcessState.RUNNING

    @property
    def is_stuck(self) -> bool:
        """Whether its main thread cannot move."""
        return self.is_frozen or self.holds_gil or self.is_blocked or not self.is_alive

    @property
    def is_leaving(self) -> bool:
        """Whether its program is over and its process is not."""
        return self.failure is not None and self.is_alive

    @property
    def _is_at_work(self) -> bool:
        return self.meeting is None and not isinstance(self._doing, WaitBehind)

    @property
    def is_idle(self) -> bool:
        """Whether it keeps no core busy."""
        if self.stands_before_joining and not self.has_come:
            return True
        doing = self._doing
        return self.is_frozen or (isinstance(doing, Work) and doing.is_standing and not doing.is_computing)

    def begin(self, now_s: float) -> None:
        """Open the process group: from here on the program runs."""
        self.has_joined = True
        self._free_s = now_s

    def hold(self, for_s: float) -> None:
        """Push the end of what it does back by the time in which it could not move."""
        self._free_s += for_s

    def advance(self, meetings: Meetings, now_s: float, noise: float) -> bool:
        """Run the main thread up to now; return whether anything has happened."""
        if self.is_stuck or not self.has_joined or self.finished_s is not None or self.failure is not None:
            return False
        has_moved = False
        for _ in range(MAX_ACTIONS):
            if self.meeting is not None:
                if not self._has_met(now_s):
                    return has_moved
            elif isinstance(self._doing, WaitBehind) and self._behind:
                if not self._is_all_over(now_s):
                    return has_moved
            elif self._free_s > now_s:
                return has_moved
            has_moved = True
            if not self._next_action(meetings, noise) or self.is_stuck:
                return True
        raise AssertionError("a program that takes no time")

    def _has_met(self, now_s: float) -> bool:
        meeting, call = self.meeting, self._doing
        assert meeting is not None
        assert isinstance(call, Call | Peer)
        if not meeting.is_agreed():
            return False
        over_s = meeting.last_s + LATENCY_S
        if over_s > now_s:
            return False
        self._free_s = max(self._free_s, over_s)
        self.meeting = None
        if isinstance(call, Peer):
            pass
        elif call.group == BARRIER_GROUP:
            assert self._barrier is not None
            self._barrier = self._barrier._replace(is_over=True)
        elif call.group.startswith(FIRST_GROUP):
            self._firsts[call.group] = self._firsts[call.group]._replace(is_over=True)
        else:
            self._complete(call.group, self._seqs[call.group])
        return True

    def _complete(self, group: str, seq: int) -> None:
        enqueued, completed = self._counts[group]
        self._counts[group] = (enqueued, completed + 1)
        for place, entry in enumerate(self._ring):
            if (entry.group, entry.seq) == (group, seq):
                self._ring[place] = msgspec.structs.replace(entry, is_retired=True)

    def _is_all_over(self, now_s: float) -> bool:
        """Take what is over behind the work, and the time at which the last of it was."""
        while self._behind:
            call, seq, meeting = self._behind[0]
            over_s = meeting.last_s + LATENCY_S
            if not meeting.is_agreed() or over_s > now_s:
                return False
            if isinstance(self._doing, WaitBehind):
                self._free_s = max(self._free_s, over_s)
            self._complete(call.group, seq)
            self._behind.pop(0)
        return True

    def fail(self, end: tuple[int | None, int | None, str], ends_s: float) -> None:
        """Raise out of the collective that it waits in: it waits no more, and its process ends later."""
        assert isinstance(self._doing, Call)
        self._raised_in = self._reader.read(self._stack()).phase
        if self._doing.group in self._counts:
            enqueued, completed = self._counts[self._doing.group]
            self._counts[self._doing.group] = (enqueued, completed + 1)
            self._ring[-1] = msgspec.structs.replace(self._ring[-1], is_retired=True)
        self._leave(end, ends_s)

    def _leave(self, end: tuple[int | None, int | None, str], ends_s: float) -> None:
        self.meeting, self._doing, self.failure = None, None, (ends_s, end)

    def _next_action(self, meetings: Meetings, noise: float) -> bool:
        action = self._actions.take()
        if action is None:
            self.finished_s = self._free_s
        elif isinstance(action, Work):
            self._doing = action
            factor = self.slow_factor * self.drags.get(action.phase, 1.0) * (1 + noise * self._random.uniform(-1, 1))
            self._free_s += action.for_s * factor
        elif isinstance(action, Linger):
            self._doing = action
            self._free_s += action.for_s
        elif isinstance(action, Peer):
            self._doing = action
            key = (action.op, action.peer, action.tag)
            number = self._peer_numbers[key] = self._peer_numbers.pop(key, 0) + 1
            self.meeting = meetings.join_peer(self.rank, number, action, self._free_s)
        elif isinstance(action, Call):
            self._call(self.altered or action, meetings)
            self.altered = None
        elif isinstance(action, WaitBehind):
            self._doing = action
        elif isinstance(action, BeginStep):
            self.begun_step = action.step
            for kind, value in self.faults.pop(action.step, ()):
                self.strike(kind, value)
        else:
            assert isinstance(action, EndStep)
            last = self._step or StepMark(action.step, None, action.epoch, None, action.step - 1)
            self._step = last.followed_by(action.step, action.loss, action.epoch)
            self._step_ends.append(StepEnd(action.step, int(1e6 * (self._free_s + CLOCK_S))))
        return action is not None and not self.is_leaving

    def _call(self, call: Call, meetings: Meetings) -> None:
        self._doing = call
        seq = self._seqs[call.group] = self._seqs.get(call.group, 0) + 1
        if call.group == BARRIER_GROUP:
            self._barrier = BarrierMark(call.label, seq, self._free_s, is_over=False)
        elif call.group.startswith(FIRST_GROUP):
            members = meetings.groups.get(call.group, ())
            self._firsts[call.group] = BarrierMark(call.label, seq, self._free_s, False, call.group, members)
        else:
            enqueued, completed = self._counts.get(call.group, (0, 0))
            self._counts[call.group] = (enqueued + 1, completed)
            key = ("gloo", list(self._counts).index(call.group))
            called_us = int(1e6 * (self._free_s + CLOCK_S))
            self._ring.append(
                RecorderEntry(
                    key,
                    call.group,
                    seq,
                    f"gloo:{call.op}",
                    call.sizes,
                    False,
                    False,
                    called_us,
                    (call.dtype,) * len(call.sizes),
                )
            )
        meeting = meetings.join(self.rank, seq, call, self._free_s)
        if call.is_behind:
            self._behind.append((call, seq, meeting))
        else:
            self.meeting = meeting

    def strike(self, kind: str, value: float) -> None:
        """Do harm to the rank."""
        if kind == "freeze":
            self.is_frozen = True
        elif kind == "thaw":
            self.is_frozen = False
        elif kind == "slow":
            self.slow_factor = value
        elif kind == "gil":
            self.holds_gil = bool(value)
        elif kind == "block":
            self.is_blocked = bool(value)
        elif kind == "oom":
            self.end, self.oom_kills = (None, 9, ""), 1
        elif kind == "signal":
            self.end = (None, int(value), "")
        elif kind in {"raise", "leave"}:
            error = "ValueError: boom" if kind == "raise" else ""
            self._leave((1 if error else self.leaving_code, None, error), self._free_s + value)
        else:
            assert kind == "exit"
            self.end = (int(value), None, "" if value == 0 else "ValueError: boom")

    def report(self, now_s: float) -> bytes | None:
        """Let the probe look and return its datagram, None while it cannot run or has nothing to say."""
        is_last = self.failure is not None
        if self.is_stuck or self._has_left or (self._pace.pause_s(now_s) > 0.0 and not is_last):
            return None
        if self._is_at_work:
            self._is_all_over(now_s)
        counters = self._counters(now_s)
        if not self._pace.is_sample_due(now_s) and not is_last:
            self._pace.looked_again()
            named_barriers = (self._barrier, *self._firsts.values())
            if self._probe.has_stepped(self._step) or not self._probe.still_pends(counters, named_barriers):
                return None
        counted = [*self._peer_numbers.items()][::-1]
        self._probe.observe(
            Sample(
                now_s,
                counters,
                self._reader.read(self._stack()),
                self.has_joined,
                step=self._step,
                step_ages=step_ages(self._step, tuple(self._step_ends), int(1e6 * (now_s + CLOCK_S))),
                phases=self._marks(),
                barrier=self._barrier,
                firsts=tuple(self._firsts.values()),
                slow_factor=self.slow_factor,
                can_stop=self.can_stop,
                gpu_memory=self.gpu_memory,
                is_at_work=self._is_at_work and is_gloo_pending(counters),
                tick=tick_of(now_s + CLOCK_S),
                main=self._main(now_s),
                peer_calls=tuple(PeerCall(op, peer, "0", tag, number) for (op, peer, tag), number in counted),
                num_peer_calls=sum(self._peer_numbers.values()),
                uncaught=self._uncaught(),
            )
        )
        if self._probe.wants_dump(now_s) or (is_last and self._probe.has_groups):
            members = {name: GroupMembers(self._members[name]) for name in self._counts}
            self._probe.learn(RecorderDump(self._entries(), counters), members, DUMP_COST_S, list(self._step_ends))
        if self._probe.wants_arguments:
            self._probe.learn_arguments(self._arguments())
        self._probe.validate()
        is_waiting = self._probe.is_waiting
        self._pace.end_sample(now_s, now_s + CLOCK_S, is_pending=self._probe.is_pending, is_waiting=is_waiting)
        if not self._pace.is_report_due(now_s) and is_waiting == self._was_waiting and not is_last:
            return None
        self._has_left = is_last
        self._pace.reported(now_s)
        self._was_waiting = is_waiting
        datagram = encode_report(self._probe.report(probe_cpu_s=now_s / 1000, is_ending=is_last))
        assert decode_report(datagram).rank == self.rank
        return datagram

    def _uncaught(self) -> Uncaught | None:
        error = "" if self.failure is None else self.failure[1][2]
        return Uncaught(error, Place(PROGRAM_FILE, RAISED_LINE, "train_step"), self._raised_in) if error else None

    def _main(self, now_s: float) -> MainLook:
        doing = self._doing
        if isinstance(doing, Peer) and self.meeting is not None:
            number = self._peer_numbers[doing.op, doing.peer, doing.tag]
            wait = PeerWait([PeerCall(doing.op, doing.peer, "0", doing.tag, number)])
            return MainLook(-1, wait) if self._probe.is_still(now_s) else MainLook(0, wait)
        if not self._probe.is_still(now_s):
            return MainLook()
        if isinstance(doing, Work) and doing.is_in_monitored_barrier:
            return MainLook(-1, PeerWait([PeerCall(MONITORED_BARRIER, None)]))
        if isinstance(doing, Work) and doing.is_standing:
            return MainLook(
                -doing.line, child_wait=ChildWait(doing.child_pid, "loader worker") if doing.child_pid else None
            )
        if isinstance(doing, Linger):
            place = Place(PROGRAM_FILE, doing.line, "run")
            return MainLook(-1, exit_wait=ExitWait("thread", doing.thread, place))
        return MainLook(-1 if self.stands_before_joining and not self.has_come else int(1000 * now_s))

    def _arguments(self) -> CallArguments | None:
        call = self._doing
        if not isinstance(call, Call) or self.meeting is None or (call.root is None and not call.reduce_op):
            return None
        return CallArguments(call.op, call.root, None, call.reduce_op)

    def know_groups(self, meetings: Meetings) -> None:
        """Let the rank know who belongs to which group."""
        self._members = {name: meetings.members(name) for name in ("0", *meetings.groups)}

    def _counters(self, now_s: float) -> dict[CounterKey, tuple[int, int]]:
        del now_s
        return {("gloo", index): counts for index, counts in enumerate(self._counts.values())}

    def _entries(self) -> list[RecorderEntry]:
        return list(self._ring)

    def _marks(self) -> tuple[Phase, ...]:
        return (self._doing.phase,) if isinstance(self._doing, Work) and self.meeting is None else ()

    def _stack(self) -> list[StackLine]:
        outer = [(PROGRAM_FILE, 200, "main")]
        if not self.has_joined:
            inner = _TORCH_FRAMES[Phase.JOINING] if self.has_come else []
            return [*inner, (PROGRAM_FILE, 80 if self.has_come else 60, "main")]
        doing = self._doing
        if doing is None or isinstance(doing, Linger):
            return outer
        is_inside = (isinstance(doing, Call | Peer) and self.meeting is not None) or isinstance(doing, WaitBehind)
        inner = _TORCH_FRAMES[doing.phase] if is_inside else []
        return [*inner, (PROGRAM_FILE, doing.line, doing.function), *outer]
