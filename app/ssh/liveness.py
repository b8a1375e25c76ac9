"""Whether the other end still lives: whoever falls silent is asked for an answer, and is dead when none comes.

TCP alone does not tell: behind a jump host or a ProxyCommand its word is of the next machine only, and the kernel of a
host answers also for an sshd that is frozen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

QUIET_S = 3.0
"""Without a byte for so long, the other end is asked."""
ANSWER_WITHIN_S = 6.0
"""With the above, below the ten seconds after which a person wants to know."""


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

    def close(self) -> None:
        """End it."""
        ...


class LiveStream:
    """A stream that ends when the other end is dead; for a reader that comes back after each time limit."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._ask: Callable[[], None] | None = None
        self._heard_s = 0.0
        self._asked_s: float | None = None
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
        try:
            received = self._stream.recv(num_bytes)
        except TimeoutError:
            self._look()
            raise
        self._heard_s, self._asked_s = time.monotonic(), None
        return received

    def send(self, data: bytes) -> int:
        """Send some of the bytes; return how many."""
        return self._stream.send(data)

    def settimeout(self, timeout_s: float | None) -> None:
        """Set for how long one call waits."""
        self._stream.settimeout(timeout_s)

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._stream.close()

    def _look(self) -> None:
        if self._ask is None:
            return
        now_s = time.monotonic()
        if self._asked_s is None:
            if now_s - self._heard_s >= QUIET_S:
                self._asked_s = now_s
                self._ask()
        elif now_s - self._asked_s >= ANSWER_WITHIN_S:
            raise EOFError("it has not answered")
