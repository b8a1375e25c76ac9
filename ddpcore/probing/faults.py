"""Injected harm: what strikes a rank at a step, on its own main thread."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING

from ddpcore.wire import FaultKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.wire import Fault

REMEMBERED_STEPS = 15
"""Durations whose median is a rank's own pace: enough to pass over an evaluation, few enough to follow a change."""

_SIGNALS = {FaultKind.FREEZE: signal.SIGSTOP, FaultKind.KILL: signal.SIGKILL}


class StepFaults:
    """Decides at each step whether a fault strikes, and how long a slowed rank pauses.

    All on the main thread, but for `slow_factor`, which the probe's thread may set at any time.

    Args:
        faults: What is to strike; faults of other ranks are left out.
        rank: Whose faults they are.
    """

    def __init__(self, faults: Sequence[Fault], rank: int) -> None:
        self.slow_factor = 1.0
        self._pending = [fault for fault in faults if fault.rank == rank]
        self._last_step: int | None = None
        self._durations: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._pace_s: float | None = None
        self._step_began_s: float | None = None

    def due(self, step: int) -> list[Fault]:
        """Return what strikes in this step, each fault once.

        A program that reports every tenth step is struck at the first report of its step or a later one; one that
        resumes behind a fault's step is not struck.
        """
        after = step - 1 if self._last_step is None else self._last_step
        self._last_step = step
        if not self._pending:
            return []
        due = [fault for fault in self._pending if fault.at_step is None or after < fault.at_step <= step]
        if due:
            self._pending = [fault for fault in self._pending if fault not in due]
        return due

    def pause_s(self, now_s: float) -> float:
        """Return how long this step must last on so that it takes `slow_factor` times as long as steps did before.

        Args:
            now_s: When the program reported the step; `resumed` tells when it went on.
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
        """Take the time at which the program goes on to its next step."""
        self._step_began_s = now_s


def strike(fault: Fault) -> None:
    """Freeze or kill this process; anything else is not done from within."""
    number = _SIGNALS.get(fault.kind)
    if number is not None:
        os.kill(os.getpid(), number)


def pause(duration_s: float) -> None:
    """Keep the calling thread from going on; blocks."""
    if duration_s > 0.0:
        time.sleep(duration_s)
