"""The ZeroMQ sockets between agents and a relay: `RelaySocket` is the relay's end, `DialSocket` the agent's.

`CurveAuthenticator` decides who may come in over TCP: sockets encrypt with CURVE, and accept the one key they know and
nobody else. If its thread has died, it lets nobody in.

Sources: RFC 26 (CurveZMQ), RFC 27 (ZAP); zmq_setsockopt(3), ZMQ_ZAP_ENFORCE_DOMAIN: without it a server whose handler
is missing accepts anyone.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from agent.transport.report_sockets import FAREWELL_MS, NOBLOCK, Doorbell, RouterSocket
from agent.wire.relay import MAX_RELAY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIGH_WATER_MARK = 1000
"""Messages for one peer: what may be under way on all of its streams, several times over."""
HANDSHAKE_MS = 5_000
KEEP_ALIVE_S = (10, 5, 3)
"""Idle time, interval and number of the kernel's probes: a peer without power gives its descriptor back."""


class RelaySocket(RouterSocket):
    """Where a relay listens for agents; only who knows `node_key` is let in."""

    def __init__(self, address: str, port: int) -> None:
        """Bind a TCP port, 0 for a free one; `open` begins to receive.

        Raises:
            OSError: It cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()  # its authenticator answers for all of a context
        super().__init__(self._context)
        self.node_key: KeyPair = new_key()
        """Key of agents, both halves: whoever is given them may come in."""
        self._curve_auth = CurveAuthenticator(self._context, self.node_key.public)
        self._curve_auth.guard(self._socket)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        _bound(self._socket)
        host = f"[{address}]" if ":" in address else address
        self._bind(f"tcp://{host}:{port or '*'}")
        endpoint = cast("bytes", self._socket.get(zmq.LAST_ENDPOINT)).decode()
        self.port = int(endpoint.rpartition(":")[2])

    @property
    def public_key(self) -> str:
        """Public key of this relay."""
        return self._curve_auth.key.public

    def close(self) -> None:
        """Let go of the port; see `RouterSocket.close`."""
        self._curve_auth.close()
        super().close()
        self._context.term()


class DialSocket:
    """An agent's way to a relay."""

    def __init__(self, address: str, port: int, relay_key: str, key: KeyPair, take: Callable[[bytes], None]) -> None:
        """Connect, now or when somebody listens there.

        Raises:
            OSError: There can be no socket, or none of such keys.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with _all_or_nothing(self._context):
            self._socket = self._context.socket(zmq.DEALER)
            knock_with(self._socket, key, relay_key)
            self._socket.setsockopt(zmq.RECONNECT_IVL, 500)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
            self._socket.setsockopt(zmq.CONNECT_TIMEOUT, 3_000)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            _bound(self._socket)
            host = f"[{address}]" if ":" in address else address
            self._socket.connect(f"tcp://{host}:{port}")
        self._doorbell = Doorbell(self._socket, lambda parts: take(parts[0]))

    def send(self, message: bytes) -> bool:
        """Send something; return False where nothing is taken any more."""
        try:
            self._socket.send(message, NOBLOCK)
        except zmq.Again:
            return False
        self._doorbell.ring()
        return True

    def close(self, *, sends_farewell: bool = False) -> None:
        """Let go of the relay; with a farewell what was sent last has a moment to leave."""
        self._doorbell.close()
        self._context.destroy(linger=FAREWELL_MS if sends_farewell else 0)


@contextlib.contextmanager
def _all_or_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
    """Leave nothing of a context whose socket cannot be made, and raise OSError as the kernel does."""
    try:
        yield
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise OSError(error.errno, error.strerror) from error


def _bound(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_RELAY_BYTES)
    socket.setsockopt(zmq.LINGER, FAREWELL_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    idle_s, interval_s, num_probes = KEEP_ALIVE_S
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, interval_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, num_probes)


DOMAIN = "rankdeck"


class KeyPair(NamedTuple):
    """A key of this process; the secret half is shown to nobody."""

    public: str
    """Public half: 40 characters, in Z85."""
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r})"


def new_key() -> KeyPair:
    """Return a key that nobody has had before."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret)


class _OneKey(NamedTuple):
    """What `zmq.auth` asks whether a key may come in."""

    public: str

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether it may; the name is what `zmq.auth` calls."""
        return domain == DOMAIN and key.decode("ascii", "replace") == self.public


class CurveAuthenticator:
    """Authenticates all sockets of a ZeroMQ context that it guards: only one key may come in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_key: str) -> None:
        """Begin to answer libzmq's questions, in a thread of `zmq.auth`; `client_key` is the public half."""
        self.key = new_key()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, _OneKey(client_key))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a server that asks this authenticator; call it before `bind`."""
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.key.secret)
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def close(self) -> None:
        """End the thread; from here on nobody comes in. Call it before the context ends."""
        self._authenticator.stop()


def knock_with(socket: zmq.Socket[bytes], key: KeyPair, server: str) -> None:
    """Make a socket a client of the server with a public key; call it before `connect`."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, key.public)
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, server)
