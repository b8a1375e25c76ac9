"""Reports that come through a channel, which comes back whenever it ends."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from agent.wire.codec import with_length
from agent.wire.relay import ASK, MAX_ASKED, MAX_MERGED_BYTES, Merged, MergedReport, encode_merged
from app.errors import HostUnreachableError
from app.fleet.frame_stream import FrameStream
from app.ssh.io_thread import JOIN_S
from tests.support.ssh_pairs import WAIT_S, SshPair, our_threads
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paramiko import Channel

MAX_PAUSE_S = 0.2


@pytest.fixture(scope="module")
def pair() -> Iterator[SshPair]:
    with SshPair() as pair:
        yield pair


class Listening:
    """A stream over a connection, and what was heard."""

    def __init__(self, pair: SshPair) -> None:
        self.heard: list[bytes] = []
        self.ages_s: list[float] = []
        self.num_opened = 0
        self.refusals: list[HostUnreachableError] = []
        self._pair = pair
        self.stream = FrameStream(self._open, MAX_PAUSE_S, self._take)

    def _take(self, frame: bytes, age_s: float = 0.0) -> None:
        self.heard.append(frame)
        self.ages_s.append(age_s)

    def _open(self) -> Channel:
        if self.refusals:
            raise self.refusals.pop()
        self.num_opened += 1
        return self._pair.open()

    def hears(self, frame: bytes) -> None:
        until(lambda: frame in self.heard, WAIT_S, f"{frame!r} is heard")


@pytest.fixture
def listenings(pair: SshPair) -> Iterator[Callable[[], Listening]]:
    """Lend a maker of streams, which are closed at the end."""
    made: list[Listening] = []

    def make() -> Listening:
        made.append(Listening(pair))
        return made[-1]

    yield make
    for listening in made:
        listening.stream.close()
    until(lambda: not our_threads(), WAIT_S, "no thread is left")


@pytest.fixture
def listening(listenings: Callable[[], Listening]) -> Listening:
    return listenings()


def say(far: Channel, *frames: bytes, held_ms: int = 0, age_ms: int = 0) -> None:
    """Answer what is asked, a report each, as an agent does."""
    for frame in frames:
        assert far.recv(1) == ASK
        merged = Merged("epoch", held_ms, 1, is_whole=True, reports=[MergedReport("here", age_ms, frame)])
        far.sendall(with_length(encode_merged(merged)))


def rest(far: Channel) -> bytes:
    """Return what comes at the end of a channel, after all that was asked."""
    while far.recv(1) == ASK:
        pass
    return far.recv(1)


def test_what_comes_is_told_and_more_is_asked_for(pair: SshPair, listening: Listening) -> None:
    listening.stream.begin()
    far = pair.accept()
    say(far, *(str(number).encode() for number in range(5 * MAX_ASKED)))
    listening.hears(str(5 * MAX_ASKED - 1).encode())

    say(far, b"one more")
    listening.hears(b"one more")


def test_a_report_is_as_old_as_it_says_and_as_long_as_the_way_may_have_been(
    pair: SshPair, listening: Listening
) -> None:
    listening.stream.begin()
    far = pair.accept()
    say(far, b"kept", age_ms=30_000)
    listening.hears(b"kept")
    pair.is_taking.clear()
    stopped_s = time.monotonic()
    while far.recv_ready():
        far.recv(1)
    until(lambda: time.monotonic() - stopped_s > 0.5, WAIT_S, "it has been under way for a while")
    pair.is_taking.set()
    far.sendall(with_length(encode_merged(Merged("epoch", 0, reports=[MergedReport("here", 0, b"late")]))))
    listening.hears(b"late")

    assert listening.ages_s[0] >= 30.0
    assert 0.5 <= listening.ages_s[-1] < 30.0


def test_reports_that_were_not_asked_for_are_not_taken(pair: SshPair, listening: Listening) -> None:
    listening.stream.begin()
    far = pair.accept()
    frame = with_length(encode_merged(Merged("epoch", 0, reports=[MergedReport("here", 0, b"unasked")])))
    far.sendall(frame * (MAX_ASKED + 2))

    say(pair.accept(), b"asked")
    listening.hears(b"asked")


def test_a_channel_that_ends_or_talks_nonsense_comes_back(pair: SshPair, listening: Listening) -> None:
    listening.stream.begin()
    far = pair.accept()
    say(far, b"before")
    listening.hears(b"before")
    far.close()

    far = pair.accept()
    say(far, b"after its end")
    listening.hears(b"after its end")
    far.sendall((MAX_MERGED_BYTES + 1).to_bytes(4, "big"))

    far = pair.accept()
    say(far, b"after nonsense")
    listening.hears(b"after nonsense")
    assert listening.num_opened == 3


def test_a_host_that_refuses_is_asked_again(pair: SshPair, listening: Listening) -> None:
    listening.refusals = [HostUnreachableError("h", "not now")] * 3
    listening.stream.begin()

    say(pair.accept(), b"at last")
    listening.hears(b"at last")


def test_begun_anew_it_hears_the_new_channel_alone(pair: SshPair, listening: Listening) -> None:
    listening.stream.begin()
    first = pair.accept()
    listening.stream.begin()
    second = pair.accept()
    say(second, b"second")

    listening.hears(b"second")
    assert rest(first) == b"", "the first one is closed"
    assert listening.heard == [b"second"]


def test_closed_it_is_over_at_once_and_nothing_more_is_told(pair: SshPair, listening: Listening) -> None:
    listening.stream.begin()
    far = pair.accept()
    say(far, b"before")
    listening.hears(b"before")
    began_s = time.monotonic()

    listening.stream.close()
    listening.stream.close()
    listening.stream.begin()

    assert time.monotonic() - began_s < JOIN_S
    assert rest(far) == b""
    assert listening.heard == [b"before"]
    assert listening.num_opened == 1


def test_a_host_that_takes_no_question_holds_up_no_other(pair: SshPair, listening: Listening) -> None:
    with SshPair(window_bytes=0) as deaf:
        stuck = Listening(deaf)
        stuck.stream.begin()
        deaf.accept()
        listening.stream.begin()
        say(pair.accept(), b"of another")
        listening.hears(b"of another")
        until(lambda: stuck.num_opened > 1, WAIT_S, "it is tried again")
        stuck.stream.close()


def test_many_are_heard_by_one_thread(pair: SshPair, listenings: Callable[[], Listening]) -> None:
    many = [listenings() for _ in range(30)]
    for listening in many:
        listening.stream.begin()
    ends = [pair.accept() for _ in many]
    for number, far in enumerate(ends):
        say(far, b"%d" % number)
    until(lambda: sum(len(listening.heard) for listening in many) == len(many), WAIT_S, "all are heard")

    until(lambda: our_threads() == ["rankdeck-pump"], WAIT_S, "what has asked for them has ended")
