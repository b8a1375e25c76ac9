"""Who may come in over TCP: sockets that encrypt with CURVE, and the one key they know. Nobody else is heard.

A gate whose thread has died lets nobody in.

Sources: RFC 26 (CurveZMQ), RFC 27 (ZAP); zmq_setsockopt(3), ZMQ_ZAP_ENFORCE_DOMAIN: without it a server whose handler
is missing accepts anyone.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator

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


class CurveGate:
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
