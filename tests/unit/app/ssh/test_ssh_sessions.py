"""A host that allows one session at a time, and frees it a moment after it has ended."""

from __future__ import annotations

from typing import Any

import paramiko
import pytest

from app.errors import HostUnreachableError
from app.ssh import connection
from app.ssh.connection import CONNECT_FAILED, HostConnection

ADMINISTRATIVELY_PROHIBITED = 1


class BusyHost:
    """A transport that refuses the first sessions."""

    def __init__(self, code: int, num_refused: int) -> None:
        self.code = code
        self.num_refused = num_refused
        self.num_asked = 0

    def open_session(self, timeout: float) -> str:  # noqa: ARG002 - as of paramiko
        self.num_asked += 1
        if self.num_asked > self.num_refused:
            return "session"
        raise paramiko.ChannelException(self.code, "Connect failed")


def connected(host: Any) -> HostConnection:
    return HostConnection("h1", host, lambda: None)


def test_a_session_is_opened_once_the_host_has_freed_the_last_one() -> None:
    host = BusyHost(CONNECT_FAILED, 3)

    assert connected(host)._open_session() == "session"  # type: ignore[comparison-overlap]
    assert host.num_asked == 4


def test_a_host_that_frees_none_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FREED_SESSION_S", 0.0)

    with pytest.raises(HostUnreachableError, match="h1: it opens no channel: Connect failed"):
        connected(BusyHost(CONNECT_FAILED, 1000)).run(["true"], 1.0)


def test_a_host_that_forbids_sessions_is_not_asked_again() -> None:
    host = BusyHost(ADMINISTRATIVELY_PROHIBITED, 1000)

    with pytest.raises(paramiko.ChannelException):
        connected(host)._open_session()
    assert host.num_asked == 1
