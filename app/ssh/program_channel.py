"""A program that runs on a host, fed and read to its end through its channel."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from app.errors import HostUnreachableError
from app.safe_text import LINE_LIMIT, clean
from app.ssh.remote_command import Finished

MAX_OUTPUT_BYTES = 1 << 20
CHUNK_BYTES = 65_536


class ProgramChannel(Protocol):
    """The far end of a program, as paramiko's channels have it; what waits for longer than the limit times out."""

    status_event: threading.Event
    exit_status: int

    def settimeout(self, timeout: float) -> None:
        """Set the limit of everything below, in seconds."""
        ...

    def sendall(self, s: bytes) -> None:
        """Block until all is on its way to its standard input."""
        ...

    def shutdown_write(self) -> None:
        """Say that no more will come."""
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
    """Return how a program ended that has just been started.

    Args:
        channel: Its.
        names: Of the host and the program.
        given: For its standard input.
        deadline_s: Of the monotonic clock.
        channel_errors: What the channel raises once the connection breaks.

    Raises:
        TimeoutError: It has not ended by then.
        HostUnreachableError: It prints more than `MAX_OUTPUT_BYTES`.
    """

    def left_s() -> float:
        return max(0.01, deadline_s - time.monotonic())

    channel.settimeout(left_s())
    if given:
        with contextlib.suppress(OSError):  # a program may end before it has read all, and then says why
            channel.sendall(given)
    channel.shutdown_write()
    errors = bytearray()
    # Both are read at once: a program that fills one while we wait for the other would never end.
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
    """Read to the end, and keep the last of it."""
    with contextlib.suppress(*channel_errors):
        while chunk := channel.recv_stderr(CHUNK_BYTES):
            errors += chunk
            del errors[:-LINE_LIMIT]
