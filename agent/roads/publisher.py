"""The ZeroMQ socket on which the node's reports go out: one frame a report, to whoever listens, never waiting."""

from __future__ import annotations

import os

import zmq

SEND_HIGH_WATER_MARK = 8
"""Reports kept for a subscriber that is slow; it wants only the newest anyway."""


class Publisher:
    """What the node says, on a Unix path: an XPUB socket, which is a PUB that hears who subscribes."""

    def __init__(self, path: str) -> None:
        """Bind `path`.

        Raises:
            OSError: It cannot be bound (`zmq.ZMQError` is an OSError's cousin and is turned into one).
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._topics: set[bytes] = set()
        """What somebody has subscribed to, and nobody has let go of."""
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
        """Close the socket; libzmq removes the path."""
        self._socket.close(linger=0)
        self._context.term()
