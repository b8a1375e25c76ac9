"""ZeroMQ sockets in an asyncio loop: one frame a message, no call ever waits.

`ReportSocket` serves reports to consoles; `ask_reports` is a client that waits for them. `RouterSocket` and `Doorbell`
serve the sockets of `agent.transport.relay_sockets`, too.

Source: zmq_getsockopt(3), ZMQ_FD: its descriptor is silent until there is nothing more to be received, and signals
nothing that has come while something was sent; zmq_setsockopt(3), ZMQ_ROUTER_MANDATORY.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from typing import TYPE_CHECKING, cast

import zmq

from agent.errors import log_line
from agent.wire.relay import MAX_FRAMES_ASKED, MAX_MERGED_BYTES, encode_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MAX_TAKEN = 256
"""Messages between two turns of the loop."""
MAX_SMALL_BYTES = 512
"""Bytes of a request; libzmq counts the messages of its own handshake, too."""
FAREWELL_MS = 1_000
"""Milliseconds for the last messages of a socket that closes."""
NOBLOCK = int(zmq.NOBLOCK)
NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: arithmetic with enumerations takes as long as to send."""


class Doorbell:
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
        may_have_more = True
        try:
            for _ in range(MAX_TAKEN):
                if self._is_closed:
                    return
                self._take(self._socket.recv_multipart(NOBLOCK))
        except zmq.Again:
            may_have_more = False
        finally:
            if may_have_more:
                self.ring()  # also after an exception: the descriptor does not signal what is left


class RouterSocket:
    """A bound ROUTER socket: each message goes to one peer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._doorbell: Doorbell | None = None

    def _bind(self, endpoint: str) -> None:
        """Bind the socket, or close it and raise OSError."""
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from error

    def open(self, take: Callable[[bytes, bytes], None], take_odd: Callable[[], None]) -> None:
        """Begin to receive.

        Args:
            take: Called with the peer and each message.
            take_odd: Called for a message that is not of one frame.
        """

        def taken(parts: list[bytes]) -> None:
            if len(parts) == 2:
                take(*parts)
            else:
                take_odd()

        self._doorbell = Doorbell(self._socket, taken)

    def send(self, peer: bytes, message: bytes) -> bool:
        """Send a message; return False if the peer is gone, or takes no more.

        The last messages of a peer that is gone may still be waiting here; see `is_behind`.
        """
        assert self._doorbell is not None
        self._doorbell.ring()
        try:
            self._socket.send(peer, NOBLOCK_MORE)
            self._socket.send(message, NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    @property
    def is_behind(self) -> bool:
        """Whether messages may be waiting that have not been taken yet."""
        return self._doorbell is not None and self._doorbell.is_due

    def close(self) -> None:
        """Close the socket; the last messages have `FAREWELL_MS` to leave."""
        if self._doorbell is not None:
            self._doorbell.close()
        self._socket.close(linger=FAREWELL_MS)


class ReportSocket(RouterSocket):
    """Serves reports to consoles on this machine, at a Unix path that only its user can reach."""

    def __init__(self, path: str) -> None:
        """Bind the path.

        Raises:
            OSError: It cannot be bound.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        super().__init__(self._context)
        self._path = path
        self._socket.setsockopt(zmq.SNDHWM, 2 * MAX_FRAMES_ASKED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_SMALL_BYTES)
        self._bind(f"ipc://{path}")
        os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
        self._admits = True

    def close(self) -> None:
        """Close the socket, and wait until the last messages have left: a process that ends sends no more."""
        super().close()
        self._context.term()

    def mind_descriptors(self) -> None:
        """Let nobody connect while few descriptors are left; to be called several times a second.

        Source: libzmq's ipc_listener.cpp, accept: it aborts the process without one.
        """
        if has_spare_descriptors() is self._admits:
            return
        endpoint = f"ipc://{self._path}"
        with contextlib.suppress(zmq.ZMQError, OSError):  # tried again
            if self._admits:
                self._socket.unbind(endpoint)
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log_line(f"few of {limit} descriptors are left: no console is let in until some are free (ulimit -n)")
            else:
                self._socket.bind(endpoint)
                os.chmod(self._path, 0o600)  # noqa: PTH101 - as above
            self._admits = not self._admits


SPARE_DESCRIPTORS = 64
"""Those that connections may take between two looks; a quarter where the limit is low."""


def has_spare_descriptors() -> bool:
    """Return whether this process can open files for a while."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        return limit - len(os.listdir("/proc/self/fd")) > min(SPARE_DESCRIPTORS, limit // 4)  # noqa: PTH208 - as often
    except OSError:
        return False


def ask_reports(path: Path, timeout_s: float) -> Iterator[bytes]:
    """Yield frames of the reports socket at a path, as `agent.wire.relay` describes; each is asked for.

    Raises:
        OSError: Nobody listens there, or the next frame did not come in time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))  # libzmq would wait for somebody to come
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.PROBE_ROUTER, 1)
        client.setsockopt(zmq.IMMEDIATE, 1)
        client.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        client.setsockopt(zmq.MAXMSGSIZE, MAX_MERGED_BYTES)
        client.connect(f"ipc://{path}")
        number = 0
        while client.poll(int(timeout_s * 1000)):
            yield client.recv()
            number += 1
            client.send(encode_request(number, 1))
        raise TimeoutError(f"no answer within {timeout_s:.0f} s")
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error
    finally:
        context.destroy(linger=0)
