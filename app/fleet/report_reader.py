"""Receives reports from agents and relays: one thread, one DEALER socket for each.

Each socket requests one frame at a time, as `agent.wire.relay` describes. A busy console leaves frames where they are,
and continues with the latest. The thread waits on the sockets' descriptors: libzmq's own poll looks at every socket
each time, which for 2,048 of them takes 3 ms.

Source: zmq_getsockopt(3), ZMQ_FD: it signals that a socket wants to be looked at, until nothing more can be received.
"""

from __future__ import annotations

import contextlib
import selectors
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, cast

import zmq

from agent.wire.codec import MalformedMessageError
from agent.wire.relay import MAX_FRAMES_ASKED, MAX_MERGED_BYTES, Merged, decode_merged, encode_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

POLL_S = 0.2
"""Seconds until the thread sees that it should end."""
GATHER_S = 0.05
"""Seconds between two looks at many sockets: reports are taken together, instead of waking up for each."""
SPARE_SOCKETS = 16
_POLLIN = int(zmq.POLLIN)
"""A plain number: arithmetic with an enumeration takes longer than to receive a report."""
MAX_FRAMES_A_LOOK = 4
"""Frames taken from a socket before others have their turn: a peer that sends unrequested frames delays no other."""
MAX_REQUESTS_KEPT = 4
LONG_WAY_S = 0.2
"""Seconds from report to report; only a connection shorter than that has more than one frame requested, as none can
queue there."""
CLOCK_ERROR_S = 0.05
"""Seconds by which two machines' clocks may differ in a measured duration."""
RECONNECT_MS, RECONNECT_MAX_MS = 500, 2_000


class _Source:
    """A connection to an agent or a relay."""

    def __init__(self, name: str, socket: zmq.Socket[bytes]) -> None:
        self.name = name
        self.socket = socket
        self._number = 0
        """Number of the latest request."""
        self._num_due = 0
        """Frames of that request that have not come."""
        self._asked_at_s: dict[int, float] = {}
        """When the latest requests were sent, by their numbers."""

    def receive(self, merged: Merged, now_s: float) -> float:
        """Return how many seconds a frame was under way at most; request more if it is the last one requested.

        Raises:
            MalformedMessageError: It has reports that nobody has requested.
        """
        asked_at_s = self._asked_at_s.get(merged.asked)
        if asked_at_s is None and merged.reports:
            raise MalformedMessageError("reports that nobody has asked for")
        way_s = 0.0 if asked_at_s is None else now_s - asked_at_s - merged.held_ms / 1000
        if way_s < -CLOCK_ERROR_S:  # nobody knows how old it is
            raise MalformedMessageError("a frame that was held for longer than it was asked for: this machine slept")
        way_s = max(0.0, way_s)
        self._num_due -= merged.asked == self._number
        if merged.asked == 0 or self._num_due <= 0:
            self.ask(MAX_FRAMES_ASKED if asked_at_s is not None and way_s < LONG_WAY_S else 1)
        return way_s

    def ask(self, num_frames: int) -> None:
        """Request frames, unless the connection has ended: a new connection sends its first frame by itself."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode_request(self._number + 1, num_frames), zmq.NOBLOCK)
            self._number += 1
            self._num_due = num_frames
            self._asked_at_s[self._number] = time.monotonic()
            self._asked_at_s.pop(self._number - MAX_REQUESTS_KEPT, None)


class ReportReader:
    """Reads the sockets from `start` to `close`. The callbacks are called in its thread, and must not block."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        on_frame: Callable[[str, Merged, float], None],
        on_malformed: Callable[[str, MalformedMessageError], None],
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Set up for the reports sockets at some paths, by names of the caller's choice.

        Args:
            paths: A socket that is not there yet is tried again until it is.
            on_frame: Takes the name, a frame, and how many seconds that was under way at most.
            on_malformed: Takes the name and what is wrong with a frame.
            on_lost: Called when a connection that was there has ended; it is tried again all the same.
        """
        self._paths = dict(paths)
        self._waiting: dict[str, Path] = {}
        """Paths without a socket so far."""
        self._on_frame = on_frame
        self._on_malformed = on_malformed
        self._on_lost = on_lost
        self._gather_s = GATHER_S if len(paths) > 1 else 0.0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankdeck-reports", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        if self._paths:
            self._thread.start()

    def close(self) -> None:
        """End the thread and its sockets; blocks for at most about `POLL_S`."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            with contextlib.suppress(OSError, zmq.ZMQError):  # for want of a descriptor; it is tried again
                self._read()
            self._is_closing.wait(POLL_S)

    def _read(self) -> None:
        """Read all sockets until `close`."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        selector = selectors.DefaultSelector()
        unread: list[Callable[[], bool]] = []
        self._waiting = dict(self._paths)
        try:
            # The default limit of a context is 1,023 sockets.
            context.set(zmq.MAX_SOCKETS, 3 * len(self._waiting) + SPARE_SOCKETS)
            while not self._is_closing.is_set():
                if self._waiting:
                    unread += self._connect(context, selector)
                ready = [key.data for key, _ in selector.select(0.0 if unread else POLL_S)]
                unread = [look for look in [*unread, *(look for look in ready if look not in unread)] if look()]
                self._is_closing.wait(self._gather_s)
        finally:
            context.destroy(linger=0)
            selector.close()

    def _connect(
        self, context: zmq.Context[zmq.Socket[bytes]], selector: selectors.BaseSelector
    ) -> Iterator[Callable[[], bool]]:
        """Connect to each path; yield the functions to call once, as descriptors signal nothing before the first look.

        A socket that cannot be opened for want of a descriptor is tried again.
        """
        for name, path in [*self._waiting.items()]:
            try:
                source = _Source(name, _connected(context, path))
                monitor = source.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) if self._on_lost else None
            except zmq.ZMQError:
                return
            del self._waiting[name]
            yield _register(selector, source.socket, partial(self._look, source))
            if monitor is not None:
                yield _register(selector, monitor, partial(self._look_at_losses, name, monitor))

    def _look(self, source: _Source) -> bool:
        """Take what a socket has; return whether there may be more, which its descriptor would not signal."""
        try:
            for _ in range(MAX_FRAMES_A_LOOK):
                frame = source.socket.recv(zmq.NOBLOCK)
                if source.socket.get(zmq.RCVMORE):
                    source.socket.recv_multipart(zmq.NOBLOCK)
                    frame = b""
                self._take(source, frame)
                if not cast("int", source.socket.get(zmq.EVENTS)) & _POLLIN:
                    return False
        except zmq.Again:
            return False
        return True

    def _take(self, source: _Source, frame: bytes) -> None:
        now_s = time.monotonic()
        try:
            merged = decode_merged(frame)
            way_s = source.receive(merged, now_s)
        except MalformedMessageError as error:
            self._on_malformed(source.name, error)
            source.ask(1)
            return
        self._on_frame(source.name, merged, way_s)

    def _look_at_losses(self, name: str, monitor: zmq.Socket[bytes]) -> bool:
        """Take libzmq's events about lost connections."""
        assert self._on_lost is not None
        try:
            while True:
                monitor.recv_multipart(zmq.NOBLOCK)
                self._on_lost(name)
        except zmq.Again:
            return False


def _connected(context: zmq.Context[zmq.Socket[bytes]], path: Path) -> zmq.Socket[bytes]:
    """Return a socket that is connected to a path, or will be; raises `zmq.ZMQError`, and leaves none then."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.PROBE_ROUTER, 1)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a request to a lost connection must not reach the next one
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MERGED_BYTES)
        socket.setsockopt(zmq.RCVHWM, MAX_FRAMES_ASKED)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.connect(f"ipc://{path}")
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket


def _register(
    selector: selectors.BaseSelector, socket: zmq.Socket[bytes], look: Callable[[], bool]
) -> Callable[[], bool]:
    selector.register(cast("int", socket.get(zmq.FD)), selectors.EVENT_READ, look)
    return look
