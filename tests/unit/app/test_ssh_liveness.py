"""When the other end of a stream is taken for dead."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from app.ssh.liveness import ANSWER_WITHIN_S, QUIET_S, LiveStream

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """The time that the stream sees."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Watched:
    """A stream that is looked at, its far end, and how often that was asked."""

    def __init__(self, clock: Clock) -> None:
        near, self.far = socket.socketpair()
        self.stream = LiveStream(near)
        self.stream.settimeout(0.001)
        self.num_asked = 0
        self._clock = clock

    def ask(self) -> None:
        self.num_asked += 1

    def look_after(self, seconds: float) -> bytes | None:
        """Return what is there after some time; None if nothing is, yet."""
        self._clock.now_s += seconds
        try:
            return self.stream.recv(100)
        except TimeoutError:
            return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("app.ssh.liveness.time", clock)
    return clock


@pytest.fixture
def watched(clock: Clock) -> Iterator[Watched]:
    watched = Watched(clock)
    watched.stream.watch(watched.ask)
    yield watched
    watched.stream.close()
    watched.far.close()


def test_who_is_quiet_is_asked_once_and_dead_without_an_answer(watched: Watched) -> None:
    assert watched.look_after(QUIET_S - 0.1) is None
    assert watched.num_asked == 0
    assert watched.look_after(0.1) is None
    assert watched.look_after(ANSWER_WITHIN_S - 0.1) is None
    assert watched.num_asked == 1

    with pytest.raises(EOFError):
        watched.look_after(0.1)


def test_any_byte_is_a_sign_of_life(watched: Watched) -> None:
    for _ in range(3):
        watched.look_after(QUIET_S)
        watched.look_after(ANSWER_WITHIN_S - 0.1)
        watched.far.send(b"x")
        assert watched.look_after(0) == b"x"

    assert watched.num_asked == 3


def test_who_was_away_asks_before_it_takes_the_other_for_dead(watched: Watched) -> None:
    assert watched.look_after(3600) is None, "this end may have stood still, not the other"

    assert watched.num_asked == 1


def test_an_answer_that_lies_there_counts_however_late_it_is_read(watched: Watched) -> None:
    watched.look_after(QUIET_S)
    watched.far.send(b"x")

    assert watched.look_after(3600) == b"x"


def test_before_it_is_watched_a_stream_may_be_silent(clock: Clock) -> None:
    unwatched = Watched(clock)

    for _ in range(3):
        assert unwatched.look_after(3600) is None

    unwatched.stream.send(b"out")
    assert unwatched.far.recv(10) == b"out"
    unwatched.stream.close()
    assert unwatched.far.recv(10) == b""
    unwatched.far.close()
