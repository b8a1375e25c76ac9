"""Where a node's reports come from when they come straight over TCP: an address, and who is believed there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import zmq

if TYPE_CHECKING:
    from agent.roads.curve import KeyPair

HEARTBEAT_MS = 2000
SILENCE_MS = 6000
"""A peer that answers no heartbeat for so long is taken for gone, at either end."""
CONNECT_MS = 3000
HANDSHAKE_MS = 5000
RECONNECT_MS = 200
MAX_RECONNECT_MS = 2000


class DirectSource(NamedTuple):
    """A node's socket, and the key of this console."""

    address: str
    port: int
    server_key: str
    key: KeyPair

    def connect(self, socket: zmq.Socket[bytes]) -> None:
        """Have a SUB socket that conflates hear what is said there."""
        from agent.roads.curve import knock_with  # noqa: PLC0415 - `zmq.auth` is for who uses it

        knock_with(socket, self.key, self.server_key)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
        is_ipv6 = ":" in self.address
        socket.setsockopt(zmq.IPV6, int(is_ipv6))
        socket.connect(f"tcp://[{self.address}]:{self.port}" if is_ipv6 else f"tcp://{self.address}:{self.port}")


def new_client_key() -> KeyPair:
    """Return a key for this process, which is kept nowhere."""
    from agent.roads.curve import new_key  # noqa: PLC0415 - as above

    return new_key()
