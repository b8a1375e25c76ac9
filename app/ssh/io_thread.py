"""The one thread that moves the bytes of all tunnels of this process; it never waits for a host.

The thread (`IoThread`) lives from the first `join_io_thread` to the last `leave_io_thread`. It runs the calls of other
threads in their order.

`ChannelReader` is a channel as that thread sees it: it takes the bytes that are there without waiting, and calls back
when some come (`RingingBuffer`).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.worker_pool import WorkerPool, never_wait_here

if TYPE_CHECKING:
    from collections.abc import Callable

JOIN_S = 5.0
GATHER_S = 0.02
"""Seconds by which calls that can wait are delayed, to run together instead of waking the thread for each."""


class IoThread:
    """A thread with an event loop.

    Attributes:
        loop: Its event loop, for code in its thread.
        workers: Runs what may block.
    """

    def __init__(self) -> None:
        """Start it; callers other than `join_io_thread` use that."""
        self.loop = asyncio.new_event_loop()
        self.workers = WorkerPool()
        self._calls: deque[Callable[[], object]] = deque()
        self._is_called = False
        self._gathered: deque[Callable[[], object]] = deque()
        self._is_gathering = False
        self._thread = threading.Thread(target=self._run, name="rankdeck-pump", daemon=True)
        self._thread.start()

    def call(self, do: Callable[[], object]) -> None:
        """Run a function soon in the I/O thread; may be called from any thread, and never waits."""
        self._calls.append(do)
        if not self._is_called:
            self._is_called = True
            self._wake(self._do_called)

    def gather(self, do: Callable[[], object]) -> None:
        """Run a function that can wait in the I/O thread; as `call`."""
        self._gathered.append(do)
        if not self._is_gathering:
            self._is_gathering = True
            self._wake(lambda: self.loop.call_later(GATHER_S, self._do_gathered))

    def run(self, do: Callable[[], object]) -> None:
        """Run a function in the I/O thread; return when it is done, or after `JOIN_S`. Call it from another thread."""
        done = threading.Event()
        self.call(do)
        self.call(done.set)
        done.wait(JOIN_S)

    def end(self) -> None:
        """End the thread; return when it has ended."""
        self.workers.close()
        self.call(self.loop.stop)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        never_wait_here(self.workers)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def _wake(self, do: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it all calls
            self.loop.call_soon_threadsafe(do)

    def _do_called(self) -> None:
        self._is_called = False  # first: a later caller wakes the loop again
        self._do_all(self._calls)

    def _do_gathered(self) -> None:
        self._is_gathering = False
        self._do_all(self._gathered)

    def _do_all(self, calls: deque[Callable[[], object]]) -> None:
        """Run the calls that are there now; the loop logs a failure, and the others still run."""
        num_calls = len(calls)
        try:
            while num_calls:
                num_calls -= 1
                calls.popleft()()
        finally:
            if num_calls:
                self.loop.call_soon(self._do_all, calls)


class _Shared:
    shared: IoThread | None = None
    num_users = 0


_lock = threading.Lock()


def join_io_thread() -> IoThread:
    """Return the I/O thread of this process; the caller leaves it once, and it ends with the last user."""
    with _lock:
        if _Shared.shared is None:
            _Shared.shared = IoThread()
        _Shared.num_users += 1
        return _Shared.shared


def leave_io_thread() -> None:
    """Leave the I/O thread; the last user waits for its end."""
    with _lock:
        _Shared.num_users -= 1
        last, _Shared.shared = (_Shared.shared, None) if _Shared.num_users == 0 else (None, _Shared.shared)
    if last is not None:
        last.end()


CHUNK_BYTES = 65_536


class ByteChannel(Protocol):
    """The local end of a channel, as in paramiko. Each method may be called from another thread than the others."""

    def recv(self, nbytes: int) -> bytes:
        """Block for some bytes; none when the other side has sent all."""
        ...

    def sendall(self, s: bytes) -> None:
        """Block until all bytes are sent."""
        ...

    def shutdown_write(self) -> None:
        """Signal that no more bytes will be sent."""
        ...

    def close(self) -> None:
        """Close it; a pending `recv` returns."""
        ...


class RingingBuffer(Protocol):
    """Bytes that a channel has received."""

    def set_event(self, event: threading.Event, /) -> None:
        """Set the event with each piece that comes, and at the end; immediately if there is something already."""
        ...


class RingingChannel(ByteChannel, Protocol):
    """A channel that signals received bytes."""

    @property
    def in_buffer(self) -> RingingBuffer:
        """Bytes received and not read."""
        ...

    @property
    def eof_received(self) -> int:
        """Not zero once the other side has sent all, whether that was read or not."""
        ...

    @property
    def closed(self) -> bool:
        """True once it is closed here, or with its connection."""
        ...

    def settimeout(self, timeout: float | None) -> None:
        """Set the time limit of `recv` and `sendall` in seconds."""
        ...

    def recv_ready(self) -> bool:
        """Return whether `recv` would return bytes without waiting."""
        ...


class ChannelReader:
    """One channel, read in one thread.

    paramiko's own `fileno` to wait for would take a pipe of two descriptors for each channel, and two system calls for
    each piece.
    """

    def __init__(self, channel: RingingChannel, ring: Callable[[], None]) -> None:
        """Begin to listen.

        Args:
            channel: Has no other reader.
            ring: Called once when there may be something to take, in the thread that received it; again after `take`.
        """
        self.channel = channel
        self._bell = _Bell(ring)
        channel.in_buffer.set_event(self._bell)

    @property
    def has_more(self) -> bool:
        """Whether `take` would return something now."""
        return self.channel.recv_ready() or bool(self.channel.eof_received) or self.channel.closed

    def take(self) -> bytes | None:
        """Return some bytes, none at the end; None when nothing is there."""
        self._bell.is_rung = False  # first: what comes from now on rings again
        if not self.has_more:
            return None
        try:
            return self.channel.recv(CHUNK_BYTES)
        except CHANNEL_ERRORS:
            return b""


class _Bell(threading.Event):
    """Event that a channel sets in its connection's thread, with the buffer locked: too early to read there."""

    def __init__(self, ring: Callable[[], None]) -> None:
        super().__init__()
        self.is_rung = False
        self._ring = ring

    def set(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            self._ring()

    def clear(self) -> None:
        """Do nothing: `ChannelReader.take` resets the bell."""


def hang_up(channel: ByteChannel) -> None:
    """Close a channel in whatever state it is."""
    with contextlib.suppress(*CHANNEL_ERRORS):
        channel.close()
