"""The exception that ends the program: left where torchrun looks for it, and noted for the probe's last reports.

The process may take seconds from there to its end: torch is taken down, memory is given back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.probing.main_wait import PROGRAMS
from ddpcore.probing.samples import Uncaught
from ddpcore.probing.stack import CodeRoots, StackReader, sendable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_WORKER_TRACEBACK = "Original Traceback (most recent call last):"
"""In the message of an exception that a loader's worker has raised. Source: torch/_utils.py, torch 2.13."""
_MAX_CHARS = 1024
_MAX_CHAIN = 100
"""Exceptions followed to the first one: a program can make a circle of them."""


def record_uncaught_errors(roots: CodeRoots, note: Callable[[Uncaught], None]) -> None:
    """Leave an uncaught exception where torchrun looks for it, and note the one that ends the program; then go on.

    Without the file torchrun's report of a failed rank says only "to enable traceback see ...".
    Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py.

    Args:
        roots: Where code lies that is not the user's.
        note: Takes the exception that ends the program; torchrun's SIGTERM takes effect once it has returned.
    """
    path = os.environ.get(_ENV_ERROR_FILE, "")
    previous = sys.excepthook

    def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            if path:
                _write_error(path, kind, error, trace)
        # Whatever an exception's own code does, its traceback is printed.
        with contextlib.suppress(Exception):
            if isinstance(error, Exception) and _ends_program():
                with _sigterm_waits():
                    note(uncaught(error, roots))
        previous(kind, error, trace)

    sys.excepthook = record


def uncaught(error: BaseException, roots: CodeRoots) -> Uncaught:
    """Return the words and the place of an exception: those of the first one of its chain."""
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
    text = f"{name}: {head.splitlines()[0]}" if head else name
    if is_of_worker and (lines_of_worker := inner.strip().splitlines()):
        text = lines_of_worker[-1]
    text = sendable(text, _MAX_CHARS)
    if not lines:
        return Uncaught(text, None)
    reading = StackReader(roots).read(lines)
    return Uncaught(text, reading.place, reading.phase)


@contextlib.contextmanager
def _sigterm_waits() -> Iterator[None]:
    """Let SIGTERM end the process after the block instead of within it, unless the program handles it by itself.

    When a rank has died, torchrun ends those that have lost it within 0.1 s: what they had called is told before.
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
