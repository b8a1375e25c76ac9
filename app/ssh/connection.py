"""A host that has let us in: run a program there, reach a Unix socket or a port from there.

Everything here blocks, within bounds; call it from a thread where an event loop runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import paramiko

from app.errors import HostUnreachableError
from app.safe_text import LINE_LIMIT, clean
from app.ssh.remote_command import Finished
from app.ssh.transport import CHANNEL_ERRORS, CHANNEL_TIMEOUT_S, execute, words_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.ssh.transport import Transport

MAX_OUTPUT_BYTES = 1 << 20
END_OF_CONNECTION_S = 1.0
"""A channel hears of a broken connection a moment before the connection calls itself dead."""
NO_EXIT_STATUS = -1
"""paramiko's, for a program that a signal has ended, and for one of which nothing more was heard."""


class ForwardingRefusedError(HostUnreachableError):
    """The host opens no channel to a socket: nobody listens on it, or sshd may not forward."""


class SshConnection:
    """A host that has let us in."""

    def __init__(self, host: str, transport: Transport, end_of_way: Callable[[], None]) -> None:
        """`end_of_way` lets go of what leads to the host, once the connection has ended."""
        self.host = host
        self._transport = transport
        self._end_of_way = end_of_way

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost or closed."""
        return self._transport.is_active()

    def run(self, argv: Sequence[str], timeout_s: float) -> Finished:
        """Run a program to its end, with nothing on its standard input.

        Raises:
            HostUnreachableError: It did not end in time, or the connection broke.
        """
        deadline_s = time.monotonic() + timeout_s
        with words_of(self.host), contextlib.closing(self._open_session()) as channel:
            execute(channel, argv, timeout_s)
            channel.settimeout(max(0.01, deadline_s - time.monotonic()))
            channel.shutdown_write()
            errors = bytearray()
            # Both are read at once: a program that fills one while we wait for the other would never end.
            reader = threading.Thread(target=_read_errors, args=(channel, errors), daemon=True)
            reader.start()
            output = bytearray()
            while chunk := channel.recv(65_536):
                output += chunk
                if len(output) > MAX_OUTPUT_BYTES:
                    raise HostUnreachableError(self.host, f"{argv[0]} printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
                channel.settimeout(max(0.01, deadline_s - time.monotonic()))
            if not channel.status_event.wait(max(0.0, deadline_s - time.monotonic())):
                raise TimeoutError
            reader.join(max(0.0, deadline_s - time.monotonic()))
            if channel.exit_status == NO_EXIT_STATUS:
                self._transport.join(END_OF_CONNECTION_S)
                if not self.is_alive:
                    raise HostUnreachableError(self.host, f"the connection broke while {argv[0]} ran there")
            lines = errors.decode(errors="replace").strip().splitlines() or [""]
            return Finished(channel.exit_status, bytes(output), clean(lines[-1], LINE_LIMIT))

    def open_process(self, argv: Sequence[str]) -> paramiko.Channel:
        """Start a program; the channel is its standard input and output.

        Raises:
            HostUnreachableError: The host would not.
        """
        with words_of(self.host), contextlib.ExitStack() as undo:
            channel = self._open_session()
            undo.callback(channel.close)
            execute(channel, argv, CHANNEL_TIMEOUT_S)
            undo.pop_all()
            return channel

    def open_socket(self, path: str) -> paramiko.Channel:
        """Connect to a Unix socket of the host.

        Raises:
            ForwardingRefusedError: The host would not.
            HostUnreachableError: The connection broke.
        """
        with words_of(self.host):
            try:
                return self._transport.open_streamlocal(path)
            except paramiko.ChannelException as error:
                raise ForwardingRefusedError(self.host, f"no channel to {path}: {error.text}") from error

    def open_tcp(self, hostname: str, port: int) -> paramiko.Channel:
        """Connect to a port that this host can reach, as a jump host does.

        Raises:
            HostUnreachableError: The host would not.
        """
        with words_of(self.host):
            try:
                return self._transport.open_channel(
                    "direct-tcpip", (hostname, port), ("127.0.0.1", 0), timeout=CHANNEL_TIMEOUT_S
                )
            except paramiko.ChannelException as error:
                detail = f"it cannot reach {hostname} port {port}: {clean(error.text)}"
                raise HostUnreachableError(self.host, detail) from error

    def close(self) -> None:
        """End the connection, and let go of those that it leads through; safe to call twice."""
        with contextlib.ExitStack() as parts:
            parts.callback(self._end_of_way)
            self._end_of_way = _nothing
            self._transport.close()
            self._transport.join(CHANNEL_TIMEOUT_S)

    def _open_session(self) -> paramiko.Channel:
        return self._transport.open_session(timeout=CHANNEL_TIMEOUT_S)


def _read_errors(channel: paramiko.Channel, errors: bytearray) -> None:
    """Read to the end, and keep the last of it."""
    with contextlib.suppress(*CHANNEL_ERRORS):
        while chunk := channel.recv_stderr(65_536):
            errors += chunk
            del errors[:-LINE_LIMIT]


def _nothing() -> None:
    """Do nothing."""
