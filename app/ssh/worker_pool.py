"""Runs blocking tasks in threads that start on demand: a host that stalls delays only its own tasks.

A thread that serves all hosts must not wait for one of them. It marks itself with `never_wait_here`, and what would
send from there (`app.ssh.transport`) becomes a task here.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

IDLE_S = 5.0
"""Seconds without a task after which a thread ends."""


class WorkerPool:
    """Threads, as many as there are tasks that block at present."""

    def __init__(self) -> None:
        self._todo: deque[Callable[[], object]] = deque()
        self._called = threading.Condition()
        self._num_idle = 0
        self._is_closed = False

    def do(self, task: Callable[[], object]) -> None:
        """Run a task immediately in some thread; never waits."""
        with self._called:
            self._todo.append(task)
            if len(self._todo) <= self._num_idle:
                self._called.notify()
                return
        threading.Thread(target=self._work, name="rankdeck-ssh", daemon=True).start()

    def close(self) -> None:
        """End the idle threads, and each other one after its task."""
        with self._called:
            self._is_closed = True
            self._called.notify_all()

    def _work(self) -> None:
        while True:
            with self._called:
                self._num_idle += 1
                self._called.wait_for(lambda: self._todo or self._is_closed, IDLE_S)
                self._num_idle -= 1
                if not self._todo:
                    return
                task = self._todo.popleft()
            task()


class SerialQueue:
    """Tasks that run one after the other."""

    def __init__(self, workers: WorkerPool) -> None:
        self._workers = workers
        self._todo: deque[Callable[[], object]] = deque()
        self._lock = threading.Lock()
        self._is_busy = False

    def put(self, task: Callable[[], object]) -> None:
        """Run a task after those put before; never waits."""
        with self._lock:
            self._todo.append(task)
            if self._is_busy:
                return
            self._is_busy = True
        self._workers.do(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._todo:
                    self._is_busy = False
                    return
                task = self._todo.popleft()
            is_done = False
            try:
                task()
                is_done = True
            finally:
                if not is_done:  # its thread reports the error, and the next tasks must not wait for ever
                    self._workers.do(self._work)


class _Here(threading.local):
    workers: WorkerPool | None = None


_here = _Here()


def never_wait_here(workers: WorkerPool) -> None:
    """Mark this thread as one that must not wait; `workers` runs its blocking tasks."""
    _here.workers = workers


def current_workers() -> WorkerPool | None:
    """Return the pool for this thread's blocking tasks; None where the thread may wait itself."""
    return _here.workers
