"""The ZeroMQ sockets between agents and a relay, in an asyncio loop: one frame a message, no call ever waits.

`RelaySocket` is the relay's end, `DialSocket` the agent's.

Source: zmq_getsockopt(3), ZMQ_FD: its descriptor is silent until there is nothing more to be received, and signals
nothing that has come while something was sent; zmq_setsockopt(3), ZMQ_ROUTER_MANDATORY.

`CurveAuthenticator` decides who may come in over TCP: sockets encrypt with CURVE, and accept the one key they know and
nobody else. If its thread has died, it lets nobody in.

Sources: RFC 26 (CurveZMQ), RFC 27 (ZAP); zmq_setsockopt(3), ZMQ_ZAP_ENFORCE_DOMAIN: without it a server whose handler
is missing accepts anyone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, NamedTuple, cast

import zmq
from zmq.auth.thread import ThreadAuthenticator

from agent.wire.relay import MAX_RELAY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HIGH_WATER_MARK = 1000
"""Messages for one peer: what may be under way on all of its streams, several times over."""
MAX_TAKEN = 256
"""Messages between two turns of the loop."""
HANDSHAKE_MS = 5_000
FAREWELL_MS = 200
"""For what is said last."""
KEEP_ALIVE_S = (10, 5, 3)
"""Idle time, interval and number of the kernel's probes: a peer without power gives its descriptor back."""
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: arithmetic with enumerations takes as long as to send."""


class _Doorbell:
    """Calls `take` with each message of a socket."""

    def __init__(self, socket: zmq.Socket[bytes], take: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._fd = cast("int", socket.get(zmq.FD))
        self.is_due = False
        self._is_closed = False
        self._loop.add_reader(self._fd, self._look)
        self.ring()

    def ring(self) -> None:
        """Have a look soon; wanted after whatever was done with the socket."""
        if not self.is_due and not self._is_closed:
            self.is_due = True
            self._loop.call_soon(self._look)

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._fd)

    def _look(self) -> None:
        self.is_due = False
        for _ in range(MAX_TAKEN):
            if self._is_closed:
                return
            try:
                parts = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return
            self._take(parts)
        self.ring()


class RelaySocket:
    """Where a relay listens; only who knows `node_key` is heard."""

    def __init__(self, address: str, port: int) -> None:
        """Bind a TCP port, 0 for a free one; `open` begins to hear.

        Raises:
            OSError: It cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.node_key: KeyPair = new_key()
        """Of agents, both halves: whoever is given them may come in."""
        self._curve_auth = CurveAuthenticator(self._context, self.node_key.public)
        self._socket = self._context.socket(zmq.ROUTER)
        self._curve_auth.guard(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        _bound(self._socket)
        self._doorbell: _Doorbell | None = None
        host = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from error
        endpoint = cast("bytes", self._socket.get(zmq.LAST_ENDPOINT)).decode()
        self.port = int(endpoint.rpartition(":")[2])

    @property
    def public_key(self) -> str:
        """Of this relay."""
        return self._curve_auth.key.public

    def open(self, take: Callable[[bytes, bytes], None], take_odd: Callable[[], None]) -> None:
        """Begin to hear.

        Args:
            take: Called with the peer and each message.
            take_odd: Called for a message that is not of one frame.
        """

        def taken(parts: list[bytes]) -> None:
            if len(parts) == 2:
                take(*parts)
            else:
                take_odd()

        self._doorbell = _Doorbell(self._socket, taken)

    def send(self, peer: bytes, message: bytes) -> bool:
        """Send something; return False if the peer is gone, or takes nothing any more.

        What a peer that is gone has said last may still have to be heard; see `is_behind`.
        """
        assert self._doorbell is not None
        self._doorbell.ring()
        try:
            self._socket.send(peer, _NOBLOCK_MORE)
            self._socket.send(message, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    @property
    def is_behind(self) -> bool:
        """Whether something may have come that has not been taken yet."""
        return self._doorbell is not None and self._doorbell.is_due

    def close(self) -> None:
        """Let go of the port; what was sent last has a moment to leave."""
        if self._doorbell is not None:
            self._doorbell.close()
        self._curve_auth.close()
        self._context.destroy(linger=FAREWELL_MS)


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
        self._doorbell = _Doorbell(self._socket, lambda parts: take(parts[0]))

    def send(self, message: bytes) -> bool:
        """Send something; return False where nothing is taken any more."""
        try:
            self._socket.send(message, _NOBLOCK)
        except zmq.Again:
            return False
        self._doorbell.ring()
        return True

    def close(self, *, sends_farewell: bool = False) -> None:
        """Let go of the relay; with a farewell what was sent last has a moment to leave."""
        self._doorbell.close()
        self._context.destroy(linger=FAREWELL_MS if sends_farewell else 0)


class ReportTap:
    """The newest report of the agent in this process, from the time it is wanted."""

    def __init__(self, path: Path, take: Callable[[bytes], None]) -> None:
        """Subscribe to the socket at `path`.

        Raises:
            OSError: There can be no socket.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        with _all_or_nothing(self._context):
            self._socket = self._context.socket(zmq.SUB)
            self._socket.setsockopt(zmq.CONFLATE, 1)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._socket.connect(f"ipc://{path}")
        self._doorbell = _Doorbell(self._socket, lambda parts: take(parts[0]))

    def close(self) -> None:
        """Let go of it: nobody listens any more."""
        self._doorbell.close()
        self._context.destroy(linger=0)


@contextlib.contextmanager
def _all_or_nothing(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[None]:
    """Leave nothing of a context whose socket cannot be made, and say so as the kernel does."""
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
    """Of 40 characters, in Z85."""
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
    """The one gate of a ZeroMQ context: sockets that it guards take nobody but who has one key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_key: str) -> None:
        """Begin to answer libzmq's questions, in a thread of `zmq.auth`; `client_key` is the public half."""
        self.key = new_key()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, _OneKey(client_key))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a server that asks this gate; call it before `bind`."""
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
