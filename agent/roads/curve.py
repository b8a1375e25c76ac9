"""Who may come in over TCP: sockets that encrypt with CURVE, and a list of the keys they know. Nobody else is heard.

A key is made where it is used and lives as long as its process; only its public half travels, over a road that is
trusted already. A gate that has no list of keys lets nobody in, nor one whose thread has died.

Sources: RFC 26 (CurveZMQ), RFC 27 (ZAP); zmq_setsockopt(3), ZMQ_ZAP_ENFORCE_DOMAIN: without it a server whose handler
is missing accepts anyone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

from agent.wire import fields

if TYPE_CHECKING:
    from collections.abc import Callable

PublicKey = fields.PublicKey
DOMAIN = "rankdeck"
MAX_KEYS = 256
"""That one gate knows; the one that was let in first makes room."""


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


class KnownKeys:
    """The public keys that may come in, each until its time is up; any thread may ask and tell."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._until_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def let_in(self, public: str, for_s: float) -> None:
        """Know a key for so long from now on; one that is known has its time renewed."""
        with self._lock:
            self._until_s.pop(public, None)
            self._forget_old()
            while len(self._until_s) >= MAX_KEYS:
                del self._until_s[next(iter(self._until_s))]
            self._until_s[public] = self._clock() + for_s

    def forget(self, public: str) -> None:
        """Know a key no more; whoever has come in with it stays until the gate's socket is closed."""
        with self._lock:
            self._until_s.pop(public, None)

    def names(self) -> frozenset[str]:
        """Return the keys that are known now."""
        with self._lock:
            self._forget_old()
            return frozenset(self._until_s)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether somebody with a key may come in; the name is what `zmq.auth` calls."""
        return domain == DOMAIN and key.decode("ascii", "replace") in self.names()

    def _forget_old(self) -> None:
        now_s = self._clock()
        self._until_s = {key: until_s for key, until_s in self._until_s.items() if until_s > now_s}


class CurveGate:
    """The one gate of a ZeroMQ context: sockets that it guards take nobody but those whose keys are known."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], known: KnownKeys) -> None:
        """Begin to answer libzmq's questions, in a thread of `zmq.auth`."""
        self.key = new_key()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(DOMAIN, known)

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
