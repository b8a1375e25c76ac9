"""The socket on which an agent hands out its newest report."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import pytest

from agent.transport.subscribers import MAX_CONSOLES
from agent.wire.codec import REPORTS_SOCKET, FrameReader
from agent.wire.relay import ASK, MAX_ASKED, MAX_MERGED_BYTES, decode_merged
from agent.wire.reports import NodeReport, decode_node_report
from tests.support.agents import RunningAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 30.0


@pytest.fixture
def agent() -> Iterator[RunningAgent]:
    with RunningAgent("--private") as running:
        yield running


class Console:
    """One that asks."""

    def __init__(self, agent: RunningAgent) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(str(agent.directory / REPORTS_SOCKET))
        self._reader = FrameReader(MAX_MERGED_BYTES)

    def ask(self) -> NodeReport:
        """Ask for one report, and return it."""
        self.socket.sendall(ASK)
        while chunk := self.socket.recv(65_536):
            for frame in self._reader.feed(chunk):
                (report,) = decode_merged(frame).reports
                return decode_node_report(report.frame)
        raise EOFError


@pytest.fixture
def come(agent: RunningAgent) -> Iterator[Callable[[], Console]]:
    """Lend a maker of consoles, which are gone at the end."""
    with contextlib.ExitStack() as opened:

        def come() -> Console:
            console = Console(agent)
            opened.callback(console.socket.close)
            return console

        yield come


def test_each_question_is_answered_by_a_newer_report(come: Callable[[], Console]) -> None:
    console = come()

    numbers = [console.ask().report_seq for _ in range(4)]

    assert numbers == sorted(set(numbers))


def test_of_more_consoles_than_there_may_be_the_one_that_has_asked_for_nothing_longest_is_let_go(
    agent: RunningAgent, come: Callable[[], Console]
) -> None:
    first, *others = [come() for _ in range(MAX_CONSOLES)]
    for console in others:
        console.ask()

    newcomer = come()

    assert newcomer.ask().epoch == agent.ready["epoch"]
    assert first.socket.recv(1) == b""
    assert others[0].ask().epoch == agent.ready["epoch"]


@pytest.mark.parametrize("said", [ASK * (MAX_ASKED + 1), b"GET / HTTP/1.1"], ids=["too many questions", "none"])
def test_whoever_asks_for_what_he_may_not_is_hung_up_on(come: Callable[[], Console], said: bytes) -> None:
    console = come()
    console.socket.sendall(said)

    with contextlib.suppress(ConnectionResetError):
        while console.socket.recv(65_536):
            pass
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        console.socket.sendall(ASK * 2)
