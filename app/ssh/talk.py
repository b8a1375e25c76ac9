"""A verb of the agent that goes on while it is spoken to: a line there, a line back."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from app.errors import AgentUnreachableError, HostUnreachableError
from app.safe_text import clean

if TYPE_CHECKING:
    from app.ssh.far_end import ByteChannel

LINE_TIMEOUT_S = 20.0
"""For a start of Python on a busy machine; also what a channel is to wait for at most."""
MAX_LINE_BYTES = 65_536
_CHANNEL_ERRORS = (OSError, EOFError)
"""Of a channel that is there already, paramiko's own among them: its SSHException is of opening one."""


class Talk:
    """A process on a host, from its start to `close`; one thread at a time speaks."""

    def __init__(self, host: str, verb: str, channel: ByteChannel) -> None:
        self._host = host
        self._verb = verb
        self._channel = channel
        self._buffer = bytearray()

    def line(self, timeout_s: float = LINE_TIMEOUT_S) -> bytes:
        """Return the next line that is JSON; a login shell may print others before.

        Raises:
            AgentUnreachableError: It has ended, or says something else.
            HostUnreachableError: The connection broke, or nothing came in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            whole, newline, rest = bytes(self._buffer).partition(b"\n")
            if newline:
                self._buffer = bytearray(rest)
                if whole.startswith(b"{"):
                    return whole
                continue
            if len(self._buffer) > MAX_LINE_BYTES:
                raise AgentUnreachableError(self._host, f"`agent {self._verb}` there says something else")
            if time.monotonic() > deadline_s:
                raise HostUnreachableError(self._host, f"`agent {self._verb}` says nothing")
            self._buffer += self._piece()

    def say(self, line: bytes) -> None:
        """Say a line.

        Raises:
            HostUnreachableError: The connection broke.
        """
        try:
            self._channel.sendall(line + b"\n")
        except _CHANNEL_ERRORS as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """End it; safe to call twice."""
        with contextlib.suppress(*_CHANNEL_ERRORS):
            self._channel.close()

    def _piece(self) -> bytes:
        try:
            piece = self._channel.recv(MAX_LINE_BYTES)
        except TimeoutError as error:
            raise HostUnreachableError(self._host, f"`agent {self._verb}` says nothing") from error
        except _CHANNEL_ERRORS as error:
            raise self._broken(error) from error
        if not piece:
            raise AgentUnreachableError(self._host, f"`agent {self._verb}` ended there")
        return piece

    def _broken(self, error: Exception) -> HostUnreachableError:
        return HostUnreachableError(self._host, f"the connection broke: {clean(str(error))}")
