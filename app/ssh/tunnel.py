"""A Unix socket on this machine that leads to one on a host: what connects here speaks to whoever listens there.

What already speaks to local sockets (`app.roads.telemetry`, `app.roads.command_road`) needs to know nothing of SSH.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import TYPE_CHECKING, Protocol

from app.errors import HostUnreachableError
from app.ssh.transport import CHANNEL_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHUNK_BYTES = 65_536
JOIN_S = 5.0


class ByteChannel(Protocol):
    """The far end, as paramiko's channels have it. Each method may be called from another thread than the others."""

    def recv(self, nbytes: int) -> bytes:
        """Block for some bytes; none when the far side has said all."""
        ...

    def sendall(self, s: bytes) -> None:
        """Block until all is on its way."""
        ...

    def shutdown_write(self) -> None:
        """Say that no more will come."""
        ...

    def close(self) -> None:
        """End it; a `recv` under way returns."""
        ...


class Tunnel:
    """A listener with a thread of its own, and two for each connection; fit for the few of one console."""

    def __init__(self, path: Path, open_channel: Callable[[], ByteChannel]) -> None:
        """Listen at `path`; each connection opens a channel.

        Raises:
            OSError: The path cannot be bound.
        """
        self._open_channel = open_channel
        self._lock = threading.Lock()
        self._open: set[tuple[socket.socket, ByteChannel]] = set()
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
            os.chmod(path, 0o600)  # noqa: PTH101 - a socket's path is text everywhere
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._start(self._accept)

    def close(self) -> None:
        """End the listener and every connection; blocks until their threads have ended."""
        with self._lock:
            self._is_closing = True
            connections = list(self._open)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`; `close` alone does not
        for near, far in connections:
            _end(near, far)
        for thread in list(self._threads):
            thread.join(JOIN_S)
        self._listener.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=run, args=arguments, name="rankdeck-tunnel", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = self._open_channel()
            except HostUnreachableError:
                near.close()  # whoever connected hears that nobody is there, and may try again
                continue
            with self._lock:
                self._open.add((near, far))
                is_closing = self._is_closing
            if is_closing:
                _end(near, far)
            self._start(self._carry, near, far)

    def _carry(self, near: socket.socket, far: ByteChannel) -> None:
        """Carry both ways until the far side has ended: then nothing that still goes down would be heard."""
        down = threading.Thread(target=_carry_down, args=(near, far), name="rankdeck-tunnel-down", daemon=True)
        down.start()
        with contextlib.suppress(*CHANNEL_ERRORS):
            while chunk := far.recv(CHUNK_BYTES):
                near.sendall(chunk)
        _end(near, far)
        down.join(JOIN_S)
        with self._lock:
            self._open.discard((near, far))
        near.close()


def _carry_down(near: socket.socket, far: ByteChannel) -> None:
    with contextlib.suppress(*CHANNEL_ERRORS):
        while chunk := near.recv(CHUNK_BYTES):
            far.sendall(chunk)
        far.shutdown_write()


def _end(near: socket.socket, far: ByteChannel) -> None:
    with contextlib.suppress(*CHANNEL_ERRORS):
        far.close()
    with contextlib.suppress(OSError):
        near.shutdown(socket.SHUT_RDWR)
