"""Searches old log lines with several threads at the same time: RE2 holds no lock of the interpreter's.

`LogSearch` threads work on between frames. What they find is taken in the order of the lines, whichever of them is done
first.

`SearchThreads` are ended from one step of their work to the next, and only the exit waits for them. They are not a
pool: one lets what runs go on, and the interpreter waits at its end for all that a pool has begun.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakSet

from app.filters.lines import lines_of
from app.tui.logs.matches import FIRST_PIECE_BYTES, MAX_PIECE_BYTES, PIECE_S, LogMatches

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from app.filters.lines import LineWish, LogPiece
    from app.tui.logs.store import LogStore

MAX_THREADS = 4
PIECES_A_TASK = 8
"""5 ms of RE2, where handing a task over takes 0.1: `million_lines`."""
MAX_TASKS = 32
"""Under way at once: a million lines, so that threads have enough to do until the next frame."""
MAX_COPIED_BYTES = 4 * 2**20
"""Under way at once, give or take a piece, of the newest chunk: it grows, so that what is looked at meanwhile is a copy
of it. Pieces of others are views."""
SLOW_PIECE_S = 0.02
"""CPU time after which a piece is one of a slow pattern: one of which each other line is found takes 4 ms."""


class _Task(NamedTuple):
    """Pieces that follow each other, the newest first; they themselves are held by nobody but the thread."""

    nums_lines: list[int]
    num_copied_bytes: int
    stop: int
    """Number of the line behind them."""
    places: Future[list[NDArray[np.int64]]]
    """What each has of wanted lines; fewer, where looking has become slow."""


class _OverError(Exception):
    """A thread is to look no further."""


def _new_threads() -> SearchThreads:
    return SearchThreads(min(MAX_THREADS, os.cpu_count() or 1))


def _look(pieces: list[LogPiece], wish: LineWish, threads: SearchThreads) -> list[NDArray[np.int64]]:
    """Look until all is looked at, one piece takes long, or the search is over.

    Of lines of which many are found, but not in turn, each takes the interpreter's lock: threads that want it at once
    take three times as long, and so take turns.
    """
    found: list[NDArray[np.int64]] = []
    began_s = 0.0

    def go_on() -> None:
        took_s = time.thread_time() - began_s
        if took_s > PIECE_S:
            threads.takes_turns.set()
        if took_s > SLOW_PIECE_S:
            threads.is_over.set()
        if threads.is_over.is_set():
            raise _OverError

    with suppress(_OverError):
        for piece in pieces:
            with threads.turn if threads.takes_turns.is_set() else nullcontext():
                began_s = time.thread_time()
                found.append(lines_of(piece, wish, go_on))
                go_on()
    return found


class LogSearch(LogMatches):
    """Matches that threads look for while the pattern is quick, as pieces at their largest show.

    A slow one, for which RE2 has no automaton, stays with the caller, in small pieces.
    """

    def __init__(self, wish: LineWish, logs: LogStore, new_threads: Callable[[], SearchThreads] = _new_threads) -> None:
        """Begin to look; threads are made when there is work for them, and let go of at its end."""
        super().__init__(wish, logs)
        self._new_threads = new_threads
        self._threads: SearchThreads | None = None
        self._let_go: Callable[[], object] | None = None
        self._tasks: deque[_Task] = deque()
        """Under way, the newest lines first."""

    def search(self) -> bool:
        """Look at one more piece, or take what threads have found, if they have; return whether there is more to do."""
        is_more = super().search()
        if self.has_all_old:
            self._end_threads()
        return is_more

    def _look_back(self) -> None:
        if self.piece_bytes == MAX_PIECE_BYTES:
            self._ask()
        if not self._tasks:
            super()._look_back()
            return
        try:
            found = self._tasks[0].places.result(PIECE_S)
        except TimeoutError:
            return
        task = self._tasks.popleft()
        low = task.stop
        for num_lines, places in zip(task.nums_lines, found, strict=False):
            low -= num_lines
            self._take_old(low, places)
        if len(found) < len(task.nums_lines):
            self._end_threads()
            self.piece_bytes = FIRST_PIECE_BYTES

    def _end_threads(self) -> None:
        self._tasks.clear()
        if self._let_go is not None:
            self._let_go()
            self._let_go = self._threads = None

    def _ask(self) -> None:
        """Have threads look further back."""
        if self._threads is None:
            self._threads = self._new_threads()
            self._let_go = weakref.finalize(self, self._threads.end)
        low = self._low - sum(sum(task.nums_lines) for task in self._tasks)
        num_copied = sum(task.num_copied_bytes for task in self._tasks)
        while len(self._tasks) < MAX_TASKS and low > self.logs.first and num_copied < MAX_COPIED_BYTES:
            stop, copied_before = low, num_copied
            pieces: list[LogPiece] = []
            while len(pieces) < PIECES_A_TASK and low > self.logs.first and num_copied < MAX_COPIED_BYTES:
                pieces.append(self.logs.piece_before(low, self.piece_bytes))
                low -= len(pieces[-1].ends)
                if isinstance(pieces[-1].packed, bytearray):
                    num_copied += len(pieces[-1].packed)
            places = self._threads.ask(partial(_look, pieces, self.wish, self._threads))
            self._tasks.append(_Task([len(piece.ends) for piece in pieces], num_copied - copied_before, stop, places))


Answer = TypeVar("Answer")


class SearchThreads:
    """Daemon threads that do what they are asked to in its order.

    Attributes:
        is_over: Whether they are to end; whatever they do looks at it first, and between its steps.
        takes_turns: Whether what they do takes the interpreter's lock so often that one at a time is quicker.
        turn: Held by the one that does something then.
    """

    def __init__(self, num_threads: int) -> None:
        """Begin."""
        self.is_over = threading.Event()
        self.takes_turns = threading.Event()
        self.turn = threading.Lock()
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name="rankdeck-search", daemon=True) for _ in range(num_threads)
        ]
        _ALL.add(self)
        for thread in self._threads:
            thread.start()

    def ask(self, call: Callable[[], Answer]) -> Future[Answer]:
        """Have a thread do something."""
        answer: Future[Answer] = Future()

        def do() -> None:
            try:
                answer.set_result(call())
            finally:
                if not answer.done():  # the thread itself tells of what is no fault of ours
                    answer.set_exception(RuntimeError("a thread has failed"))

        self._todo.put(do)
        return answer

    def end(self) -> None:
        """Have all of them end after the step that they are in; may be done twice."""
        self.is_over.set()
        for _ in self._threads:
            self._todo.put(None)

    def join(self) -> None:
        """Wait until they have ended."""
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (do := self._todo.get()) is not None:
            do()
            del do  # what it has looked at is not kept until there is more to do


_ALL: WeakSet[SearchThreads] = WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter does: one that comes back from RE2 later aborts the process.

    The interpreter ends such a thread by unwinding its stack, which the destructors of C++ do not let pass.
    """
    begun = list(_ALL)
    for threads in begun:
        threads.end()
    for threads in begun:
        threads.join()
