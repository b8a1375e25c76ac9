"""Wanted log lines, the old ones looked for by several threads at once: RE2 holds no lock of the interpreter's.

Threads go on between frames. What they find is taken in the order of the lines, whichever of them is done first.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from app.filters.lines import lines_of
from app.tui.log_matches import FIRST_PIECE_BYTES, MAX_PIECE_BYTES, PIECE_S, LogMatches

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    import numpy as np
    from numpy.typing import NDArray

    from app.filters.lines import LineWish, LogPiece
    from app.tui.log_store import LogStore

MAX_THREADS = 4
PIECES_A_TASK = 8
"""5 ms of RE2, where handing a task over takes 0.1: `million_lines`."""
MAX_TASKS = 32
"""Under way at once: a million lines, so that threads have enough to do until the next frame."""


class _Task(NamedTuple):
    """Pieces that follow each other, the newest first."""

    pieces: list[LogPiece]
    stop: int
    """Number of the line behind them."""
    places: Future[list[NDArray[np.int64]]]
    """What each has of wanted lines; fewer, where looking has become slow."""


def _new_threads() -> Executor:
    return ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "rankdeck-search")


def _look(pieces: list[LogPiece], wish: LineWish, is_slow: threading.Event) -> list[NDArray[np.int64]]:
    found: list[NDArray[np.int64]] = []
    for piece in pieces:
        if is_slow.is_set():
            break
        began_s = time.thread_time()
        found.append(lines_of(piece, wish))
        if time.thread_time() - began_s > PIECE_S:
            is_slow.set()
    return found


class LogSearch(LogMatches):
    """Matches that threads look for while the pattern is quick, as pieces at their largest show.

    A slow one stays with the caller, in small pieces: it is one that RE2 has no automaton for, or that is found in many
    lines, each of which takes the interpreter's lock.
    """

    def __init__(self, wish: LineWish, logs: LogStore, new_threads: Callable[[], Executor] = _new_threads) -> None:
        """Begin to look; threads are made when there is work for them, and let go of at its end."""
        super().__init__(wish, logs)
        self._new_threads = new_threads
        self._threads: Executor | None = None
        self._let_go: Callable[[], object] | None = None
        self._tasks: deque[_Task] = deque()
        """Under way, the newest lines first."""
        self._is_slow = threading.Event()

    def search(self) -> bool:
        """Look at one more piece, or take what threads have found, if they have; return whether there is more to do."""
        is_more = super().search()
        if self.has_all_old and self._let_go is not None:
            self._tasks.clear()
            self._let_go()
            self._let_go = self._threads = None
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
        for piece, places in zip(task.pieces, found, strict=False):
            low -= len(piece.ends)
            self._take_old(low, places)
        if len(found) < len(task.pieces):
            self._tasks.clear()
            self._is_slow = threading.Event()
            self.piece_bytes = FIRST_PIECE_BYTES

    def _ask(self) -> None:
        """Have threads look further back."""
        if self._threads is None:
            self._threads = self._new_threads()
            self._let_go = weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        low = self._low
        for task in self._tasks:
            low -= sum(len(piece.ends) for piece in task.pieces)
        while len(self._tasks) < MAX_TASKS and low > self.logs.first:
            stop = low
            pieces: list[LogPiece] = []
            while len(pieces) < PIECES_A_TASK and low > self.logs.first:
                pieces.append(self.logs.piece_before(low, self.piece_bytes))
                low -= len(pieces[-1].ends)
            places = self._threads.submit(_look, pieces, self.wish, self._is_slow)
            self._tasks.append(_Task(pieces, stop, places))
