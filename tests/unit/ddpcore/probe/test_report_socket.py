"""Reports find the agent's inbox, also one that comes later or anew."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ddpcore.probe.reporting import ReportSocket

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def path() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="rd-"))
    yield directory / "inbox.sock"
    shutil.rmtree(directory)


@pytest.fixture
def out(path: Path) -> Iterator[ReportSocket]:
    out = ReportSocket(str(path))
    yield out
    out.close()


def inbox_at(path: Path) -> socket.socket:
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    inbox.bind(str(path))
    return inbox


def test_nothing_is_sent_where_there_is_no_inbox_and_all_once_there_is_one(path: Path, out: ReportSocket) -> None:
    assert not out.send(b"lost")
    with inbox_at(path) as inbox:
        assert out.send(b"first")
        assert out.send(b"second")
        assert [inbox.recv(99), inbox.recv(99)] == [b"first", b"second"]


def test_an_inbox_made_anew_gets_the_very_next_report(path: Path, out: ReportSocket) -> None:
    with inbox_at(path):
        assert out.send(b"to the first agent")
    assert not out.send(b"lost")
    path.unlink()
    with inbox_at(path) as inbox:
        assert out.send(b"to the next one")
        assert inbox.recv(99) == b"to the next one"


def test_a_full_inbox_takes_nothing_and_blocks_nobody(path: Path, out: ReportSocket) -> None:
    with inbox_at(path) as inbox:
        while out.send(b"x"):
            pass
        inbox.recv(99)
        assert out.send(b"y")


def test_a_path_that_cannot_be_costs_the_report_only() -> None:
    out = ReportSocket("/nowhere" * 20)
    assert not out.send(b"lost")
    out.close()
