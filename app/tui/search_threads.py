"""Threads of a search: ended from one step of their work to the next, and waited for by nothing but the exit.

Not a pool: one lets what runs go on, and the interpreter waits at its end for all that a pool has begun.
"""

from __future__ import annotations

import atexit
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable

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
