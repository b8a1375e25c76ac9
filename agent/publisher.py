"""The ZeroMQ socket on which the node's reports go out: one frame a report, to whoever listens, never waiting."""

from __future__ import annotations

import os

import zmq

SEND_HIGH_WATER_MARK = 8
"""Reports kept for a subscriber that is slow; it wants only the newest anyway."""


class Publisher:
    """A PUB socket on a Unix path."""

    def __init__(self, path: str) -> None:
        """Bind `path`.

        Raises:
            OSError: It cannot be bound (`zmq.ZMQError` is an OSError's cousin and is turned into one).
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror, path) from error
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere

    def publish(self, frame: bytes) -> None:
        """Send an encoded report; a PUB socket drops what a subscriber does not take in time."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; libzmq removes its path."""
        self._socket.close(linger=0)
        self._context.term()
