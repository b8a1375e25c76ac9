"""The one thread that moves the bytes of all tunnels of this process; it never waits for a host.

It is there from the first that joins to the last that leaves. What it is told from other threads it does in the order
in which it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

from app.ssh.errands import Errands, never_wait_here

if TYPE_CHECKING:
    from collections.abc import Callable

JOIN_S = 5.0
GATHER_S = 0.02
"""What is in no hurry is done so late, with all that has come meanwhile, instead of waking up for each."""


class Pump:
    """A thread with an event loop.

    Attributes:
        loop: Its, for what is called in its thread.
        errands: For what may block.
    """

    def __init__(self) -> None:
        """Start it; `join_pump` is for everybody else."""
        self.loop = asyncio.new_event_loop()
        self.errands = Errands()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_called = False
        self._gathered: deque[Callable[[], object]] = deque()
        self._is_gathering = False
        self._thread = threading.Thread(target=self._run, name="rankdeck-pump", daemon=True)
        self._thread.start()

    def call(self, do: Callable[[], object]) -> None:
        """Have something done soon in the pump's thread; from any thread, and never waits."""
        self._calls.append(do)
        if not self._is_called:
            self._is_called = True
            self._wake(self._do_called)

    def gather(self, do: Callable[[], object]) -> None:
        """Have something done in the pump's thread that is in no hurry; as `call`."""
        self._gathered.append(do)
        if not self._is_gathering:
            self._is_gathering = True
            self._wake(lambda: self.loop.call_later(GATHER_S, self._do_gathered))

    def run(self, do: Callable[[], object]) -> None:
        """Have something done in the pump's thread, and return when it is, or `JOIN_S` later; not in that thread."""
        done = threading.Event()
        self.call(do)
        self.call(done.set)
        done.wait(JOIN_S)

    def end(self) -> None:
        """End the thread; returns when it has."""
        self.errands.close()
        self.call(self.loop.stop)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        never_wait_here(self.errands)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _wake(self, do: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and with it whatever could be done
            self.loop.call_soon_threadsafe(do)

    def _do_called(self) -> None:
        self._is_called = False  # first: who calls from now on wakes us again
        self._do_all(self._calls)

    def _do_gathered(self) -> None:
        self._is_gathering = False
        self._do_all(self._gathered)

    def _do_all(self, calls: deque[Callable[[], object]]) -> None:
        """Do what is there now; what fails is told by the loop, and the others come to their turn all the same."""
        num_calls = len(calls)
        try:
            while num_calls:
                num_calls -= 1
                calls.popleft()()
        finally:
            if num_calls:
                self.loop.call_soon(self._do_all, calls)


class _Shared:
    pump: Pump | None = None
    num_users = 0


_lock = threading.Lock()


def join_pump() -> Pump:
    """Return the pump of this process, to be left once: it ends with the last who does."""
    with _lock:
        if _Shared.pump is None:
            _Shared.pump = Pump()
        _Shared.num_users += 1
        return _Shared.pump


def leave_pump() -> None:
    """Let go of the pump; the last waits for its end."""
    with _lock:
        _Shared.num_users -= 1
        last, _Shared.pump = (_Shared.pump, None) if _Shared.num_users == 0 else (None, _Shared.pump)
    if last is not None:
        last.end()
