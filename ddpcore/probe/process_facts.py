"""Collects what the probe notes about its process: anomalies, versions, and the exception that ends the program.

`Surroundings` looks for anomalies of the process now and then, on the probe's thread.

`InterpreterWaits` adds up for how long garbage was collected, and the interpreter's lock was not to be had.

`versions` looks only at what the program itself has imported.

`record_uncaught_errors` leaves the exception that ends the program where torchrun looks for it, and notes it for the
probe's last reports. The process may take seconds from there to its end: torch is taken down, memory is given back.
`record_exits` notes the line of a `sys.exit`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from ddpcore.probe.main_thread import PROGRAMS
from ddpcore.probe.samples import Uncaught
from ddpcore.probe.stack import CodeRoots, StackReader, sendable, stack_of
from ddpcore.wire import Anomaly

if TYPE_CHECKING:
    import select
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from ddpcore.probe.stack import StackLine
    from ddpcore.wire import RankReport

FIRST_PERIOD_S = 2.0
LONGEST_PERIOD_S = 32.0
"""Longest pause in seconds between looks, which double: anomalies are there from the beginning, and in a process with
children a look takes 0.7 ms with 30 threads beside training."""

NUM_SWITCHES = 2.0
"""Lateness of a wake-up, in switch intervals, from which the interpreter's lock was held for long."""

GROUPLESS_STEPS = 10
"""Steps without a process group after which a rank trains on its own."""

_BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""Variables of the ring's size, of which the first that is set counts. Source:
torch/csrc/distributed/c10d/FlightRecorder.hpp."""
_LAUNCHER_FILES = (
    "/torch/multiprocessing/spawn.py",
    "/torch/distributed/run.py",
    "/torch/distributed/launcher/api.py",
    "/torch/distributed/elastic/agent/server/api.py",
    "/nvidia_resiliency_ext/fault_tolerance/launcher.py",
    "/accelerate/launchers.py",
)
"""Files in which the main thread of a process stands that has started ranks and waits for their end."""
_WRAP = "_wrap"
_LAUNCHER_MODULES = frozenset(
    {b"torch.distributed.run", b"torch.distributed.launch", b"torchrun", b"ft_launcher", b"accelerate.commands.launch"}
)
_LAUNCHER_PROGRAMS = (b"/torchrun", b"/ft_launcher", b"/accelerate", b"/deepspeed")
_JOIN_FILE, _JOIN = "/multiprocessing/process.py", "join"


class InterpreterWaits:
    """Adds up the time that garbage collection takes, and for which the interpreter's lock is held for long.

    A collection calls `gc.callbacks` at its begin and its end, on the thread that it runs on: without collections there
    is no cost. The lock is sampled: whoever asks for it gets it from a thread that runs Python after the switch
    interval, 5 ms, and from a call in C that keeps it once that returns. So a probe's thread that wakes from a pause by
    two intervals too late stands for a pause in which the lock was held. Time without a CPU does not count, as the
    kernel shows it. Source: Documentation/scheduler/sched-stats.rst (/proc/PID/task/TID/schedstat).
    """

    def __init__(self) -> None:
        self.gc_pause_s: float | None = None
        self.gil_held_s: float | None = None
        self._collecting_since_s = 0.0
        self._schedstat_fd: int | None = None

    def begin(self) -> None:
        """Begin, on the thread that will `wait`."""
        self.gc_pause_s = 0.0
        gc.callbacks.append(self._on_collection)
        with contextlib.suppress(OSError):
            path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
            self._schedstat_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def wait(self, wakes: select.poll, pause_s: float) -> list[tuple[int, int]]:
        """Return what `wakes` has seen within a pause; if nothing, note whether the thread has woken late."""
        wait_ms = math.ceil(1000 * pause_s)
        delayed_s, began_s = self._run_delay_s(), time.monotonic()
        if delayed_s is None:
            return wakes.poll(wait_ms)
        self.gil_held_s = self.gil_held_s or 0.0
        seen = wakes.poll(wait_ms)
        late_s = time.monotonic() - began_s - wait_ms / 1000
        held_s = NUM_SWITCHES * sys.getswitchinterval()
        if not seen and late_s > held_s:
            now_delayed_s = self._run_delay_s()
            if now_delayed_s is not None and late_s - (now_delayed_s - delayed_s) > held_s:
                self.gil_held_s += time.monotonic() - began_s
        return seen

    def added_to(self, report: RankReport) -> RankReport:
        """Return a report with these times."""
        return msgspec.structs.replace(report, gc_pause_s=self.gc_pause_s, gil_held_s=self.gil_held_s)

    def end(self) -> None:
        """End; no later collection counts."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._on_collection)
        if self._schedstat_fd is not None:
            os.close(self._schedstat_fd)
            self._schedstat_fd = None

    def _on_collection(self, moment: str, _: dict[str, int]) -> None:
        if moment == "start":
            self._collecting_since_s = time.perf_counter()
        elif self._collecting_since_s and self.gc_pause_s is not None:
            self.gc_pause_s += time.perf_counter() - self._collecting_since_s

    def _run_delay_s(self) -> float | None:
        """Return how long this thread could run and had no CPU; None where the kernel does not count it."""
        if self._schedstat_fd is None:
            return None
        try:
            run_ns, delay_ns, _ = os.pread(self._schedstat_fd, 128, 0).split()
        except (OSError, ValueError):
            return None
        return int(delay_ns) / 1e9 if int(run_ns) else None


class Surroundings:
    """Looks at this process's variables, its main thread and its children."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._due_s = float("-inf")
        self._period_s = FIRST_PERIOD_S
        self._had_process_group = False
        self._has_met = False
        """True once there was a process group: a program that trains on, or ends, without one has joined before."""
        self._last: tuple[Anomaly, ...] = ()

    def look(
        self, now_s: float, stack: Callable[[], Sequence[StackLine]], *, has_process_group: bool, num_steps: int = 0
    ) -> tuple[Anomaly, ...]:
        """Return what is odd; variables and children are as of the last look.

        `stack` returns the main thread's frames, for a look that is due. Before `has_process_group` the program may
        still change the variables that torch reads then.
        """
        if has_process_group is not self._had_process_group:
            self._had_process_group = has_process_group
            self._due_s, self._period_s = now_s, FIRST_PERIOD_S
        if now_s >= self._due_s:
            self._due_s = now_s + self._period_s
            self._period_s = min(2.0 * self._period_s, LONGEST_PERIOD_S)
            found = variable_anomalies(os.environ) if has_process_group else []
            frames = stack()
            # Before there is a process group, a process that joins children waits for what is to do its work.
            is_parent = not has_process_group and not num_steps and stands_in_join(frames)
            if stands_in_launcher(frames) or is_parent or _has_launched():
                found.append(Anomaly.OWN_RANKS)
            self._last = tuple(found)
        self._has_met = self._has_met or has_process_group
        is_alone = num_steps >= GROUPLESS_STEPS and not self._has_met and self._world_size > 1
        return (*self._last, Anomaly.GROUPLESS) if is_alone else self._last


def variable_anomalies(environ: Mapping[str, str]) -> list[Anomaly]:
    """Return the anomalies of the variables that torch has read."""
    found = []
    size = next((environ[name] for name in _BUFFER_SIZES if environ.get(name)), "")
    if size.strip() == "0":
        found.append(Anomaly.RECORDER_OFF)
    # Ranks then wait in a check that the recorder does not see, and its entries have no group's name. Source: seen with
    # torch 2.13 on gloo; DDP's constructor crashes there by itself (SIGSEGV), with plain torchrun too.
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").strip().upper() == "DETAIL":
        found.append(Anomaly.DEBUG_DETAIL)
    return found


def stands_in_launcher(stack: Sequence[StackLine]) -> bool:
    """Return whether a main thread waits for ranks that it has started itself.

    A rank that `torch.multiprocessing.spawn` has started stands in `_wrap` of the same files.
    """
    return any(file.endswith(_LAUNCHER_FILES) and function != _WRAP for file, _, function in stack)


def stands_in_join(stack: Sequence[StackLine]) -> bool:
    """Return whether a main thread waits for the end of a process of multiprocessing."""
    return any(file.endswith(_JOIN_FILE) and function == _JOIN for file, _, function in stack)


def _has_launched() -> bool:
    """Return whether a child of this process is a torchrun. Source: proc_pid_task_children(5)."""
    if not _has_children():
        return False
    try:
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_bytes().split():
                arguments = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
                if any(word in _LAUNCHER_MODULES or word.endswith(_LAUNCHER_PROGRAMS) for word in arguments[:8]):
                    return True
    except OSError:
        return False  # a thread or a child that ends just now: the next look sees the others
    return False


def _has_children() -> bool:
    """Return whether this process has children, also ended ones that are not reaped; none is reaped here."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


_MAX_CHARS = 64


def versions() -> dict[str, str]:
    """Return `{"python": "3.11.7", "torch": "2.13.0", "cuda": "12.8", "nccl": "2.27.3"}`, without what is not there."""
    found = {"python": sys.version.split()[0], "kernel": os.uname().release}
    torch = sys.modules.get("torch")
    torch_version = getattr(torch, "version", None)
    for name, text in (
        ("torch", getattr(torch, "__version__", None)),
        ("cuda", getattr(torch_version, "cuda", None)),
        ("rocm", getattr(torch_version, "hip", None)),
        ("nccl", _nccl()),
    ):
        if text:
            found[name] = str(text)
    return {name: sendable(text, _MAX_CHARS) for name, text in found.items()}


def _nccl() -> str:
    module = sys.modules.get("torch.cuda.nccl")
    try:
        return ".".join(map(str, module.version())) if module else ""
    except (AttributeError, RuntimeError, TypeError):
        return ""  # this torch was built without it


_ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_WORKER_TRACEBACK = "Original Traceback (most recent call last):"
"""Mark in the message of an exception that a loader's worker has raised. Source: torch/_utils.py, torch 2.13."""
_MAX_ERROR_CHARS = 1024
_FIRST_AT_EXIT = 1000
"""Priority of what multiprocessing calls at a process's end: before it joins queues and children."""
_MAX_CHAIN = 100
"""Exceptions followed to the first one: a program can make a circle of them."""


def record_uncaught_errors(roots: CodeRoots, note: Callable[[Uncaught], None]) -> None:
    """Leave the exception that ends this program where torchrun looks for it, and note it; then continue.

    Without the file torchrun's report of a failed rank has only "to enable traceback see ...". torchrun's SIGTERM
    takes effect once `note` has returned. Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py.
    """
    path, pid = os.environ.get(_ENV_ERROR_FILE, ""), os.getpid()
    previous = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Whatever an exception's own code does, its traceback is printed.
        with contextlib.suppress(Exception):
            # A forked child has this hook too, and its end is not the rank's.
            if os.getpid() == pid and _ends_program():
                with contextlib.suppress(OSError, ValueError):
                    if path:
                        _write_error(path, kind, error, trace)
                with _sigterm_waits():
                    note(uncaught(error, roots))
        previous(kind, error, trace)

    sys.excepthook = record
    _note_at_end_of_child(roots, note)


def _note_at_end_of_child(roots: CodeRoots, note: Callable[[Uncaught], None]) -> None:
    """Note the exception that ends a process of multiprocessing, whose hook for exceptions nobody calls.

    Its exit function runs while the exception is handled. `torch.multiprocessing.spawn` keeps an exception for its own
    process, and exits with code 1. Source: multiprocessing/process.py, `_bootstrap`; torch/multiprocessing/spawn.py.
    """
    processes, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if processes is None or util is None or processes.parent_process() is None:
        return

    def at_end() -> None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        if error is not None:
            with contextlib.suppress(Exception), _sigterm_waits():
                note(uncaught(error, roots))

    util.Finalize(None, at_end, exitpriority=_FIRST_AT_EXIT)


def record_exits(roots: CodeRoots, note: Callable[[Uncaught], None]) -> None:
    """Note, as the program ends, the line that has called `sys.exit` with an error, of which no exception is printed.

    The note has no text. A thread's or a forked child's exit does not end the program; an exception printed since does.
    """
    exit_program, pid = sys.exit, os.getpid()
    latest: Uncaught | None = None

    def at_end() -> None:
        if latest is not None and not hasattr(sys, "last_value"):
            note(latest)

    @functools.wraps(exit_program)
    def record(status: str | int | None = None, /) -> NoReturn:
        nonlocal latest
        with contextlib.suppress(Exception):
            is_main = threading.current_thread() is threading.main_thread()
            if os.getpid() == pid and is_main and status not in (None, 0):
                reading = StackReader(roots).read(stack_of(threading.get_ident()))
                if latest is None:
                    atexit.register(at_end)
                latest = Uncaught("", reading.place, reading.phase)
        exit_program(status)

    sys.exit = record


def uncaught(error: BaseException, roots: CodeRoots) -> Uncaught:
    """Return the text and the place of an exception: those of the first one of its chain."""
    first = _first_of_chain(error)
    lines = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for one in (first, error)
        for frame, line in reversed([*traceback.walk_tb(one.__traceback__)])
    ]
    name = type(first).__qualname__
    module = type(first).__module__
    name = name if module in {"builtins", "__main__"} else f"{module}.{name}"
    message = str(first).strip()
    head, is_of_worker, inner = message.partition(_WORKER_TRACEBACK)
    text = f"{name}: {head}" if head else name
    if is_of_worker and (lines_of_worker := inner.strip().splitlines()):
        text = lines_of_worker[-1]
    text = sendable(text, _MAX_ERROR_CHARS)
    if not lines:
        return Uncaught(text, None)
    reading = StackReader(roots).read(lines)
    return Uncaught(text, reading.place, reading.phase)


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Let SIGTERM end the process after the block instead of within it, unless the program handles it by itself.

    When a rank has died, torchrun ends those that have lost it within 0.1 s: what they had called is reported before.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    has_come = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: has_come.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if has_come.is_set():
            signal.raise_signal(signal.SIGTERM)


_BY_A_THREAD_ITSELF = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
"""Signals of what the thread itself has done: `faulthandler` shows where."""


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block all signals in the calling thread for a block, and for ever in the threads that it starts.

    A program that waits for a signal (sigwait, signalfd) blocks it in its own threads: it would come to a thread that
    does not, and end the process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _BY_A_THREAD_ITSELF)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_of_chain(error: BaseException) -> BaseException:
    for _ in range(_MAX_CHAIN):
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            break
        error = before
    return error


def _ends_program() -> bool:
    """Return whether the interpreter itself has called the hook, for the main thread: no code of the program is left.

    A program may call the hook for an exception that it has caught, and a thread may for its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    frame = sys._getframe()  # noqa: SLF001 - inspect costs a thousand times as much
    while frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name not in PROGRAMS


def _write_error(path: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write torchrun's error file, unless the program's own `@record` has."""
    content = {
        "message": {
            "message": f"{kind.__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(kind, error, trace)),
                "timestamp": str(int(time.time())),  # noqa: TID251 - torchrun shows it to people
            },
        }
    }
    with Path(path).open("x", encoding="utf-8") as file:
        json.dump(content, file)
