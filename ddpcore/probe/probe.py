"""The probe: one daemon thread that reports what this rank does, and the marks a program may set.

The thread never raises into training, never blocks on a socket, shares no lock with training and logs nothing. Four
times a second, ten times while the rank waits in a collective, it reads the recorder's counters and the main thread's
stack and folds them in `rank_state`. Four times a second, and at once when a wait begins or ends, it sends one
datagram. A report that does not get through leaves a gap in `report_seq` and is forgotten: the next one holds it all
again.

What the main thread reports (`report_step`, `phase`, barriers) it leaves in `marks`, as whole immutable values.
"""

from __future__ import annotations

import atexit
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, SupportsFloat, assert_never

import msgspec

from ddpcore.errors import UnknownPhaseError
from ddpcore.probe.faults import NEED_TORCH, StepFaults, pause, strike
from ddpcore.probe.gpu import GpuMemory
from ddpcore.probe.main_thread import MainThread, MainWaits
from ddpcore.probe.process_facts import InterpreterWaits, Surroundings, signals_blocked
from ddpcore.probe.program_calls import PeerCalls, arguments_of, call_roots
from ddpcore.probe.progress import OptimizerSteps, step_ages
from ddpcore.probe.rank_state import RankIdentity, RankState
from ddpcore.probe.reporting import Pace, ReportSocket, file_of, tick_of
from ddpcore.probe.requests import RequestSocket, StackDumps
from ddpcore.probe.samples import Sample, StepEnd, StepMark, is_gloo_pending, to_float, to_int
from ddpcore.probe.stack import StackWalk, stack_of
from ddpcore.wire import (
    MAX_REPORT_BYTES,
    DumpStacks,
    Fault,
    FaultKind,
    Phase,
    ReportNow,
    SlowDown,
    StopTraining,
    StrikeAt,
    encode_report,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ddpcore.env import ProbeEnv, TorchrunEnv
    from ddpcore.probe.samples import BarrierMark, Recorder, TrainingMark, Uncaught
    from ddpcore.probe.stack import CodeRoots, StackLine
    from ddpcore.wire import GpuMemoryReport, ProbeRequest

MAX_FAILED_TICKS = 20
"""Ticks that may fail in a row before the probe gives up: a torch it does not understand costs no more time."""

EXIT_GRACE_S = 0.1
"""How long the interpreter's exit gives gloo's threads to let go of the last collective. They need the interpreter for
it, and where it has ended torch 2.13 aborts a rank that has done all its work ("terminate called without an active
exception", half of all runs with 8 ranks on 2 cores that end with a collective)."""

EXIT_PATIENCE_S = 0.5
"""Seconds that the interpreter's exit, or an injected fault, waits for the last report."""

_LAST_AT_EXIT = -(10**9)
"""Priority of what multiprocessing calls at a process's end: behind all that it joins."""

FAILURE_PATIENCE_S = 0.2
"""Seconds that an exception which ends the program waits for its report: a dump and a datagram take 1 ms."""

REPORT_POLL_S = 0.01
"""Seconds between looks of an injected fault whether its step has been reported."""

MAX_STEP_ENDS = 64
"""Latest steps: as many as the recorder holds collectives, of which a step has one at least."""


class Marks:
    """What the main thread has reported. One thread writes, one reads; every value is replaced whole."""

    __slots__ = (
        "barrier",
        "can_stop",
        "firsts",
        "gpu_memory",
        "is_stop_requested",
        "phases",
        "step",
        "step_ends",
        "training",
        "uncaught",
    )

    def __init__(self) -> None:
        self.step: StepMark | None = None
        self.step_ends: deque[StepEnd] = deque(maxlen=MAX_STEP_ENDS)
        """Latest steps; unlike all else it is appended to."""
        self.phases: tuple[Phase, ...] = ()
        self.barrier: BarrierMark | None = None
        self.firsts: tuple[BarrierMark, ...] = ()
        self.training: TrainingMark | None = None
        self.gpu_memory: tuple[GpuMemoryReport, ...] = ()
        self.can_stop = False
        self.uncaught: Uncaught | None = None
        self.is_stop_requested = False
        """The probe's only message to the main thread: the engine reads it at step boundaries."""


marks = Marks()


class Probe:
    """Samples and reports one rank."""

    def __init__(
        self,
        torchrun: TorchrunEnv,
        env: ProbeEnv,
        roots: CodeRoots,
        recorder: Recorder,
        peer_calls: PeerCalls | None = None,
    ) -> None:
        self.faults = StepFaults(env.faults, torchrun.rank)
        self._recorder = recorder
        self._surroundings = Surroundings(torchrun.world_size)
        self._interpreter = InterpreterWaits()
        self._gpu_memory = GpuMemory()
        self._optimizer_steps: OptimizerSteps | None = OptimizerSteps()
        """None once the program has reported a step by itself."""
        self._state = RankState(
            RankIdentity(
                rank=torchrun.rank,
                local_rank=torchrun.local_rank,
                world_size=torchrun.world_size,
                pid=os.getpid(),
                job_id=env.job_id,
                attempt=env.attempt,
                is_adopted=env.is_adopted,
            ),
            recorder_missing=not recorder.is_available,
        )
        self._out = ReportSocket(env.inbox)
        self._requests = RequestSocket(env.request_dir, torchrun.rank)
        self._stacks = StackDumps(self._requests.directory, torchrun.rank, roots)
        self._main_thread_id = threading.main_thread().ident or 0
        self._main_thread = MainThread(threading.main_thread().native_id)
        self._walk = StackWalk(roots)
        self._peer_calls = peer_calls or PeerCalls()
        self._main_waits = MainWaits(self._main_thread_id, self._walk, self._peer_calls)
        # Between ticks the thread sleeps in poll(): a request wakes it, and so does the end of the process.
        self._ending = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._failing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakes = select.poll()
        self._wakes.register(self._ending, select.POLLIN)
        self._wakes.register(self._failing, select.POLLIN)
        if self._requests.fd is not None:
            self._wakes.register(self._requests.fd, select.POLLIN)
        fds = (self._out.fd, self._requests.fd, self._ending, self._failing)
        self._files = {fd: file_of(fd) for fd in fds if fd is not None}
        self._has_ended = False
        self._has_reported_failure = threading.Event()
        self._pace = Pace(torchrun.rank)
        self._was_waiting = False
        self._is_dump_asked = False
        self._thread = threading.Thread(target=self._run, name="rankdeck-probe", daemon=True)
        self._answered_request_id = 0
        self._reported_marks: StepMark | None = None
        self.num_dropped = 0

    def start(self) -> None:
        """Start the thread; all signals are for the program's own."""
        with signals_blocked():
            self._thread.start()

    def become(self, rank: TorchrunEnv) -> None:
        """Report as this rank from now on."""
        state, who = self._state, (rank.rank, rank.local_rank, rank.world_size)
        state.identity = msgspec.structs.replace(state.identity, rank=who[0], local_rank=who[1], world_size=who[2])

    def end(self) -> None:
        """Send a last report and end the thread; blocks at most `EXIT_PATIENCE_S`."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._has_lost_files():
            return
        os.eventfd_write(self._ending, 1)
        self._thread.join(EXIT_PATIENCE_S)
        if not self._thread.is_alive():
            os.close(self._ending)
            os.close(self._failing)

    def fail(self) -> None:
        """Report the exception that ends the program; blocks at most `FAILURE_PATIENCE_S`.

        The launcher may kill the process before it has ended.
        """
        if not (self._has_ended or self._has_lost_files()):
            os.eventfd_write(self._failing, 1)
            self._has_reported_failure.wait(FAILURE_PATIENCE_S)

    @property
    def has_seen_collectives(self) -> bool:
        """True once a sample has seen a process group at work."""
        return self._state.has_groups

    def step(self, step: int, loss: float | None, epoch: int | None, loss_step: int | None = None) -> None:
        """Take a step from the main thread, and let the faults of this step strike."""
        last = marks.step
        self._optimizer_steps = None
        if last is None or last.is_counted:
            self.faults.restart()
            last = StepMark(step, None, epoch, loss_first=None, steps_done=0)
        marks.step = last.followed_by(step, loss, epoch, loss_step)
        self._finish_step(step)

    def count_step(self, optimizer_id: int) -> None:
        """Count an optimizer's step, which makes a step of the training until the program reports one itself."""
        counted = self._optimizer_steps
        if counted is not None and counted.note(optimizer_id) and counted.num_steps > 1:
            marks.step = StepMark(counted.num_steps, None, None, None, counted.num_steps, is_counted=True)
            self._finish_step(counted.num_steps, first_step=1)

    def _finish_step(self, step: int, first_step: int | None = None) -> None:
        # The clock of the recorder: `ddpcore.probe.progress` compares.
        marks.step_ends.append(StepEnd(step, time.time_ns() // 1000))
        now_s = time.monotonic()
        marks.gpu_memory = self._gpu_memory.look(now_s)
        # Training may run on another thread; what a fault does it does to the main one, or cannot do elsewhere.
        is_on_main = threading.get_ident() == self._main_thread_id
        for fault in self.faults.due(step, first_step) if is_on_main else ():
            if fault.kind is FaultKind.SLOW:
                self.faults.slow_factor = fault.factor
            else:
                self._await_report()
                self._strike(fault)
        pause(self.faults.pause_s(now_s))
        self.faults.resumed(time.monotonic())

    def _strike(self, fault: Fault) -> None:
        if fault.kind in NEED_TORCH:
            from ddpcore.probe import torch_faults  # noqa: PLC0415 - the probe itself does without torch

            torch_faults.strike(fault.kind)
        else:
            strike(fault)

    def _await_report(self) -> None:
        """Let the present step be reported before a fault strikes: a frozen rank's place is its last one seen."""
        deadline_s = time.monotonic() + EXIT_PATIENCE_S
        while self._reported_marks is not marks.step and time.monotonic() < deadline_s:
            time.sleep(REPORT_POLL_S)

    def _run(self) -> None:
        failed_ticks = 0
        is_ending = False
        self._interpreter.begin()
        while True:
            try:
                now_s = time.monotonic()
                if is_ending or self._wants_sample(now_s):
                    self._tick(now_s, is_last=is_ending)
                failed_ticks = 0
            except Exception:  # noqa: BLE001 - whatever torch's private parts do, training goes on
                failed_ticks += 1
            if is_ending or failed_ticks == MAX_FAILED_TICKS:
                break
            seen = self._interpreter.wait(self._wakes, self._pace.pause_s(time.monotonic()))
            if self._has_lost_files():
                return
            for fd, _ in seen:
                if fd == self._ending:
                    is_ending = True
                elif fd == self._failing:
                    os.eventfd_read(self._failing)
                    self._pace.hurry()
                else:
                    for request in self._requests.take():
                        self._carry_out(request)
        self._interpreter.end()
        self._out.close()
        self._requests.close()

    def _has_lost_files(self) -> bool:
        """Return whether the program has closed descriptors of the probe's; if so, none of them is touched again."""
        if all(file_of(fd) == file for fd, file in self._files.items()):
            return False
        self._out.let_go()
        self._requests.let_go()
        return True

    def _wants_sample(self, now_s: float) -> bool:
        """Return whether a sample is due, or what the last one saw pending still is."""
        if self._pace.is_sample_due(now_s):
            return True
        self._pace.looked_again()
        return not self._state.has_stepped(marks.step) and self._state.still_pends(
            self._recorder.counters(), (marks.barrier, *marks.firsts)
        )

    def _tick(self, now_s: float, *, is_last: bool) -> None:
        """Take one sample, and send a report if one is due."""
        self._pace.begin_sample(now_s)
        wall_s = time.time()  # noqa: TID251 - the clock that the recorder and the ranks beside us share
        state, step, reading = self._state, marks.step, self._walk.read(self._main_thread_id)
        uncaught = marks.uncaught
        counters = self._recorder.counters()
        has_process_group = self._recorder.has_process_group()
        state.observe(
            Sample(
                now_s=now_s,
                counters=counters,
                reading=reading,
                has_process_group=has_process_group,
                num_worlds=self._recorder.num_worlds(state.identity.world_size),
                num_openings=self._recorder.num_openings(),
                step=step,
                step_ages=step_ages(step, tuple(marks.step_ends), int(wall_s * 1e6)),
                phases=marks.phases,
                barrier=marks.barrier,
                firsts=marks.firsts,
                slow_factor=self.faults.slow_factor,
                can_stop=marks.can_stop,
                training=marks.training,
                gpu_memory=marks.gpu_memory,
                anomalies=self._surroundings.look(
                    now_s,
                    self._main_stack,
                    has_process_group=has_process_group,
                    num_steps=step.steps_done if step else 0,
                ),
                is_at_work=is_gloo_pending(counters) and self._main_thread.is_at_work(),
                tick=tick_of(wall_s),
                main=self._main_waits.look(is_still=state.is_still(now_s)),
                peer_calls=self._peer_calls.latest() if self._peer_calls.is_used else (),
                num_peer_calls=self._peer_calls.num_calls,
                uncaught=uncaught,
            )
        )
        # What this rank called last is all that others have to compare with once it is gone.
        is_near_end = is_last or uncaught is not None or self._is_dump_asked
        if state.wants_dump(now_s) or (is_near_end and state.has_groups):
            self._is_dump_asked = False
            began_s = time.thread_time()
            members = self._recorder.members()
            dump = call_roots.with_roots(self._recorder.dump(), members)
            state.learn(dump, members, time.thread_time() - began_s, tuple(marks.step_ends))
        if state.wants_arguments:
            state.learn_arguments(arguments_of(self._main_thread_id))
        is_waiting = state.is_waiting
        self._pace.end_sample(now_s, wall_s, is_pending=state.is_pending, is_waiting=is_waiting)
        if self._stacks.is_wanted:
            self._stacks.write(self._recorder.dump(), (marks.barrier, *marks.firsts))
        if not (self._pace.is_report_due(now_s) or is_waiting != self._was_waiting or is_last):
            return
        self._pace.reported(now_s)
        self._was_waiting = is_waiting
        answered = self._answered_request_id
        report = state.report(probe_cpu_s=time.thread_time(), answered_request_id=answered, is_ending=is_last)
        self._send(encode_report(self._interpreter.added_to(report)))
        self._reported_marks = step
        if uncaught is not None:
            self._has_reported_failure.set()

    def _main_stack(self) -> list[StackLine]:
        return stack_of(self._main_thread_id)

    def _send(self, datagram: bytes) -> None:
        if len(datagram) > MAX_REPORT_BYTES or not self._out.send(datagram):
            # The next report says it all again.
            self.num_dropped += 1

    def _carry_out(self, request: ProbeRequest) -> None:
        match request:
            case SlowDown():
                self.faults.slow_factor = request.factor
            case StrikeAt():
                self.faults.add(request.fault)
            case StopTraining():
                marks.is_stop_requested = True
            case DumpStacks():
                self._stacks.want(request.request_id)
            case ReportNow():
                self._is_dump_asked = True
            case _:
                assert_never(request)
        self._answered_request_id = max(self._answered_request_id, request.request_id)
        self._pace.hurry()


_probe: Probe | None = None


def become(rank: TorchrunEnv) -> bool:
    """Report as this rank from now on; return False where this process has no probe."""
    if _probe is not None:
        _probe.become(rank)
    return _probe is not None


def start(
    torchrun: TorchrunEnv, env: ProbeEnv, roots: CodeRoots, recorder: Recorder, peer_calls: PeerCalls | None = None
) -> None:
    """Start this process's probe; forked children have none."""
    global _probe  # noqa: PLW0603 - one probe a process, and the public calls below need to find it
    probe = Probe(torchrun, env, roots, recorder, peer_calls)
    probe.start()
    _probe = probe
    os.register_at_fork(after_in_child=_forget)
    processes, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if processes is None or util is None or processes.parent_process() is not None:
        atexit.register(_end)
    else:
        # While multiprocessing joins its children the probe still reports.
        util.Finalize(None, _end, exitpriority=_LAST_AT_EXIT)


def report_step(
    step: int, loss: SupportsFloat | None = None, epoch: int | None = None, *, loss_step: int | None = None
) -> None:
    """Report that a training step is done. Without a probe it does nothing.

    Call it on the main thread, once a step. It never raises, but for faults that were asked for (`StepFaults`): what is
    not a number is left out of the report. A loss on an accelerator costs a synchronisation, so give it only now and
    then there.

    Args:
        step: Number of the step, counted by the program.
        loss: The step's loss: a number, or a tensor with one element. None keeps the last one.
        epoch: Number of the epoch, if the program has epochs.
        loss_step: Number of the step that the loss is of, where it is an earlier one.
    """
    probe = _probe
    if probe is not None:
        probe.step(to_int(step) or 0, to_float(loss), to_int(epoch), to_int(loss_step))


def count_step(optimizer_id: int) -> None:
    """Count the step of an optimizer (`ddpcore.probe.bootstrap`); without a probe it does nothing."""
    probe = _probe
    if probe is not None:
        probe.count_step(optimizer_id)


def phase(name: Phase | str) -> AbstractContextManager[None]:
    """Mark a block of the program as one phase: `with ddpcore.phase("eval"):`. Main thread only; blocks may nest.

    The probe recognises data, forward, backward and optimizer; evaluation and checkpoints need the mark.

    Args:
        name: One of `ddpcore.wire.Phase`.

    Raises:
        UnknownPhaseError: There is no such phase.
    """
    try:
        return _PhaseMark(Phase(name))
    except (ValueError, TypeError):
        raise UnknownPhaseError(f"no phase is called {name!r}: use one of {', '.join(Phase)}") from None


class _PhaseMark:
    __slots__ = ("_outer", "_phase")

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._outer: tuple[Phase, ...] = ()

    def __enter__(self) -> None:
        self._outer = marks.phases
        marks.phases = (*self._outer, self._phase)

    def __exit__(self, *_: object) -> None:
        marks.phases = self._outer


def note_uncaught(uncaught: Uncaught) -> None:
    """Take the exception that ends the program; a forked child has no probe that would report it."""
    marks.uncaught = uncaught
    if _probe is not None:
        _probe.fail()


def _forget() -> None:
    """Turn the probe off in a forked child: its thread lives in the parent alone."""
    global _probe  # noqa: PLW0603 - see start
    _probe = None


def _end() -> None:
    if _probe is not None:
        _probe.end()
        if _probe.has_seen_collectives:
            time.sleep(EXIT_GRACE_S)
        _forget()
