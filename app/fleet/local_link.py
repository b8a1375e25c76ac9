"""This machine in a host's place: the same agent and the same commands, without SSH between."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import HostUnreachableError
from app.fleet.agent_link import EXIT_NO_COMMAND, LINE_TIMEOUT_S, VERB_TIMEOUT_S, AgentLink
from app.ssh.config import THIS_MACHINE
from app.ssh.remote_command import Finished
from app.text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.fleet.agent_link import TakesFrame
    from app.ssh.io_thread import ByteChannel

END_S = 5.0
"""Seconds for a process to end after its standard input is closed."""


class LocalLink(AgentLink):
    """The agent of this user on this machine: its sockets are here already."""

    def __init__(self, python: str = "") -> None:
        """`python` runs the agent's verbs; empty is the running interpreter."""
        own = os.path.expanduser(python)  # noqa: PTH111 - pathlib's raises for a user who is not there
        super().__init__(THIS_MACHINE, own or sys.executable)

    @property
    def directory(self) -> Path:
        """The agent's own directory, whether it serves there or will; known after the first look for it."""
        assert self._known_place is not None
        return Path(self._known_place.dir)

    @property
    def is_somewhere(self) -> bool:
        """False until the agent was looked for."""
        return self._known_place is not None

    @property
    def is_alive(self) -> bool:
        """True: the agent's state is shown in its row."""
        return True

    def agent_environ(self) -> dict[str, str]:
        """Return the environment in which the agent was started; empty where it cannot be read."""
        try:
            entries = Path(f"/proc/{self.place.pid if self.place else 0}/environ").read_bytes().split(b"\0")
        except OSError:
            return {}
        return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)

    def connect(self) -> None:
        """Do nothing: this machine needs no connection."""

    def open_sockets(self, on_frame: TakesFrame) -> None:
        """Do nothing: the sockets are here."""

    def reconnect(self, *, asks: bool = False) -> None:  # noqa: ARG002 - nothing is asked here
        """Look for the agent: no connection was lost."""
        self.find()

    def go_again(self, *, asks: bool = False) -> None:
        """Do nothing: this machine needs no connection."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _open(self, argv: Sequence[str]) -> ByteChannel:
        return _LocalProcess(argv)

    def _execute(self, argv: Sequence[str], given: bytes = b"", timeout_s: float | None = None) -> Finished:
        try:
            done = subprocess.run(
                argv, input=given, capture_output=True, timeout=timeout_s or VERB_TIMEOUT_S, check=False
            )
        except OSError:
            return Finished(EXIT_NO_COMMAND, b"", "")
        except subprocess.TimeoutExpired as error:
            raise HostUnreachableError(self.host, f"{argv[0]} does not end") from error
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [""]
        return Finished(done.returncode, done.stdout, clean(lines[-1], LINE_LIMIT))


class _LocalProcess:
    """A process of this machine, with its standard input and output as a channel."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Start it.

        Raises:
            HostUnreachableError: It cannot be started.
        """
        near, far = socket.socketpair()
        self._near = near
        near.settimeout(LINE_TIMEOUT_S)
        with far:
            try:
                self._process = subprocess.Popen(
                    argv, stdin=far.fileno(), stdout=far.fileno(), stderr=subprocess.DEVNULL
                )
            except OSError as error:
                near.close()
                raise HostUnreachableError(THIS_MACHINE, f"{argv[0]} does not run: {error.strerror}") from error

    def recv(self, nbytes: int) -> bytes:
        return self._near.recv(nbytes)

    def sendall(self, s: bytes) -> None:
        self._near.sendall(s)

    def shutdown_write(self) -> None:
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close its standard input, and kill it if it does not end; safe to call twice."""
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)  # makes a pending `recv` return
        self._near.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
