"""A ZeroMQ subscriber to an agent on this machine, as a console here is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from pathlib import Path


class Subscriber:
    """Hears all reports from now on; it keeps the newest."""

    def __init__(self, path: Path) -> None:
        """Connect to `path`, now or when somebody publishes there."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"ipc://{path}")

    def take(self) -> bytes | None:
        """Return the newest frame, None if there is none that has not been taken."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)
