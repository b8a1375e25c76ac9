"""Searches old log lines with several threads in parallel: RE2 releases the interpreter's lock.

The threads of `LogSearch` work on between frames. Their results are taken in the order of the lines, whichever thread
finishes first.

`SearchThreads` end between two steps of their work, and only the exit waits for them. They are no executor: that lets
running calls go on, and the interpreter waits at exit for every call that an executor has started.
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
"""Pieces per task: 5 ms of RE2, where handing a task over takes 0.1 ms: `million_lines`."""
MAX_TASKS = 32
"""Limit of tasks in progress: a million lines, so that threads are busy until the next frame."""
MAX_COPIED_BYTES = 4 * 2**20
"""Approximate limit of copied bytes in progress. The latest chunk grows, so that its pieces are copies; pieces of
other chunks are views."""
SLOW_PIECE_S = 0.02
"""CPU seconds after which a pattern counts as slow; a piece with a match in every other line takes 4 ms."""


class _Task(NamedTuple):
    """Adjacent pieces, the latest first; only the thread holds the pieces themselves."""

    nums_lines: list[int]
    num_copied_bytes: int
    stop: int
    """Number of the line after them."""
    places: Future[list[NDArray[np.int64]]]
    """Matches of each piece; fewer entries when the search has become slow."""


class _OverError(Exception):
    """The search is to end."""


def _new_threads() -> SearchThreads:
    return SearchThreads(min(MAX_THREADS, os.cpu_count() or 1))


def _look(pieces: list[LogPiece], wish: LineWish, threads: SearchThreads) -> list[NDArray[np.int64]]:
    """Search the pieces until all are done, one takes long, or the search is over.

    Many scattered matches each take the interpreter's lock: competing threads take three times as long, so they take
    turns.
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
    """Matches that threads search while the pattern is quick, which pieces of the largest size show.

    A slow pattern, for which RE2 has no automaton, is searched by the caller in small pieces.
    """

    def __init__(self, wish: LineWish, logs: LogStore, new_threads: Callable[[], SearchThreads] = _new_threads) -> None:
        """Start the search; threads are made when there is work for them, and end with it."""
        super().__init__(wish, logs)
        self._new_threads = new_threads
        self._threads: SearchThreads | None = None
        self._let_go: Callable[[], object] | None = None
        self._tasks: deque[_Task] = deque()
        """Tasks in progress, the latest lines first."""

    def search(self) -> bool:
        """Search one more piece, or take results of threads; return whether there is more to do."""
        is_more = super().search()
        if self.has_all_old:
            self._end_threads()
        return is_more

    def _search_before(self) -> None:
        if self.piece_bytes == MAX_PIECE_BYTES:
            self._ask()
        if not self._tasks:
            super()._search_before()
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
        """Give threads older pieces to search."""
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
    """Daemon threads that run calls in the order of their requests.

    Attributes:
        is_over: Set when the threads are to end; calls check it first, and between their steps.
        takes_turns: Set when calls compete so much for the interpreter's lock that one at a time is quicker.
        turn: Lock of the call whose turn it is.
    """

    def __init__(self, num_threads: int) -> None:
        """Start the threads."""
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
        """Run a call in a thread."""
        answer: Future[Answer] = Future()

        def do() -> None:
            try:
                answer.set_result(call())
            finally:
                if not answer.done():  # the thread itself prints any other exception
                    answer.set_exception(RuntimeError("a thread has failed"))

        self._todo.put(do)
        return answer

    def end(self) -> None:
        """End all threads after their current step; may be called twice."""
        self.is_over.set()
        for _ in self._threads:
            self._todo.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (do := self._todo.get()) is not None:
            do()
            del do  # its data is not kept until the next call


_ALL: WeakSet[SearchThreads] = WeakSet()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter exits: one that returns from RE2 later aborts the process.

    The interpreter ends such a thread by unwinding its stack, which the destructors of C++ do not permit.
    """
    begun = list(_ALL)
    for threads in begun:
        threads.end()
    for threads in begun:
        threads.join()
