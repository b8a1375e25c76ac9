"""Where a rank's reports go: the agent's inbox, a datagram socket. Nothing here blocks."""

from __future__ import annotations

import contextlib
import socket


class ReportSocket:
    """The probe's end.

    It is connected: the kernel then need not find the inbox by its path each time, a quarter of what a report costs to
    send.

    Args:
        inbox: Path of the agent's socket. There need not be one yet.
    """

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def send(self, datagram: bytes) -> bool:
        """Send a datagram, and return whether the inbox has taken it: there may be no agent, or a full inbox."""
        try:
            self._socket.send(datagram)
        except OSError:
            # Not connected yet, or to an agent that is gone: another one may have come in its place.
            with contextlib.suppress(OSError):
                self._socket.connect(self._inbox)
                self._socket.send(datagram)
                return True
            return False
        return True

    def close(self) -> None:
        """Send no more."""
        self._socket.close()
