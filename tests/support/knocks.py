"""Somebody who comes to a socket over TCP, and how he is received."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from agent.roads.curve import knock_with

if TYPE_CHECKING:
    from agent.roads.curve import KeyPair

PATIENCE_MS = 30_000
LET_IN = "HANDSHAKE_SUCCEEDED"
REFUSED = "HANDSHAKE_FAILED_AUTH 400"


class Visitor:
    """A subscriber of its own context, as another process would be; the `with` block ends it."""

    def __init__(self, address: str, port: int, key: KeyPair | None, server_key: str = "") -> None:
        """Without a key it comes as plain TCP."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.CONFLATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.SUBSCRIBE, b"")
        if key is not None:
            knock_with(self.socket, key, server_key)
        self._monitor = self.socket.get_monitor_socket()
        self.socket.connect(f"tcp://{address}:{port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self._context.destroy(linger=0)

    def reception(self) -> str:
        """Return how the next handshake goes; `silence` where none is made."""
        return self._next("HANDSHAKE")

    def loses_connection(self) -> bool:
        """Return whether the connection that stands ends."""
        return self._next("DISCONNECTED").startswith("DISCONNECTED")

    def _next(self, what: str) -> str:
        while self._monitor.poll(PATIENCE_MS):
            event = recv_monitor_message(self._monitor)
            name = zmq.Event(event["event"]).name or ""
            if name.startswith(what):
                return f"{name} {event['value']}".removesuffix(" 0") if "FAILED" in name else name
        return "silence"

    def hears(self) -> bytes | None:
        """Return what has been said since; None if nothing."""
        with contextlib.suppress(zmq.Again):
            return self.socket.recv(zmq.NOBLOCK)
        return None
