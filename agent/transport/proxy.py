"""An agent's sockets through standard input and output, for hosts whose sshd forwards no sockets.

Both functions end when standard input does: then nobody is left to talk to.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING

from agent.errors import NoAgentError
from agent.wire.codec import CONTROL_SOCKET, REPORTS_SOCKET

if TYPE_CHECKING:
    from pathlib import Path

CHUNK_BYTES = 65_536


def carry_commands(directory: Path, in_fd: int, out_fd: int) -> None:
    """Carry bytes between two descriptors and the command socket; at the end of input, wait for the last reply.

    Raises:
        NoAgentError: Nobody listens in the directory.
    """
    _carry_socket(directory / CONTROL_SOCKET, in_fd, out_fd, has_last_word=True)


def carry_reports(directory: Path, in_fd: int, out_fd: int) -> None:
    """Carry bytes between two descriptors and the reports socket; raises as `carry_commands`."""
    _carry_socket(directory / REPORTS_SOCKET, in_fd, out_fd, has_last_word=False)


def _carry_socket(path: Path, in_fd: int, out_fd: int, *, has_last_word: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
        try:
            agent.connect(str(path))
        except OSError as error:
            raise NoAgentError(f"no agent answers at {path}: {error.strerror or error}") from error
        with contextlib.suppress(ConnectionError):  # either end may go first
            _carry(agent, in_fd, out_fd, has_last_word=has_last_word)


def _carry(agent: socket.socket, in_fd: int, out_fd: int, *, has_last_word: bool) -> None:
    sources = [in_fd, agent.fileno()]
    while True:
        readable, _, _ = select.select(sources, [], [])
        if agent.fileno() in readable:
            answered = agent.recv(CHUNK_BYTES)
            if not answered:
                return
            _write(out_fd, answered)
        if in_fd in readable:
            data = os.read(in_fd, CHUNK_BYTES)
            if data:
                agent.sendall(data)
            elif not has_last_word:
                return
            else:
                agent.shutdown(socket.SHUT_WR)
                sources.remove(in_fd)


def _write(fd: int, chunk: bytes) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(fd, view) :]
