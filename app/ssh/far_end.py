"""A channel as the pump hears it: bytes that are there are taken without waiting, and a bell rings when some come."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Protocol

from app.ssh.transport import CHANNEL_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 65_536


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


class RingingBuffer(Protocol):
    """What a channel has received."""

    def set_event(self, event: threading.Event, /) -> None:
        """Have the event set with each piece that comes, and at the end; at once if there is something already."""
        ...


class RingingChannel(ByteChannel, Protocol):
    """A channel that tells when something comes."""

    @property
    def in_buffer(self) -> RingingBuffer:
        """What has come and was not read."""
        ...

    @property
    def eof_received(self) -> int:
        """Not zero once the far side has said all, whether that was read or not."""
        ...

    @property
    def closed(self) -> bool:
        """True once it is ended from here, or with its connection."""
        ...

    def settimeout(self, timeout: float | None) -> None:
        """Let `recv` and `sendall` wait for so many seconds at most."""
        ...

    def recv_ready(self) -> bool:
        """Say whether `recv` would return bytes at once."""
        ...


class FarEnd:
    """One channel, read in one thread.

    paramiko's own way, a `fileno` to wait for, would take a pipe of two descriptors for each channel, and two calls of
    the kernel for each piece.
    """

    def __init__(self, channel: RingingChannel, ring: Callable[[], None]) -> None:
        """Begin to listen.

        Args:
            channel: Nobody else reads it.
            ring: Called when there may be something to take, in whichever thread brings it; once until it is taken.
        """
        self.channel = channel
        self._bell = _Bell(ring)
        channel.in_buffer.set_event(self._bell)

    @property
    def has_more(self) -> bool:
        """Whether `take` would return something now."""
        return self.channel.recv_ready() or bool(self.channel.eof_received) or self.channel.closed

    def take(self) -> bytes | None:
        """Return some bytes, none at the end; None when nothing is there."""
        self._bell.is_rung = False  # first: what comes from now on rings again
        if not self.has_more:
            return None
        try:
            return self.channel.recv(CHUNK_BYTES)
        except CHANNEL_ERRORS:
            return b""


class _Bell(threading.Event):
    """What a channel sets in the thread of its connection, with the buffer locked: too early to read there."""

    def __init__(self, ring: Callable[[], None]) -> None:
        super().__init__()
        self.is_rung = False
        self._ring = ring

    def set(self) -> None:
        if not self.is_rung:
            self.is_rung = True
            self._ring()

    def clear(self) -> None:
        """Do nothing: `FarEnd.take` knows itself when it has looked."""


def hang_up(channel: ByteChannel) -> None:
    """Close a channel, whatever has become of it."""
    with contextlib.suppress(*CHANNEL_ERRORS):
        channel.close()
