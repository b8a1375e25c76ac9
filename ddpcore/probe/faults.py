"""Injected harm: what strikes a rank at a step, on its own main thread.

One place calls it: `Probe._finish_step`, where the program or its optimizers end a step. What needs torch is
in `torch_faults`, which the probe loads when such a fault strikes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import statistics
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, assert_never

import msgspec

from ddpcore.wire import FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpcore.wire import Fault

REMEMBERED_STEPS = 15
"""Number of durations whose median is a rank's own pace: enough to pass over an evaluation, few enough to follow a
change."""


class StepFaults:
    """Decides at each step whether a fault of this rank strikes, and how long a slowed rank pauses.

    All on the main thread; only `slow_factor` and `add` are the probe's thread's at any time.
    """

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self.slow_factor = 1.0
        self._rank = rank
        self._pending = [fault for fault in faults if fault.rank == rank]
        self._arrived: deque[Fault] = deque()
        self._last_step: int | None = None
        self._durations: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._pace_s: float | None = None
        self._step_began_s: float | None = None

    def add(self, fault: Fault) -> None:
        """Add a fault while the program runs; one whose step is over strikes at the next step."""
        if fault.rank == self._rank:
            self._arrived.append(fault)

    def due(self, step: int, first_step: int | None = None) -> list[Fault]:
        """Return the faults that strike in this step, each once.

        From its second report on, a program that reports every tenth step is struck at the first report of the fault's
        step or a later one. What lies before `first_step` (None: this step) does not strike: the program may have
        resumed there.
        """
        after = (first_step or step) - 1 if self._last_step is None else self._last_step
        self._last_step = step
        while self._arrived:
            fault = self._arrived.popleft()
            is_late = fault.at_step is not None and fault.at_step <= after
            self._pending.append(msgspec.structs.replace(fault, at_step=None) if is_late else fault)
        if not self._pending:
            return []
        due = [fault for fault in self._pending if fault.at_step is None or after < fault.at_step <= step]
        if due:
            self._pending = [fault for fault in self._pending if fault not in due]
        return due

    def restart(self) -> None:
        """Take the next step as the first: the program's count has restarted."""
        self._last_step = None

    def pause_s(self, now_s: float) -> float:
        """Return how long this step must still last to take `slow_factor` times as long as steps did before.

        `now_s` is when the program reported the step; `resumed` takes when it continued.
        """
        if self._step_began_s is None:
            return 0.0
        if self.slow_factor <= 1.0:
            self._pace_s = None
            self._durations.append(now_s - self._step_began_s)
            return 0.0
        if self._pace_s is None:
            # The pace before the fault: the slowness must not feed itself.
            self._pace_s = statistics.median(self._durations or (now_s - self._step_began_s,))
        return (self.slow_factor - 1.0) * self._pace_s

    def resumed(self, now_s: float) -> None:
        """Take the time at which the program continues with its next step."""
        self._step_began_s = now_s


class Omission:
    """Whether the main thread's next meeting with the other ranks, whichever it is, is to be left out."""

    def __init__(self) -> None:
        self._disarm: Callable[[], None] | None = None

    @property
    def is_armed(self) -> bool:
        """True until the next meeting."""
        return self._disarm is not None

    def arm(self, disarm: Callable[[], None]) -> None:
        """Have the next meeting left out; `disarm` is called when that has come."""
        self._disarm = disarm

    def take(self) -> bool:
        """Return True if the caller is to leave out the meeting that it has come to. Any thread may ask."""
        disarm = self._disarm
        if disarm is None or threading.current_thread() is not threading.main_thread():
            return False
        self._disarm = None
        disarm()
        return True


NEED_TORCH = frozenset({FaultKind.SKIP_BARRIER, FaultKind.MISMATCH, FaultKind.OOM})
"""Faults that `ddpcore.probe.torch_faults` carries out."""

omission = Omission()
"""Omission of this process."""


def strike(fault: Fault) -> None:
    """Do harm to this process. Main thread, at a step's boundary; may block, end the process, or raise.

    `LEAVE` raises SystemExit.
    """
    match fault.kind:
        case FaultKind.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.GIL:
            hold_interpreter(fault.duration_s)
        case FaultKind.LEAVE:
            raise SystemExit(0)
        case FaultKind.THAW | FaultKind.SLOW:
            pass  # a frozen process cannot thaw itself; slowness is the probe's, from step to step
        case FaultKind.SKIP_BARRIER | FaultKind.MISMATCH | FaultKind.OOM:
            raise AssertionError(f"{fault.kind} is struck by ddpcore.probe.torch_faults")
        case _:
            assert_never(fault.kind)


def hold_interpreter(duration_s: float) -> None:
    """Keep the interpreter's lock for a time, as a C extension does that computes and never lets go.

    No other thread of Python runs, and no handler that is written in it; signals without one do what they always do.
    Nothing cuts the time short but the end of the process.
    """
    sleep_us = ctypes.PyDLL(None).usleep  # PyDLL, unlike CDLL, does not let go of the lock around the call
    sleep_us.argtypes = [ctypes.c_uint]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # else one would end the sleep
    try:
        sleep_us(round(duration_s * 1e6))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def pause(duration_s: float) -> None:
    """Keep the calling thread from going on; blocks."""
    if duration_s > 0.0:
        time.sleep(duration_s)
