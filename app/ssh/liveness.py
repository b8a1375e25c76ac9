"""Whether the other end still lives: whoever falls silent is asked for an answer, and is dead when none comes.

TCP alone does not tell: behind a jump host or a ProxyCommand its word is of the next machine only, and the kernel of a
host answers also for an sshd that is frozen.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET_S = 3.0
"""Without a byte for so long, the other end is asked."""
ANSWER_WITHIN_S = 6.0
"""With the above, below the ten seconds after which a person wants to know."""
CHUNK_BYTES = 65_536


class ByteStream(Protocol):
    """A socket, or a channel through another host, with a time limit on what it receives."""

    def recv(self, bufsize: int, /) -> bytes:
        """Return some bytes, none at the end; raise TimeoutError when none come in time."""
        ...

    def send(self, data: bytes, /) -> int:
        """Send some of the bytes; return how many."""
        ...

    def settimeout(self, value: float | None, /) -> None:
        """Set the time limit."""
        ...

    def shutdown(self, how: int, /) -> None:
        """End it in both directions, and wake whoever waits for bytes."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class LiveStream:
    """A stream that ends when the other end is dead; for a reader that comes back after each time limit.

    It wakes its reader when there is something to do, not ten times a second as paramiko would have it, and reads
    ahead: paramiko asks for each packet's length and for the rest of it separately.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ask: Callable[[], None] | None = None
        self._heard_s = 0.0
        self._asked_s: float | None = None
        self._limit_s: float | None = None
        """How long the stream waits at present."""
        self._ahead = b""
        self._closed = False  # the name that paramiko looks at, as it does in sockets

    def watch(self, ask: Callable[[], None]) -> None:
        """Begin to look; `ask` is called from the reader's thread, and makes the other end answer."""
        self._heard_s = time.monotonic()
        self._ask = ask

    def recv(self, num_bytes: int) -> bytes:
        """Return some bytes, none at the end.

        Raises:
            TimeoutError: None came for now.
            EOFError: The other end is dead.
        """
        if not self._ahead:
            self._ahead = self._receive()
        taken, self._ahead = self._ahead[:num_bytes], self._ahead[num_bytes:]
        return taken

    def send(self, data: bytes) -> int:
        """Send some of the bytes; return how many."""
        return self._stream.send(data)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set for how long one call waits, until the stream is watched."""
        self._limit_s = timeout_s
        self._stream.settimeout(timeout_s)

    def close(self) -> None:
        """End the stream; whoever waits for bytes is told at once."""
        self._closed = True
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._stream.shutdown(socket.SHUT_RDWR)
        self._stream.close()

    def _receive(self) -> bytes:
        try:
            received = self._stream.recv(CHUNK_BYTES)
        except TimeoutError:
            self._look()
            raise
        self._heard_s, self._asked_s = time.monotonic(), None
        if self._ask is not None:
            self._wait_for(QUIET_S)
        return received

    def _look(self) -> None:
        if self._ask is None:
            return
        now_s = time.monotonic()
        if self._asked_s is None and now_s - self._heard_s >= QUIET_S:
            self._asked_s = now_s
            self._ask()
        elif self._asked_s is not None and now_s - self._asked_s >= ANSWER_WITHIN_S:
            raise EOFError("it has not answered")
        if self._asked_s is None:
            self._wait_for(self._heard_s + QUIET_S - now_s)
        else:
            self._wait_for(self._asked_s + ANSWER_WITHIN_S - now_s)

    def _wait_for(self, limit_s: float) -> None:
        if limit_s != self._limit_s:
            self.settimeout(limit_s)
