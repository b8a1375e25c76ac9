"""When the other end of a stream is taken for dead."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from app.ssh.transport import ANSWER_WITHIN_S, QUIET_S, LiveStream
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


class Clock:
    """The time that the stream sees."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class NearEnd:
    """A stream that says at once that its time is up, and how long it would have been."""

    def __init__(self, plain: socket.socket) -> None:
        plain.settimeout(0)
        self.send = plain.send
        self.shutdown = plain.shutdown
        self.close = plain.close
        self.limits_s: list[float | None] = []
        self.num_calls = 0
        self._plain = plain

    def recv(self, num_bytes: int) -> bytes:
        self.num_calls += 1
        try:
            return self._plain.recv(num_bytes)
        except BlockingIOError:
            raise TimeoutError from None

    def settimeout(self, limit_s: float | None) -> None:
        self.limits_s.append(limit_s)


class Watched:
    """A stream that is looked at, its far end, and how often that was asked."""

    def __init__(self, clock: Clock) -> None:
        plain, self.far = socket.socketpair()
        self.near = NearEnd(plain)
        self.stream = LiveStream(self.near)
        self.stream.settimeout(0.1)
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
    monkeypatch.setattr("app.ssh.transport.time", clock)
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


def test_its_reader_is_woken_when_there_is_something_to_look_at_and_no_sooner(watched: Watched) -> None:
    watched.look_after(0.1)
    assert watched.near.limits_s == [0.1, pytest.approx(QUIET_S - 0.1)], "paramiko's limit holds until it is watched"
    watched.look_after(QUIET_S - 0.1)
    assert watched.near.limits_s[2:] == [ANSWER_WITHIN_S]
    watched.look_after(ANSWER_WITHIN_S - 0.5)
    assert watched.near.limits_s[3:] == [pytest.approx(0.5)], "a limit that ends early is no answer that is missing"

    watched.far.send(b"x")
    assert watched.look_after(0.1) == b"x"
    for _ in range(5):
        watched.far.send(b"y")
        assert watched.look_after(0.5) == b"y"
    assert watched.near.limits_s[4:] == [QUIET_S], "whoever speaks costs nothing more"


def test_what_comes_together_is_read_together(watched: Watched) -> None:
    watched.far.send(b"0123456789")
    num_calls = watched.near.num_calls

    assert [watched.stream.recv(4), watched.stream.recv(4), watched.stream.recv(4)] == [b"0123", b"4567", b"89"]
    assert watched.near.num_calls == num_calls + 1


def test_closing_wakes_the_reader_at_once() -> None:
    near, far = socket.socketpair()
    stream = LiveStream(near)
    stream.watch(lambda: None)
    stream.settimeout(3600)

    def read() -> None:
        with contextlib.suppress(OSError):
            stream.recv(10)

    reader = threading.Thread(target=read)
    reader.start()
    until(reader.is_alive, 10, "it reads")
    stream.close()
    reader.join(10)

    assert not reader.is_alive()
    far.close()
