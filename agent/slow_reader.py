"""Reads what may take long, or for ever, on a thread of its own: the event loop only ever sees the last answers.

A process's shared memory is counted page by page under a lock of that process, and a file system on the network may
have lost its server. A read that hangs costs its figure and those behind it; the thread is a daemon, so it never holds
up the end of the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

Answer = TypeVar("Answer")


class TimedReads:
    """Reads that are awaited for some time, each on a thread of its own; used from one event loop."""

    def __init__(self, name: str) -> None:
        """`name` is that of the threads."""
        self._name = name
        self._running: dict[Hashable, asyncio.Future[Any]] = {}

    async def read(self, key: Hashable, read: Callable[[], Answer], within_s: float) -> Answer:
        """Return what `read` returns, or raise its OSError or ValueError; raise TimeoutError if that takes longer.

        One that hangs keeps its thread: another under its key waits for it, and begins once that has ended.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(within_s):
            while running := self._running.get(key):
                await asyncio.wait([running])
            answer: asyncio.Future[Answer] = loop.create_future()
            self._running[key] = answer
            answer.add_done_callback(lambda _: self._running.pop(key))
            threading.Thread(target=_answer, args=(loop, answer, read), name=self._name, daemon=True).start()
            return await asyncio.shield(answer)


def _answer(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Answer], read: Callable[[], Answer]) -> None:
    try:
        set_it = partial(answer.set_result, read())
    except (OSError, ValueError) as error:
        set_it = partial(answer.set_exception, error)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(set_it)


class SlowReader(Generic[Answer]):
    """One read at a time; used from one thread."""

    def __init__(self, name: str, *, stale_s: float) -> None:
        """`name` is the thread's; answers older than `stale_s` are dropped."""
        self._name = name
        self._stale_s = stale_s
        self._wanted: queue.SimpleQueue[tuple[Hashable, Callable[[], Answer]] | None] = queue.SimpleQueue()
        self._answers: dict[Hashable, tuple[Answer, float]] = {}
        self._thread: threading.Thread | None = None
        self._is_free = threading.Event()
        self._is_free.set()

    def ask(self, key: Hashable, read: Callable[[], Answer]) -> bool:
        """Call `read` on the thread; an OSError of it is no answer. Return False while another read is running."""
        if not self._is_free.is_set():
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._is_free.clear()
        self._wanted.put((key, read))
        return True

    @property
    def is_free(self) -> bool:
        """Whether no read is running."""
        return self._is_free.is_set()

    def last(self, key: Hashable, stale_s: float | None = None) -> Answer | None:
        """Return the last answer under that key, also during a new read of it; None if there is no fresh one."""
        found = self._answers.get(key)
        if found is None or time.monotonic() - found[1] > (self._stale_s if stale_s is None else stale_s):
            return None
        return found[0]

    def forget(self, key: Hashable) -> None:
        self._answers.pop(key, None)

    def close(self) -> None:
        """End the thread after the present read, without waiting for it."""
        self._wanted.put(None)

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            key, read = wanted
            try:
                self._answers[key] = (read(), time.monotonic())
            except OSError:
                self._answers.pop(key, None)
            self._is_free.set()
