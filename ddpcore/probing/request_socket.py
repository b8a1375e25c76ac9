"""Where a rank is asked for something: a datagram socket beside its logs, `rank-N.sock`. Nothing here blocks."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcore.wire import MalformedReportError, decode_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpcore.wire import ProbeRequest

MAX_REQUEST_BYTES = 4096
MAX_REQUESTS_PER_TICK = 16


class RequestSocket:
    """The socket of one rank, from its making to `close`.

    Args:
        directory: Where it is to be; empty makes none. Where it cannot be, the rank takes no requests, and trains on.
        rank: Whose it is.
    """

    def __init__(self, directory: str, rank: int) -> None:
        self.directory = Path(directory) if directory else None
        self._path = Path(directory, f"rank-{rank}.sock")
        self._socket = _bind(self._path) if directory else None

    @property
    def fd(self) -> int | None:
        """Readable when there is a request; None without a socket."""
        return self._socket.fileno() if self._socket else None

    def take(self) -> Iterator[ProbeRequest]:
        """Return what has been asked since the last call, at most `MAX_REQUESTS_PER_TICK`; rubbish is passed over."""
        for _ in range(MAX_REQUESTS_PER_TICK if self._socket else 0):
            assert self._socket is not None
            try:
                yield decode_request(self._socket.recv(MAX_REQUEST_BYTES))
            except MalformedReportError:
                continue
            except OSError:
                return

    def close(self) -> None:
        """Take no more."""
        if self._socket is not None:
            self._socket.close()
            self._path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket | None:
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        requests.bind(str(path))
        path.chmod(0o600)
    except OSError:
        requests.close()
        return None
    return requests
