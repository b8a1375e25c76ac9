"""A rank that runs a generated program by the rules of gloo or of NCCL, watched by the real core of the probe.

What NCCL's recorder holds is written as torch does (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and
FlightRecorderDetail.hpp, torch 2.6 to 2.13): see `ddpcore.probe.gpu`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from agent.wire.reports import ProcessState
from ddpcore.probe.samples import BarrierMark, CallArguments, CounterKey, MainLook, RecorderEntry, StepEnd, StepMark
from ddpcore.wire import (
    DEFAULT_GROUP,
    FIRST_GROUP,
    PeerCall,
    PeerWait,
    Phase,
)
from tests.corpus.generator.exchange import TRANSFERS
from tests.corpus.generator.frames import (
    C10D,
    CALL_FRAMES,
    END_FRAMES,
    MEETING_FRAMES,
    STUCK_FRAMES,
    STUCK_LINE,
    WORK_FRAMES,
    look_at,
)
from tests.corpus.generator.gpu import Gpu
from tests.corpus.generator.program import (
    GATE,
    Collective,
    Event,
    Harm,
    Meet,
    ReadLoss,
    Semantics,
    Settle,
    Shape,
    Transfer,
)
from tests.support.sim_program import PROGRAM_FILE, BeginStep, EndStep, Work
from tests.support.sim_rank import CLOCK_S, RING, Meetings, SimRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpcore.probe.stack import StackLine
    from tests.corpus.generator.exchange import Exchange, Operation

DTYPES = {2: "Half", 4: "Float", 8: "Double"}
WATCHDOG_S = 0.1
"""NCCL's watchdog looks so often at what is over (kWatchdogThreadSleepMillis); the recorder knows no earlier."""
FOR_EVER_S = 1e12
LAUNCH_SHARE = 0.1
"""Of a piece of GPU work that the main thread takes to launch it."""
GPU_PHASES = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER})


class StoryRank(SimRank):
    """One rank of a story; the events of its program may hold `Harm`."""

    def __init__(self, rank: int, shape: Shape, events: Iterator[Event], job: tuple[str, int, int]) -> None:
        super().__init__(rank, rank % shape.ranks_per_node, shape.world_size, lambda _: iter(()), job)
        self._shape = shape
        self._events = events
        self._doing_now: Event | None = None
        self._gpu = Gpu(rank) if shape.semantics is Semantics.NCCL else None
        self._unsettled: list[Operation] = []
        self._awaited: list[Operation] = []
        self.blocked_s: float | None = None
        """Since when the main thread waits for other ranks."""
        self._records: deque[tuple[RecorderEntry, list[Operation]]] = deque(maxlen=RING)
        self._pending: dict[str, list[tuple[int, list[Operation]]]] = {}
        """Of each group what was called and is not known to be over, with the numbers that the counters show."""
        self._num_transfers = 0
        """`p2p_seq_id`: those of a batch are one."""
        self._called: dict[str, int] = {}
        self._drag = dict.fromkeys(Phase, 1.0)
        self._stuck_in = ""
        self._file_blocks = False
        self.harms: list[tuple[float, Harm]] = []
        """What has struck it, and when."""
        self._now_s = 0.0
        self._peer_calls: dict[int, PeerCall] = {}
        """Transfers that are not known to be over."""
        self.due_s = 0.0
        """When its main thread or its GPU has something to do, if nobody else does anything."""
        self.probe_due_s = 0.0
        self._base_drag = 1 + shape.uneven * rank / max(1, shape.world_size - 1)

    # What the cluster asks.

    @property
    def process(self) -> ProcessState:
        """What the kernel says of the main thread."""
        return ProcessState.BLOCKED if self._file_blocks else super().process

    def waits_in(self, now_s: float) -> list[Operation]:
        """Return the operations that hold the rank up now: those of its main thread, or the one its GPU runs."""
        if not self.is_alive or self.failure is not None:
            return []
        waits = self._awaited if self._gpu is None else [*self._gpu.running(), *self._awaited]
        return [operation for operation in waits if not operation.is_done(self.rank, now_s)]

    def first_pending(self, now_s: float) -> list[Operation]:
        """Return the first call of each group that is not over."""
        if not self.is_alive or self._gpu is None:
            return []
        first: list[Operation] = []
        for some in self._pending.values():
            open_ones = (one for _, calls in some for one in calls if not one.is_done(self.rank, now_s))
            first += [operation for operation in [next(open_ones, None)] if operation is not None]
        return first

    def plan(self) -> float:
        """Return `due_s`, worked out anew."""
        own_s = float("inf") if self.is_stuck or self.finished_s is not None else self._main_due_s()
        self.due_s = own_s if self._gpu is None or not self.is_alive else min(own_s, self._gpu.due_s())
        return self.due_s

    def _main_due_s(self) -> float:
        if self.blocked_s is None:
            return self._free_s
        if self._waits_for_gpu:
            assert self._gpu is not None
            idle_s = self._gpu.idle_s()
            return self._gpu.due_s() if idle_s is None else idle_s
        return max((operation.done_s.get(self.rank, FOR_EVER_S) for operation in self._awaited), default=0.0)

    @property
    def _waits_for_gpu(self) -> bool:
        return self._gpu is not None and not self._awaited

    # Its main thread.

    def advance(self, meetings: Exchange, now_s: float, noise: float) -> bool:  # type: ignore[override] # its own rules
        """Run the main thread, and the GPU, up to now; return whether anything has happened."""
        if not self.has_joined or not self.is_alive:
            return False
        has_moved = self._gpu is not None and self._gpu.advance(meetings, now_s)
        for _ in range(10_000):
            if self.is_stuck or self.finished_s is not None or self.failure is not None:
                return has_moved
            if self.blocked_s is not None and not self._is_through(now_s):
                return has_moved
            if self._free_s > now_s:
                return has_moved
            has_moved = True
            event = next(self._events, None)
            if event is None:
                self.finished_s = self._free_s
                return True
            self._begin(event, meetings, noise)
            if self._gpu is not None:
                self._gpu.advance(meetings, now_s)
        raise AssertionError("a program that takes no time")

    def _begin(self, event: Event, exchange: Exchange, noise: float) -> None:
        self._doing_now = event
        if isinstance(event, Work):
            self._work(event, noise)
        elif isinstance(event, Collective):
            self._collective(event, exchange)
        elif isinstance(event, Transfer):
            self._transfer(event, exchange)
        elif isinstance(event, Meet):
            self._meet(event, exchange)
        elif isinstance(event, Settle):
            self._settle()
        elif isinstance(event, ReadLoss):
            if self._gpu is not None:
                self.blocked_s = self._free_s
        elif isinstance(event, BeginStep):
            self.begun_step = event.step
        elif isinstance(event, EndStep):
            first = self._step.loss_first if self._step else event.loss
            is_counted = not self._shape.reports_steps
            self._step = StepMark(event.step, event.loss, event.epoch, first, event.step, is_counted)
            self._step_ends.append(StepEnd(event.step, int(1e6 * (self._free_s + CLOCK_S))))
        else:
            self.harm(event)

    def _work(self, work: Work, noise: float) -> None:
        factor = self._base_drag * self._drag[work.phase] * (1 + noise * self._random.uniform(-1, 1))
        takes_s = work.for_s * factor
        if self._gpu is not None and work.phase in GPU_PHASES:
            self._gpu.launch(takes_s, self._free_s)
            self._free_s += LAUNCH_SHARE * takes_s
            if self._gpu.is_full:
                self.blocked_s = self._free_s
        else:
            self._free_s += takes_s

    def _collective(self, call: Collective, exchange: Exchange) -> None:
        seq = self._called[call.group] = self._called.get(call.group, 0) + 1
        operation = exchange.called(self.rank, seq, call)
        self._record(call, seq, operation)
        if self._gpu is not None:
            self._gpu.enqueue([operation], self._free_s)
            if call.op == "barrier":
                # The only collective whose wait() stops the main thread (WorkNCCL::synchronizeInternal).
                self.blocked_s = self._free_s
            return
        exchange.came(self.rank, operation, self._free_s)
        self._await(operation, call.waits)

    def _transfer(self, transfer: Transfer, exchange: Exchange) -> None:
        operation = exchange.transferred(self.rank, transfer)
        key = (transfer.op, transfer.peer, 0)
        number = self._peer_numbers[key] = self._peer_numbers.pop(key, 0) + 1
        if self._gpu is None:
            # torch's recorder has gloo's transfers not at all.
            self._peer_calls[id(operation)] = PeerCall(transfer.op, transfer.peer, DEFAULT_GROUP, 0, number)
            exchange.came(self.rank, operation, self._free_s)
            self._await(operation, transfer.waits)
            return
        if not self._unsettled:
            self._num_transfers += 1
        self._record_transfer(transfer, [operation] if transfer.waits else [])
        if transfer.waits:
            self._gpu.enqueue([operation], self._free_s)
        else:
            self._unsettled.append(operation)

    def _await(self, operation: Operation, waits: bool) -> None:
        if waits:
            self._awaited = [operation]
            self.blocked_s = self._free_s
        else:
            self._unsettled.append(operation)

    def _meet(self, meet: Meet, exchange: Exchange) -> None:
        key = meet.group or meet.op
        seq = self._called[key] = self._called.get(key, 0) + 1
        if meet.group.startswith(FIRST_GROUP):
            members = exchange.members(meet.group)
            self._firsts[meet.group] = BarrierMark(meet.label, seq, self._free_s, False, meet.group, members)
        elif meet.group:
            self._barrier = BarrierMark(meet.label, seq, self._free_s, is_over=False)
        operation = exchange.meet(self.rank, seq, meet)
        exchange.came(self.rank, operation, self._free_s)
        self._await(operation, waits=True)

    def _end_meeting(self, meet: Meet) -> None:
        if meet.group.startswith(FIRST_GROUP):
            self._firsts[meet.group] = self._firsts[meet.group]._replace(is_over=True)
        elif self._barrier is not None and meet.group:
            self._barrier = self._barrier._replace(is_over=True)

    def _settle(self) -> None:
        if not self._unsettled:
            return
        called, self._unsettled = self._unsettled, []
        if self._gpu is not None:
            if any(operation.group == TRANSFERS for operation in called):
                self._record_transfer(None, called)
            self._gpu.enqueue(called, self._free_s)
        else:
            self._awaited = called
            self.blocked_s = self._free_s

    def _is_through(self, now_s: float) -> bool:
        if self._gpu is not None and not self._awaited:
            over_s = self._gpu.room_s(now_s) if isinstance(self._doing_now, Work) else self._gpu.idle_s()
        else:
            dones = [operation.done_s.get(self.rank) for operation in self._awaited]
            over_s = None if None in dones else max(done for done in dones if done is not None)
        if over_s is None or over_s > now_s:
            return False
        self._free_s = max(self._free_s, over_s)
        for operation in self._awaited:
            self._peer_calls.pop(id(operation), None)
        if isinstance(self._doing_now, Meet):
            self._end_meeting(self._doing_now)
        self._awaited = []
        self.blocked_s = None
        return True

    # What strikes it.

    def fail(self, end: tuple[int | None, int | None, str], ends_s: float) -> None:
        """Raise out of what it waits in: that is over for it, and its process ends later."""
        self._raised_in = self._reader.read(self._stack()).phase
        for operation in self._awaited:
            operation.done_s.setdefault(self.rank, self._now_s)
        self._awaited, self.blocked_s, self.failure = [], None, (ends_s, end)
        self.probe_due_s = 0.0

    def harm(self, harm: Harm) -> None:
        """Let a fault strike, at the time of the main thread."""
        self.harms.append((self._free_s, harm))
        if harm.kind in STUCK_FRAMES or harm.kind in END_FRAMES:
            self._stuck_in = harm.kind
            self._file_blocks = harm.kind == "file"
            self._free_s += harm.value
        elif harm.kind == "healed":
            self._stuck_in, self._file_blocks = "", False
        elif harm.kind == "slow":
            self._drag = dict.fromkeys(Phase, harm.value)
        elif harm.kind.startswith("slow "):
            self._drag = dict.fromkeys(Phase, 1.0) | {Phase(harm.kind.removeprefix("slow ")): harm.value}
        elif harm.kind == "raise":
            self.end = (1, None, "ValueError: boom")
        elif harm.kind in ("raise slowly", "leave"):
            error = "ValueError: boom" if harm.kind != "leave" else ""
            self.fail((1 if error else 0, None, error), self._free_s + harm.value)
        elif harm.kind == "kernel":
            assert self._gpu is not None
            self._gpu.launch(FOR_EVER_S, self._free_s)
        elif harm.kind in ("exit", "signal", "oom", "freeze", "gil"):
            self.strike(harm.kind, harm.value)

    # What its probe sees.

    @property
    def is_idle(self) -> bool:
        """Whether it keeps no core busy."""
        return self.is_frozen or bool(self._stuck_in)

    @property
    def _is_at_work(self) -> bool:
        return self.blocked_s is None

    def _record(self, call: Collective, seq: int, operation: Operation) -> None:
        recorder, group = self._shape.semantics.value, call.group
        enqueued, completed = self._counts.get(group, (0, 0))
        number = enqueued + 1 if self._gpu is None else seq
        self._counts[group] = (number, completed)
        self._pending.setdefault(group, []).append((number, [operation]))
        is_barrier = call.op == "barrier"
        entry = RecorderEntry(
            key=(recorder, list(self._counts).index(group)),
            group=group,
            seq=seq,
            op=f"{recorder}:{'all_reduce_barrier' if is_barrier and recorder == 'nccl' else call.op}",
            sizes=() if is_barrier and recorder == "gloo" else ((call.elements,),),
            is_p2p=False,
            is_retired=False,
            called_us=int(1e6 * (self._free_s + CLOCK_S)),
            dtypes=() if is_barrier and recorder == "gloo" else (DTYPES[call.element_bytes],),
            p2p_seq=self._num_transfers,
            # Of calls by the program itself (`ddpcore.probe.program_calls`), not of DDP's.
            root=call.root if self._gpu is not None and call.root >= 0 and call.phase is Phase.BARRIER else None,
        )
        self._records.append((entry, [operation]))

    def _record_transfer(self, transfer: Transfer | None, operations: list[Operation]) -> None:
        """Record a send or a receive, of a batch without what it waits for, or the end of a batch."""
        op = "coalesced"
        if transfer is not None:
            op = f"{transfer.op} {self.rank}{'->' if transfer.is_send else '<-'}{transfer.peer}"
        if operations:
            # The counters show the number of the last call, whichever of the two kinds it was.
            self._counts[DEFAULT_GROUP] = (self._num_transfers, self._counts.get(DEFAULT_GROUP, (0, 0))[1])
            self._pending.setdefault(DEFAULT_GROUP, []).append((self._num_transfers, operations))
        entry = RecorderEntry(
            key=("nccl", 0),
            group=DEFAULT_GROUP,
            seq=self._called.get(DEFAULT_GROUP, 0),
            op=f"nccl:{op}",
            sizes=((transfer.elements,),) if transfer is not None else (),
            is_p2p=transfer is not None,
            is_retired=False,
            called_us=int(1e6 * (self._free_s + CLOCK_S)),
            dtypes=("Float",) if transfer is not None else (),
            p2p_seq=self._num_transfers,
        )
        self._records.append((entry, operations))

    def _counters(self, now_s: float) -> dict[CounterKey, tuple[int, int]]:
        known_s = self._known_s(now_s)
        for group, pending in self._pending.items():
            if not pending:
                continue
            enqueued, completed = self._counts[group]
            over = [number for number, calls in pending if all(one.is_done(self.rank, known_s) for one in calls)]
            if over:
                is_open = [not all(one.is_done(self.rank, known_s) for one in calls) for _, calls in pending]
                self._pending[group] = [one for one, is_one_open in zip(pending, is_open, strict=True) if is_one_open]
                # gloo runs two at once. NCCL's end in order, and the counters show the last one.
                self._counts[group] = (enqueued, max(completed, *over) if self._gpu is None else over[-1])
        recorder = self._shape.semantics.value
        return {(recorder, index): counts for index, counts in enumerate(self._counts.values())}

    def _known_s(self, now_s: float) -> float:
        return now_s if self._gpu is None else WATCHDOG_S * int(now_s / WATCHDOG_S)

    def _entries(self) -> list[RecorderEntry]:
        return [msgspec.structs.replace(entry, **self._progress(operations)) for entry, operations in self._records]

    def _progress(self, operations: list[Operation]) -> dict[str, Any]:
        """Return what the recorder has of a call beside what was recorded at first."""
        has_begun = all(self.rank in operation.come_s for operation in operations) and bool(operations)
        known: dict[str, Any] = {"has_begun": has_begun} if self._gpu is not None and self._shape.is_timed else {}
        if operations and all(operation.is_done(self.rank, self._now_s) for operation in operations):
            known["is_retired"] = True
            over_s = max(operation.done_s[self.rank] for operation in operations)
            # The watchdog reads how long it took.
            if "has_begun" in known and over_s <= self._known_s(self._now_s):
                known["on_gpu_us"] = int(1e6 * (over_s - min(one.come_s[self.rank] for one in operations)))
        return known

    def _arguments(self) -> CallArguments | None:
        call = self._doing_now
        if not isinstance(call, Collective) or call.phase is not Phase.BARRIER or self.blocked_s is None:
            return None
        reduce_op = call.reduce_op if call.op in ("all_reduce", "reduce") else ""
        if call.root < 0 and not reduce_op:
            return None
        return CallArguments(call.op, call.root if call.root >= 0 else None, None, reduce_op)

    def report(self, now_s: float) -> bytes | None:
        """Let the probe look and return its datagram."""
        self._now_s = now_s
        datagram = super().report(now_s)
        self.probe_due_s = float("inf") if self.is_stuck else now_s + self._pace.pause_s(now_s)
        return datagram

    def know_groups(self, meetings: Meetings | Exchange) -> None:
        """Let the rank know who belongs to which of its groups."""
        self._members = {name: meetings.members(name) for name in (DEFAULT_GROUP, *meetings.groups)}

    def _main(self, now_s: float) -> MainLook:
        """Return where the main thread stands, as `ddpcore.probe.main_thread` finds it."""
        event = self._doing_now
        is_still = self._probe.is_still(now_s)
        if isinstance(event, Harm):
            return look_at(event.kind, is_still=is_still)
        if isinstance(event, Meet) and is_still and self.blocked_s is not None:
            return MainLook(-1, None if event.op == GATE else PeerWait([PeerCall(event.op, None)]))
        mark = (-1 if self.blocked_s is not None else int(1000 * now_s)) if is_still else 0
        return MainLook(mark, self._peer_wait(now_s))

    def _peer_wait(self, now_s: float) -> PeerWait | None:
        if self.blocked_s is None or not isinstance(self._doing_now, Transfer | Settle):
            return None
        waits = [operation for operation in self._awaited if not operation.is_done(self.rank, now_s)]
        calls = [self._peer_calls[id(operation)] for operation in waits if id(operation) in self._peer_calls]
        return PeerWait(calls) if calls else None

    def _marks(self) -> tuple[Phase, ...]:
        event = self._doing_now
        if self._shape.reports_steps and isinstance(event, Work) and self.blocked_s is None:
            return (event.phase,)
        return ()

    def _stack(self) -> list[StackLine]:
        if not self.has_joined or self._doing_now is None:
            return super()._stack()
        event = self._doing_now
        outer = [(PROGRAM_FILE, 200, "main")]
        if isinstance(event, Harm):
            if event.kind in END_FRAMES:
                return [END_FRAMES[event.kind]]
            return [*STUCK_FRAMES.get(event.kind, []), (PROGRAM_FILE, STUCK_LINE, "helper"), *outer]
        if isinstance(event, (BeginStep, EndStep)):
            return outer
        return [*self._torch_frames(event), (PROGRAM_FILE, event.line, event.function), *outer]

    def _torch_frames(self, event: Work | Collective | Transfer | Meet | Settle | ReadLoss) -> list[StackLine]:
        if isinstance(event, Work):
            return WORK_FRAMES.get(event.phase, [])
        if self.blocked_s is None or isinstance(event, ReadLoss):
            return []
        if isinstance(event, Transfer):
            return [(C10D, 2610 if event.is_send else 2660, event.op)]
        if isinstance(event, Meet):
            return MEETING_FRAMES[event.op]
        if isinstance(event, Collective) and event.phase is Phase.BARRIER:
            return [(C10D, 4823, event.op)]
        return CALL_FRAMES[event.phase]
