"""One command to the agent that serves a directory, one reply: what every verb of the command line does."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from agent.errors import NoAgentError
from agent.wire.codec import MAX_COMMAND_BYTES, MalformedMessageError
from agent.wire.commands import Command, encode_command
from agent.wire.fields import CONTROL_SOCKET
from agent.wire.replies import Reply, decode_reply

if TYPE_CHECKING:
    from pathlib import Path

REPLY_TIMEOUT_S = 10.0


def ask(directory: Path, command: Command, timeout_s: float = REPLY_TIMEOUT_S) -> tuple[bytes, Reply]:
    """Return the line that the agent answered with, and what it means.

    Args:
        directory: Where it serves.
        command: What is asked.
        timeout_s: For each piece of the answer.

    Raises:
        NoAgentError: Nobody answers there, or somebody who does not speak as we do.
    """
    line = _exchange(directory, encode_command(command), timeout_s)
    try:
        return line, decode_reply(line)
    except MalformedMessageError as error:
        raise NoAgentError(f"what answers at {directory} is no agent of this version: {error}") from error


def _exchange(directory: Path, line: bytes, timeout_s: float) -> bytes:
    path = directory / CONTROL_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as replies:
                reply = replies.readline(MAX_COMMAND_BYTES + 1)
        except OSError as error:
            raise NoAgentError(f"no agent answers at {path}: {error.strerror or error}") from error
    if not reply.endswith(b"\n"):
        raise NoAgentError(f"the agent at {path} ended without a reply")
    return reply
