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
import logging
import math
import os
import select
import signal
import subprocess
import threading
import time
from datetime import datetime
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType, TracebackType

_log = logging.getLogger(__name__)
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
"""Unix time at which Slurm was to end the job when it began; Slurm 22.05 does not set it.

Source: https://slurm.schedmd.com/sbatch.html, output environment variables.
"""

DEADLINE_MARGIN_S = 120.0
"""Most seconds before the job's end for the last steps and the last checkpoint."""

DEADLINE_MARGIN_FRAC = 0.2
"""Most of the time from the engine's start to the job's end that these seconds may be."""

ASK_S = 60.0
"""Most seconds between two questions to Slurm, each of which its controller answers for all jobs."""

LEAST_ASK_S = 10.0
"""Least seconds between two questions, where the deadline is near."""

ANSWER_S = 20.0
"""Seconds that squeue may take: it waits for a controller that does not answer."""

_END = 0
"""Number that ends the thread: no signal has it."""

_NO_LIMIT = ("NONE", "N/A", "UNLIMITED", "Unknown")
_MAX_DIGITS = 12
"""Digits of Unix time: with more, squeue has printed something else."""

_MAX_ERROR_CHARS = 200

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


class Deadline:
    """When training should have stopped at a boundary.

    `at_s` is on the monotonic clock, infinite for no such time. A `deadline` of the program's, Unix time in seconds,
    stays. Otherwise it is some time before Slurm ends the job. With `is_asking` Slurm is asked while the `with` block
    lasts: the ranks agree on a stop, so one of them is enough for a job. `scontrol update TimeLimit` moves a job's end
    in both directions, so it is asked again, on a thread: squeue may hang, and no step waits for it. Where squeue does
    not answer, the last answer stays, at first that of the environment; without one a warning is logged, once.
    """

    def __init__(self, deadline: float | None, *, is_asking: bool) -> None:
        self.at_s = math.inf
        self._began = _wall_time()
        self._argv = squeue_argv(os.environ) if is_asking and deadline is None else []
        self._asked_s = -ASK_S
        self._is_unknown = True
        self._is_over = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        end = os.environ.get(DEADLINE_VARIABLE, "")
        if deadline is not None:
            self.at_s = _monotonic(deadline)
        elif (known := read_end(end)) is not None:
            self._take(known)

    def __enter__(self) -> Self:
        if self._argv:
            self._is_over = threading.Event()
            threading.Thread(
                target=self._keep_asking, args=(self._is_over,), name="rankdeck-slurm-deadline", daemon=True
            ).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The thread is not waited for: it may wait for a squeue that cannot even be killed.
        self._is_over.set()
        child = self._child
        if child is not None:
            child.kill()

    def _keep_asking(self, is_over: threading.Event) -> None:
        while not is_over.wait(self._asked_s + pause_s(self.at_s - self._asked_s) - time.monotonic()):
            self._asked_s = time.monotonic()
            answer, failure = self._answer()
            end = read_end(answer)
            if end is not None:
                self._take(end)
            elif self._is_unknown and not is_over.is_set():
                self._is_unknown = False
                _log.warning(
                    "the end of Slurm job %s is not known, so training does not stop before it: %s on %s; it is asked "
                    "again, and Engine(deadline=...) gives it, in Unix time",
                    *(self._argv[3], failure or "squeue shows no end", os.uname().nodename),
                )

    def _answer(self) -> tuple[str, str]:
        """Return what squeue prints, and why it fails; either is empty."""
        environ = squeue_environ(os.environ)
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            # Python makes this child by vfork, which copies neither the rank's memory nor its threads.
            with subprocess.Popen(
                self._argv, stdin=devnull, stdout=pipe, stderr=pipe, env=environ, text=True, errors="replace"
            ) as child:
                self._child = child
                try:
                    answer, errors = child.communicate(timeout=ANSWER_S)
                finally:
                    child.kill()
                    self._child = None
        except OSError as error:
            return "", f"squeue cannot be run ({error.strerror})"
        except subprocess.TimeoutExpired:
            return "", f"squeue does not answer in {ANSWER_S:g} s"
        if child.returncode == 0:
            return answer, ""
        last = "".join(filter(str.isprintable, errors.strip().rpartition("\n")[2]))[:_MAX_ERROR_CHARS]
        return "", f"squeue fails ({last or child.returncode})"

    def _take(self, end: float) -> None:
        self._is_unknown = False
        self.at_s = _monotonic(end - margin_s(end - self._began))


def margin_s(left_s: float) -> float:
    """Return the seconds before a job's end at which training should have stopped.

    Two minutes, but in a short job no more than a fifth of what was left when the engine began: a job of a minute
    trains too.
    """
    return min(DEADLINE_MARGIN_S, DEADLINE_MARGIN_FRAC * max(0.0, left_s))


def pause_s(left_s: float) -> float:
    """Return the seconds between two questions, from those to the deadline: it is acted on with a recent answer."""
    return min(ASK_S, max(LEAST_ASK_S, left_s / 2))


def squeue_argv(environ: Mapping[str, str]) -> list[str]:
    """Return the question for the end of the Slurm job that this process is in; nothing where it is in none.

    A task of an array is named as such: the number of the last one is that of the whole array too (Slurm 22.05).
    """
    job, array, task = (environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "ARRAY_JOB_ID", "ARRAY_TASK_ID"))
    if not job.isdecimal():
        return []
    return ["squeue", "-h", "-j", f"{array}_{task}" if array.isdecimal() and task.isdecimal() else job, "-o", "%e"]


def squeue_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for squeue, without the user's defaults, which may hide the job or ask another cluster.

    A time as Unix seconds is the same in every time zone, and in the hour that a clock is set back.
    Source: squeue(1), ENVIRONMENT VARIABLES.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("SQUEUE_")}
    kept.pop("SLURM_CLUSTERS", None)
    return kept | {"SLURM_TIME_FORMAT": "%s"}


def read_end(answer: str) -> float | None:
    """Return a job's end as Unix time in seconds, infinite without a limit; None for what is no answer.

    Of a heterogeneous job squeue prints one line a part: the first end counts.
    """
    ends = [_read_time(line) for line in answer.split()]
    return min((end for end in ends if end is not None), default=None)


def _read_time(text: str) -> float | None:
    """Take squeue's %e: seconds (SLURM_TIME_FORMAT), local time in ISO format, or that there is no limit."""
    if text in _NO_LIMIT:
        return math.inf
    if text.isdecimal() and len(text) <= _MAX_DIGITS:
        return float(text)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _monotonic(deadline: float) -> float:
    return time.monotonic() + deadline - _wall_time()


def _wall_time() -> float:
    return time.time()  # noqa: TID251 - a scheduler's deadline is wall time
