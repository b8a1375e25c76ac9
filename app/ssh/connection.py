"""A connection to a host after login: runs a program there, opens a channel to a Unix socket or a port from there.

Everything here blocks, within bounds; call it from a thread where an event loop runs.

`ProgramChannel` is a program that runs on a host; `finish` feeds it and reads it to its end through its channel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Protocol

import paramiko

from app.errors import HostUnreachableError
from app.ssh.config import LOOPBACK
from app.ssh.remote_command import Finished
from app.ssh.transport import CHANNEL_ERRORS, CHANNEL_TIMEOUT_S, execute, ssh_errors_of
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.ssh.transport import Transport

END_OF_CONNECTION_S = 1.0
"""Seconds for the connection to be marked dead, shortly after its channels have failed."""
CONNECT_FAILED = 2
"""sshd's answer where `MaxSessions` are open. Source: RFC 4254, 5.1, and OpenSSH 9.2, session.c."""
FREED_SESSION_S = 2.0
"""Seconds in which sshd may still count a session that has ended here, longer on a busy machine."""
RETRY_S = 0.05
NO_EXIT_STATUS = -1
"""paramiko's, for a program that a signal has ended, and for one whose exit status never came."""


class ForwardingRefusedError(HostUnreachableError):
    """The host opens no channel to a socket: nobody listens on it, or sshd may not forward."""


class HostConnection:
    """A connection to a host after login."""

    def __init__(self, host: str, transport: Transport, end_of_way: Callable[[], None]) -> None:
        """`end_of_way` closes what the connection runs through, once it has ended."""
        self.host = host
        self._transport = transport
        self._end_of_way = end_of_way

    @property
    def is_alive(self) -> bool:
        """False once the connection is lost or closed."""
        return self._transport.is_active()

    def run(self, argv: Sequence[str], timeout_s: float, given: bytes = b"") -> Finished:
        """Run a program to its end, with `given` on its standard input.

        Raises:
            HostUnreachableError: It did not end in time, or the connection broke.
        """
        deadline_s = time.monotonic() + timeout_s
        with ssh_errors_of(self.host), contextlib.closing(self._open_session()) as channel:
            execute(channel, argv, timeout_s)
            done = finish(channel, (self.host, argv[0]), given, deadline_s, CHANNEL_ERRORS)
            if done.exit_code == NO_EXIT_STATUS:
                self._transport.join(END_OF_CONNECTION_S)
                if not self.is_alive:
                    raise HostUnreachableError(self.host, f"the connection broke while {argv[0]} ran there")
            return done

    def open_process(self, argv: Sequence[str]) -> paramiko.Channel:
        """Start a program; the channel is its standard input and output.

        Raises:
            HostUnreachableError: The host refused.
        """
        with ssh_errors_of(self.host), contextlib.ExitStack() as undo:
            channel = self._open_session()
            undo.callback(channel.close)
            execute(channel, argv, CHANNEL_TIMEOUT_S)
            undo.pop_all()
            return channel

    def open_socket(self, path: str) -> paramiko.Channel:
        """Connect to a Unix socket of the host.

        Raises:
            ForwardingRefusedError: The host refused.
            HostUnreachableError: The connection broke.
        """
        with ssh_errors_of(self.host):
            try:
                return self._transport.open_streamlocal(path)
            except paramiko.ChannelException as error:
                raise ForwardingRefusedError(self.host, f"no channel to {path}: {error.text}") from error

    def open_tcp(self, hostname: str, port: int) -> paramiko.Channel:
        """Connect to a port that this host can reach, as a jump host does.

        Raises:
            HostUnreachableError: The host refused.
        """
        with ssh_errors_of(self.host):
            try:
                return self._transport.open_channel(
                    "direct-tcpip", (hostname, port), (LOOPBACK, 0), timeout=CHANNEL_TIMEOUT_S
                )
            except paramiko.ChannelException as error:
                detail = f"it cannot reach {hostname} port {port}: {clean(error.text)}"
                raise HostUnreachableError(self.host, detail) from error

    def close(self) -> None:
        """End the connection, and release the jump hosts it runs through; safe to call twice."""
        with contextlib.ExitStack() as parts:
            parts.callback(self._end_of_way)
            self._end_of_way = _nothing
            self._transport.close()
            self._transport.join(CHANNEL_TIMEOUT_S)

    def _open_session(self) -> paramiko.Channel:
        """Open a session; wait while the host still counts one that has just ended."""
        deadline_s = time.monotonic() + FREED_SESSION_S
        while True:
            try:
                return self._transport.open_session(timeout=CHANNEL_TIMEOUT_S)
            except paramiko.ChannelException as error:
                if error.code != CONNECT_FAILED or time.monotonic() > deadline_s:
                    raise
            time.sleep(RETRY_S)


def _nothing() -> None:
    """Do nothing."""


MAX_OUTPUT_BYTES = 1 << 20
CHUNK_BYTES = 65_536


class ProgramChannel(Protocol):
    """The local end of a program's channel, as in paramiko; each call has a time limit."""

    status_event: threading.Event
    exit_status: int

    def settimeout(self, timeout: float) -> None:
        """Set the time limit of the calls below, in seconds."""
        ...

    def sendall(self, s: bytes) -> None:
        """Block until all bytes are sent to its standard input."""
        ...

    def shutdown_write(self) -> None:
        """Close its standard input."""
        ...

    def recv(self, nbytes: int) -> bytes:
        """Block for some of its standard output; none at its end."""
        ...

    def recv_stderr(self, nbytes: int) -> bytes:
        """Block for some of its standard error; none at its end."""
        ...


def finish(
    channel: ProgramChannel,
    names: tuple[str, str],
    given: bytes,
    deadline_s: float,
    channel_errors: tuple[type[Exception], ...],
) -> Finished:
    """Return how a program that has just been started ends.

    Args:
        channel: The program's channel.
        names: Names of the host and the program.
        given: Bytes for its standard input.
        deadline_s: Deadline by the monotonic clock.
        channel_errors: Exceptions of the channel once the connection breaks.

    Raises:
        TimeoutError: It has not ended by then.
        HostUnreachableError: It prints more than `MAX_OUTPUT_BYTES`.
    """

    def left_s() -> float:
        return max(0.01, deadline_s - time.monotonic())

    channel.settimeout(left_s())
    if given:
        with contextlib.suppress(OSError):  # a program may end before it has read all, and then prints why
            channel.sendall(given)
    channel.shutdown_write()
    errors = bytearray()
    # Both are read in parallel: a program that fills one while we wait for the other would never end.
    reader = threading.Thread(target=_read_errors, args=(channel, errors, channel_errors), daemon=True)
    reader.start()
    output = bytearray()
    while chunk := channel.recv(CHUNK_BYTES):
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise HostUnreachableError(names[0], f"{names[1]} printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
        channel.settimeout(left_s())
    if not channel.status_event.wait(left_s()):
        raise TimeoutError
    reader.join(left_s())
    lines = errors.decode(errors="replace").strip().splitlines() or [""]
    return Finished(channel.exit_status, bytes(output), clean(lines[-1], LINE_LIMIT))


def _read_errors(channel: ProgramChannel, errors: bytearray, channel_errors: tuple[type[Exception], ...]) -> None:
    """Read to the end, and keep the last `LINE_LIMIT` bytes."""
    with contextlib.suppress(*channel_errors):
        while chunk := channel.recv_stderr(CHUNK_BYTES):
            errors += chunk
            del errors[:-LINE_LIMIT]
