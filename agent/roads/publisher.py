"""The ZeroMQ socket on which the node's reports go out: one frame a report, to whoever listens, never waiting."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from pathlib import Path

SEND_HIGH_WATER_MARK = 8
"""Reports kept for a subscriber that is slow; it wants only the newest anyway."""


class Publisher:
    """An XPUB socket on a Unix path: a PUB that hears who subscribes."""

    def __init__(self, path: str) -> None:
        """Bind `path`.

        Raises:
            OSError: It cannot be bound (`zmq.ZMQError` is an OSError's cousin and is turned into one).
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._topics: set[bytes] = set()
        """What somebody has subscribed to, and nobody has let go of."""
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror, path) from error
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere

    def has_listeners(self) -> bool:
        """Return whether anybody is subscribed now. A connection that broke counts until the kernel knows of it."""
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return bool(self._topics)
            # Source: zmq_socket(3), XPUB: a byte 1 or 0, then the topic, once for the first and the last subscriber.
            (self._topics.add if message[:1] == b"\x01" else self._topics.discard)(message[1:])

    def publish(self, frame: bytes) -> None:
        """Send an encoded report; the socket drops what a subscriber does not take in time."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; libzmq removes its path."""
        self._socket.close(linger=0)
        self._context.term()


class Subscriber:
    """A SUB socket on this node, for a console that cannot reach the publisher's path; it keeps the newest report."""

    def __init__(self, path: Path) -> None:
        """Connect to `path`, now or when somebody publishes there."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"ipc://{path}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wait(self, fd: int) -> bool:
        """Block until there is a report or `fd` can be read; return False when `fd` can."""
        self._poller.register(fd, zmq.POLLIN)
        ready = dict(self._poller.poll())
        return fd not in ready

    def take(self) -> bytes | None:
        """Return the newest frame, None if there is none that has not been taken."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
