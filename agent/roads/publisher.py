"""The ZeroMQ sockets on which the node's reports go out: one frame a report, to whoever listens, never waiting."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.roads.direct_road import DirectRoad
    from agent.wire.direct import ListenForTelemetry, Listening
    from agent.wire.replies import Refused

SEND_HIGH_WATER_MARK = 8
"""Reports kept for a subscriber that is slow; it wants only the newest anyway."""


class Outlet:
    """An XPUB socket: a PUB that hears who subscribes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Make one that is bound nowhere yet."""
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._topics: set[bytes] = set()
        """What somebody has subscribed to, and nobody has let go of."""

    def has_listeners(self) -> bool:
        """Return whether anybody is subscribed now. A connection that broke counts until the kernel knows of it."""
        while True:
            try:
                message = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return bool(self._topics)
            # Source: zmq_socket(3), XPUB: a byte 1 or 0, then the topic, once for the first and the last subscriber.
            (self._topics.add if message[:1] == b"\x01" else self._topics.discard)(message[1:])

    def publish(self, frame: bytes) -> None:
        """Send an encoded report; the socket drops what a subscriber does not take in time."""
        self.socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket, and every connection to it."""
        self.socket.close(linger=0)


class Publisher:
    """What the node says, on a Unix path, and over TCP while somebody has asked for that."""

    def __init__(self, path: str) -> None:
        """Bind `path`.

        Raises:
            OSError: It cannot be bound (`zmq.ZMQError` is an OSError's cousin and is turned into one).
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._outlet = Outlet(self._context)
        self._direct: DirectRoad | None = None
        try:
            self._outlet.socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror, path) from error
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere

    def listen(self, command: ListenForTelemetry, addresses: Sequence[str]) -> Listening | Refused:
        """Publish also to a console that comes over TCP; see `DirectRoad.open`."""
        if self._direct is None:
            # Only a node that is asked to listen pays for what a gate needs.
            from agent.roads.direct_road import DirectRoad  # noqa: PLC0415

            self._direct = DirectRoad()
        return self._direct.open(command, addresses)

    def stop_listening(self, client_key: str) -> None:
        """Let a console that came over TCP in no more."""
        if self._direct is not None:
            self._direct.forget(client_key)

    def beat(self) -> None:
        """Let time pass for those who came over TCP."""
        if self._direct is not None:
            self._direct.beat()

    def has_listeners(self) -> bool:
        """Return whether anybody is subscribed now, on whatever road; see `Outlet.has_listeners`."""
        return sum(outlet.has_listeners() for outlet in self._outlets()) > 0  # each is looked at

    def publish(self, frame: bytes) -> None:
        """Send an encoded report to whoever listens."""
        for outlet in self._outlets():
            outlet.publish(frame)

    def close(self) -> None:
        """Close the sockets; libzmq removes the path."""
        if self._direct is not None:
            self._direct.close()
        self._outlet.close()
        self._context.term()

    def _outlets(self) -> list[Outlet]:
        direct = self._direct.outlet if self._direct is not None else None
        return [self._outlet] if direct is None else [self._outlet, direct]
