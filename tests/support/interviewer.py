"""An SSH server that interviews whoever comes, as one with a second factor does; sshd needs PAM for that."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

import paramiko
from paramiko.common import AUTH_FAILED, AUTH_PARTIALLY_SUCCESSFUL, AUTH_SUCCESSFUL
from paramiko.server import InteractiveQuery

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Round = tuple[str, str, list[tuple[str, bool]], list[str]]
"""Title, instructions, questions with whether the answer may be seen, and the right answers."""


class Interviewer:
    """Listens on loopback; the `with` block ends it.

    Attributes:
        port: Where it listens.
        num_logins: How many have got in.
        num_connections: How many have come.
    """

    def __init__(self, host_key: Path, rounds: Sequence[Round], *, wants_key: bool = False) -> None:
        """`wants_key` lets nobody be interviewed who has not shown a key, whichever it is."""
        self.num_logins = 0
        self.num_connections = 0
        self.rounds = rounds
        self.wants_key = wants_key
        self._key = paramiko.PKey.from_path(host_key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()
        for transport in self._transports:
            transport.close()
            transport.join(10)

    def be_another(self, host_key: Path) -> None:
        """Show another key from the next connection on."""
        self._key = paramiko.PKey.from_path(host_key)

    def drop(self) -> None:
        """End all connections."""
        for transport in self._transports:
            transport.close()

    def _serve(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            transport = paramiko.Transport(stream)
            transport.daemon = True
            self._transports.append(transport)
            transport.add_server_key(self._key)
            transport.start_server(event=threading.Event(), server=_Server(self))


class _Server(paramiko.ServerInterface):
    def __init__(self, interviewer: Interviewer) -> None:
        self._interviewer = interviewer
        self._left = list(interviewer.rounds)
        self._has_key = not interviewer.wants_key

    def get_allowed_auths(self, username: str) -> str:  # noqa: ARG002 - paramiko's signature
        return "keyboard-interactive" if self._has_key else "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:  # noqa: ARG002 - paramiko's signature
        self._has_key = True
        return AUTH_PARTIALLY_SUCCESSFUL

    def check_auth_interactive(self, username: str, submethods: str) -> int | InteractiveQuery:  # noqa: ARG002 - paramiko's signature
        if not self._has_key:
            return AUTH_FAILED
        self._left = list(self._interviewer.rounds)
        return self._query()

    def check_auth_interactive_response(self, responses: list[str]) -> int | InteractiveQuery:
        *_, answers = self._left.pop(0)
        if responses != list(answers):
            return AUTH_FAILED
        if self._left:
            return self._query()
        self._interviewer.num_logins += 1
        return AUTH_SUCCESSFUL

    def _query(self) -> InteractiveQuery:
        title, instructions, questions, _ = self._left[0]
        return InteractiveQuery(title, instructions, *questions)
