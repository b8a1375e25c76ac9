"""A Unix socket on this machine that leads to one on a host.

Clients of local sockets (`app.fleet.commands`, `app.fleet.fleet`) need no SSH of their own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING

from app.errors import HostUnreachableError
from app.ssh.io_thread import CHUNK_BYTES, ChannelReader, hang_up, join_io_thread, leave_io_thread
from app.ssh.transport import CHANNEL_ERRORS
from app.ssh.worker_pool import SerialQueue

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from app.ssh.io_thread import IoThread, RingingChannel

MAX_WAITING_BYTES = 4 * CHUNK_BYTES
"""Bytes of a connection that wait for a slow host; as many come the other way, and SSH's window."""
ACCEPT_AGAIN_S = 0.5
"""Seconds until the next accept, after this process had no descriptor left for a connection."""


class Tunnel:
    """A listener and its connections, all in the I/O thread."""

    def __init__(
        self, path: Path, open_channel: Callable[[], RingingChannel], max_reply_bytes: int = 0, request: bytes = b""
    ) -> None:
        """Listen at `path`; each connection opens a channel, one after the other.

        Args:
            path: Path of the socket.
            open_channel: Raises HostUnreachableError; may block.
            max_reply_bytes: A connection ends if the host sends more before the next request; 0 is no limit. Limited
                replies can wait: they are forwarded with those of other hosts, up to `GATHER_S` later.
            request: How a request to the host begins.

        Raises:
            OSError: The path cannot be bound.
        """
        self._open_channel = open_channel
        self._limit = (max_reply_bytes, request)
        self._lock = threading.Lock()
        self._is_closed = False
        self._crossings: set[_Crossing] = set()
        self._server_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._server_socket.bind(str(path))
            os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
            self._server_socket.listen()
            self._server_socket.settimeout(0)
        except OSError:
            self._server_socket.close()
            raise
        self._io_thread = join_io_thread()
        self._io_thread.call(self._listen)

    def close(self) -> None:
        """End the listener and every connection; safe to call twice."""
        with self._lock:
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        try:
            self._io_thread.run(self._end)
        finally:
            leave_io_thread()

    def hang_up(self) -> None:
        """End every connection; a client that connects again gets a new channel."""
        self._io_thread.call(self._end_crossings)

    def _listen(self) -> None:
        if not self._is_closed:
            self._io_thread.loop.add_reader(self._server_socket, self._accept)

    def _accept(self) -> None:
        loop = self._io_thread.loop
        try:
            near, _ = self._server_socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            loop.remove_reader(self._server_socket)
            loop.call_later(ACCEPT_AGAIN_S, self._listen)
            return
        loop.remove_reader(self._server_socket)  # until this one has its channel: a host opens one at a time
        self._io_thread.workers.do(lambda: self._open(near))

    def _open(self, near: socket.socket) -> None:
        """Open a channel, which may take a while, in a thread of its own."""
        far: RingingChannel | None = None
        try:
            far = self._open_channel()
        except HostUnreachableError:
            pass  # the client sees that its connection is closed, and may try again
        finally:
            with self._lock:
                is_taken = not self._is_closed
                if is_taken:
                    self._io_thread.call(lambda: self._begin(near, far))
            if not is_taken:
                near.close()
                if far is not None:
                    hang_up(far)

    def _begin(self, near: socket.socket, far: RingingChannel | None) -> None:
        self._listen()
        if far is None:
            near.close()
        else:
            crossing = _Crossing(self._io_thread, near, far, self._crossings.discard, *self._limit)
            self._crossings.add(crossing)

    def _end(self) -> None:
        self._io_thread.loop.remove_reader(self._server_socket)
        self._server_socket.close()
        self._end_crossings()

    def _end_crossings(self) -> None:
        for crossing in list(self._crossings):
            crossing.end()


class _Crossing:
    """One connection in both directions, until the host's side has ended: what is sent after that is lost.

    Everything but `_send` is called in the I/O thread.
    """

    def __init__(
        self,
        thread: IoThread,
        near: socket.socket,
        far: RingingChannel,
        on_end: Callable[[_Crossing], None],
        max_reply_bytes: int,
        request: bytes,
    ) -> None:
        self._io_thread = thread
        self._near = near
        self._on_end = on_end
        self._is_ended = False
        self._max_reply_bytes = max_reply_bytes
        self._request = request
        self._num_reply_bytes = 0
        """Bytes from the host since something was sent to it."""
        self._for_near = memoryview(b"")
        """Bytes the client has not taken yet; until it has, nothing more is taken from the host."""
        self._queue = SerialQueue(thread.workers)
        self._lock = threading.Lock()
        self._num_waiting = 0
        """Bytes taken from the client, and not sent yet."""
        self._is_paused = False
        near.settimeout(0)
        self._read_near()
        soon = thread.gather if max_reply_bytes else thread.call
        self._far = ChannelReader(far, lambda: soon(self._carry_up))

    def end(self) -> None:
        """Close both sides, whatever is still under way; safe to call twice."""
        if self._is_ended:
            return
        self._is_ended = True
        self._io_thread.loop.remove_reader(self._near)
        self._io_thread.loop.remove_writer(self._near)
        hang_up(self._far.channel)  # wakes the task that waits for the host to take more
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)
            while self._near.recv(CHUNK_BYTES):  # unread bytes would make the client see a reset, not an end
                pass
        self._near.close()
        self._on_end(self)

    def _carry_up(self) -> None:
        """Forward one piece from the host to the client; then it is another connection's turn."""
        if self._is_ended or self._for_near:
            return
        chunk = self._far.take()
        self._num_reply_bytes += len(chunk or b"")
        if 0 < self._max_reply_bytes < self._num_reply_bytes:
            self.end()
        elif chunk:
            self._for_near = memoryview(chunk)
            self._give_near()
        elif chunk is not None:
            self.end()

    def _give_near(self) -> None:
        had_to_wait = False
        try:
            self._for_near = self._for_near[self._near.send(self._for_near) :]
            had_to_wait = len(self._for_near) > 0
        except BlockingIOError:
            had_to_wait = True
        except OSError:
            self.end()
            return
        if had_to_wait:
            self._io_thread.loop.add_writer(self._near, self._give_near)
            return
        self._io_thread.loop.remove_writer(self._near)
        if self._far.has_more:
            self._io_thread.loop.call_soon(self._carry_up)

    def _read_near(self) -> None:
        if not self._is_ended:
            self._io_thread.loop.add_reader(self._near, self._carry_down)

    def _carry_down(self) -> None:
        try:
            chunk = self._near.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self.end()
            return
        if chunk.startswith(self._request):
            self._num_reply_bytes = 0
        with self._lock:
            self._num_waiting += len(chunk)
            self._is_paused = self._num_waiting >= MAX_WAITING_BYTES
        if self._is_paused or not chunk:
            self._io_thread.loop.remove_reader(self._near)
        self._queue.put(lambda: self._send(chunk))

    def _send(self, chunk: bytes) -> None:
        """Send to the host, in a thread that may wait; empty bytes mean that no more will come."""
        try:
            if chunk:
                self._far.channel.sendall(chunk)
            else:
                self._far.channel.shutdown_write()
        except CHANNEL_ERRORS:
            self._io_thread.call(self.end)
        with self._lock:
            self._num_waiting -= len(chunk)
            goes_on = self._is_paused and self._num_waiting < MAX_WAITING_BYTES
            if goes_on:
                self._is_paused = False
        if goes_on:
            self._io_thread.call(self._read_near)
