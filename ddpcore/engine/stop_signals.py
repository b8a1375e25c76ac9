"""What asks for a stop: SIGTERM, at the next step boundary, which still ends a rank that reaches none; a deadline.

A Python signal handler runs between two bytecodes of the main thread, and a rank that is blocked in a collective runs
none: a handler alone would make it deaf to SIGTERM. So the handler does nothing, and a thread listens to the wake-up
descriptor that the interpreter's C handler writes to at once. It notes the wish; and when the main thread reaches no
boundary in time, or SIGTERM comes again later, it gives the signal back its default action and sends it again.

Children that are forked during this, a DataLoader's workers, inherit none of it: they would write into the same pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

MIN_PATIENCE_S = 2.0
MAX_PATIENCE_S = 25.0
"""Longest patience in seconds: torchrun kills 30 s after its own SIGTERM."""

STEPS_OF_PATIENCE = 10
"""Steps of patience: an agreed stop takes a tick of the agreement and up to three steps."""

LOOK_S = 0.1
"""Seconds between the thread's looks at its clock while a stop is under way."""

SAME_WISH_S = 1.0
"""Seconds from the first SIGTERM in which others are the same wish.

With proctrack/linuxproc Slurm sends SIGTERM to every process of a step, and torchrun passes its own on (Slurm 22.05).
"""

DEADLINE_VARIABLE = "SLURM_JOB_END_TIME"
"""Unix time at which Slurm ends the job.

Source: https://slurm.schedmd.com/sbatch.html, output environment variables.
"""

DEADLINE_MARGIN_S = 120.0
"""Seconds before it for the last steps and the last checkpoint."""

_END = 0
"""Number that ends the thread: no signal has it."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for a stop; Slurm's `--signal=USR1@120` only asks: it never ends the rank."""


class StopSignals:
    """Listens for signals while its `with` block lasts, on the main thread only.

    `is_asked` is True once SIGTERM or SIGUSR1 has arrived. After SIGTERM the main thread has `patience_s` to reach an
    agreed stop; None means ten steps, at least 2 and at most 25 s.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self.is_asked = False
        self._fixed_patience_s = patience_s
        self._step_s = 0.0
        self._has_stopped = False
        self._is_aside = False
        self._asked_s = self._patient_since_s = 0.0
        self._has_term = False
        self._thread: threading.Thread | None = None
        self._previous: dict[signal.Signals, object] = {}
        self._previous_fd = -1
        self._read_fd = self._write_fd = -1

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._listen, name="rankdeck-stop-signals", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, _take_no_action) for number in _STOP_SIGNALS}
        _listening.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        self.let_go()
        # A byte, not the pipe's end: that would wait for every process that has inherited the pipe.
        os.write(self._write_fd, bytes([_END]))
        self._thread.join()
        self._thread = None
        os.close(self._write_fd)
        os.close(self._read_fd)
        if self._has_term and not self._has_stopped:
            # It came too late for any boundary: it is the program's again, with whatever action it has there.
            self._has_term = self.is_asked = False
            os.kill(os.getpid(), signal.SIGTERM)

    def let_go(self) -> None:
        """Restore the signal handlers of before."""
        _listening.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # it came from signal.signal
        signal.set_wakeup_fd(self._previous_fd)

    def step_done(self, step_s: float) -> None:
        """Take a boundary and the step's duration: patience is measured in steps."""
        self._step_s = max(step_s, 0.5 * self._step_s)

    def take_longer(self) -> None:
        """Use the longest patience by default: an agreed stop waits for something."""
        self._step_s = MAX_PATIENCE_S

    def stop_reached(self) -> None:
        """Take that the agreed stop has been reached: from now on only a later SIGTERM ends the rank."""
        self._has_stopped = True

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Suspend patience during what is no step, an evaluation or a checkpoint; it starts again after it."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    @property
    def patience_s(self) -> float:
        """Seconds after SIGTERM in which the rank may continue towards an agreed stop."""
        if self._fixed_patience_s is not None:
            return self._fixed_patience_s
        return min(MIN_PATIENCE_S + STEPS_OF_PATIENCE * self._step_s, MAX_PATIENCE_S)

    def _is_patience_over(self, now_s: float) -> bool:
        if self._is_aside:
            self._patient_since_s = now_s
        longest_s = max(self.patience_s, MAX_PATIENCE_S)
        return now_s >= min(self._patient_since_s + self.patience_s, self._asked_s + longest_s)

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        empty_s = time.monotonic()
        while True:
            look_s = time.monotonic()
            if self._has_term and not self._has_stopped and self._is_patience_over(look_s):
                _end_by_sigterm()
            if not poll.poll(1000 * LOOK_S if self._has_term else None):
                empty_s = look_s
                continue
            look_s = time.monotonic()
            try:
                numbers = os.read(self._read_fd, 64)
            except BlockingIOError:
                continue
            if self._previous_fd >= 0:
                # Whoever listened before, an event loop, still hears every signal.
                with contextlib.suppress(OSError):
                    os.write(self._previous_fd, numbers.replace(bytes([_END]), b""))
            if signal.SIGTERM in numbers:
                self._take_term(empty_s)
            empty_s = look_s
            self.is_asked = self.is_asked or any(number in _STOP_SIGNALS for number in numbers)
            if _END in numbers:
                return

    def _take_term(self, earliest_s: float) -> None:
        """Take a SIGTERM that came after `earliest_s`: where a step holds the interpreter's lock, long before now."""
        if not self._has_term:
            self._has_term = True
            self._asked_s = self._patient_since_s = time.monotonic()
        elif earliest_s >= self._asked_s + SAME_WISH_S:
            _end_by_sigterm()


_listening: list[StopSignals] = []


def _forget_in_child() -> None:
    while _listening:
        _listening[-1].let_go()


os.register_at_fork(after_in_child=_forget_in_child)


def _take_no_action(number: int, frame: FrameType | None) -> None:
    """Stand in for the default action; the listening thread does the rest."""


def _end_by_sigterm() -> None:
    """End this process as SIGTERM would have. Python gives signals back their default action only in its main thread,
    which may never run again."""  # noqa: D205, D209
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)
    os.kill(os.getpid(), signal.SIGTERM)


def monotonic_deadline_s(deadline: float | None) -> float | None:
    """Return when training should stop, on the monotonic clock; None for no such time.

    `deadline` is Unix time in seconds; None takes Slurm's variable.
    """
    if deadline is None:
        end = os.environ.get(DEADLINE_VARIABLE, "")
        if not end.isdigit():
            return None
        deadline = int(end) - DEADLINE_MARGIN_S
    return time.monotonic() + deadline - time.time()  # noqa: TID251 - a scheduler's deadline is wall time
