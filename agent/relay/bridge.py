"""Carries the bytes of one Unix socket over a stream of a relay's connection, in an asyncio loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from agent.relay.stream import StreamBrokenError, StreamEnd
from agent.wire.relay import MAX_CHUNK_BYTES, OfStream, Reset

if TYPE_CHECKING:
    from collections.abc import Callable


class StreamBridge:
    """A connected socket and its end of a stream, from `start` until it is over."""

    def __init__(
        self,
        near: socket.socket,
        number: int,
        send: Callable[[OfStream], bool],
        on_over: Callable[[int], None],
    ) -> None:
        """Make the bridge of a stream that is open.

        Args:
            near: Connected, and never waiting; it is closed with the bridge.
            number: Number of the stream.
            send: Takes what goes to the far end; False when nothing goes there any more.
            on_over: Called once, with the number, when the stream is over.
        """
        self._near = near
        self._end = StreamEnd(number)
        self._send = send
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._is_reading = False
        self._is_writing = False
        self._has_ended_near = False
        self._is_closed = False

    def start(self) -> None:
        """Begin to carry."""
        self._go_on()

    def take(self, message: OfStream) -> None:
        """Take a message of the far end."""
        try:
            self._end.on_far_message(message)
        except StreamBrokenError:
            self.close(notifies_peer=not isinstance(message, Reset))
            return
        self._write()

    def close(self, *, notifies_peer: bool = True) -> None:
        """End the stream; the far end is notified unless `notifies_peer` is False."""
        if self._is_closed:
            return
        self._is_closed = True
        if notifies_peer:
            self._send(Reset(self._end.number))
        fd = self._near.fileno()
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)
        self._near.close()
        self._on_over(self._end.number)

    def _read(self) -> None:
        try:
            chunk = self._near.recv(min(self._end.room, MAX_CHUNK_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if chunk:
            self._end.on_near_bytes(chunk)
        else:
            self._end.near_ended()
        self._go_on()

    def _write(self) -> None:
        waiting = self._end.for_near
        if waiting:
            try:
                self._end.near_took(self._near.send(waiting))
            except (BlockingIOError, InterruptedError):
                pass
            except OSError:
                self.close()
                return
        if self._end.is_near_to_end and not self._has_ended_near:
            self._has_ended_near = True
            with contextlib.suppress(OSError):
                self._near.shutdown(socket.SHUT_WR)
        self._go_on()

    def _go_on(self) -> None:
        """Send the far end what is due, and wait for what there is room for."""
        for message in self._end.for_far():
            if not self._send(message):
                self.close(notifies_peer=False)
                return
        if self._end.is_over:
            self.close(notifies_peer=False)
            return
        fd = self._near.fileno()
        if self._is_reading != (wants := self._end.room > 0):
            self._is_reading = wants
            _ = self._loop.add_reader(fd, self._read) if wants else self._loop.remove_reader(fd)
        if self._is_writing != (wants := bool(self._end.for_near)):
            self._is_writing = wants
            _ = self._loop.add_writer(fd, self._write) if wants else self._loop.remove_writer(fd)
