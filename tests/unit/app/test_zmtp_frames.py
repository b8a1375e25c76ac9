"""Telemetry as ZeroMQ writes it: against libzmq itself, and against what no publisher says."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from agent.roads.publisher import Publisher
from agent.wire.codec import MalformedMessageError
from agent.wire.reports import MAX_NODE_REPORT_BYTES
from app.ssh.zmtp_frames import ZmtpReader, subscribe
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 10.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16 + 32)
READY = b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x04XPUB"


class Stream:
    """A socket with the names that channels have."""

    def __init__(self, plain: socket.socket) -> None:
        self.plain = plain
        self.recv = plain.recv
        self.sendall = plain.sendall
        self.close = plain.close

    def shutdown_write(self) -> None:
        self.plain.shutdown(socket.SHUT_WR)


@pytest.fixture
def publisher() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.RCVTIMEO, int(1e3 * WAIT_S))
    yield publisher
    context.destroy(linger=0)


@pytest.mark.parametrize("num_bytes", [0, 1, 255, 256, 9000, MAX_NODE_REPORT_BYTES])
def test_a_real_publisher_is_subscribed_to_and_heard(
    publisher: zmq.Socket[bytes], tmp_path: Path, num_bytes: int
) -> None:
    publisher.bind(f"ipc://{tmp_path / 's'}")
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(WAIT_S)
        plain.connect(str(tmp_path / "s"))
        reader = subscribe(Stream(plain))
        assert publisher.recv() == b"\x01", "everything is subscribed to"

        publisher.send(bytes(num_bytes))
        publisher.send(b"the next one")
        heard: list[bytes] = []
        while len(heard) < 2:
            heard += reader.feed(plain.recv(1000))

        assert heard == [bytes(num_bytes), b"the next one"]
        plain.shutdown(socket.SHUT_RDWR)
        assert publisher.recv() == b"\x00", "and let go of"


def test_the_agent_s_own_publisher_counts_it_as_a_listener(tmp_path: Path) -> None:
    publisher = Publisher(str(tmp_path / "s"))
    try:
        with socket.socket(socket.AF_UNIX) as plain:
            plain.settimeout(WAIT_S)
            plain.connect(str(tmp_path / "s"))
            reader = subscribe(Stream(plain))
            until(publisher.has_listeners, WAIT_S, "it is counted")
            publisher.publish(b"a report")
            heard: list[bytes] = []
            while not heard:
                heard += reader.feed(plain.recv(1000))
            assert heard == [b"a report"]
    finally:
        publisher.close()


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


@given(st.lists(st.binary(max_size=600)), st.lists(st.integers(1, 300), min_size=1))
def test_messages_come_out_as_they_went_in_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = GREETING + READY + b"".join(frame(message) for message in messages)
    reader = ZmtpReader()
    heard: list[bytes] = []
    num_cuts = 0

    while stream:
        size = cuts[num_cuts % len(cuts)]
        num_cuts += 1
        heard += reader.feed(stream[:size])
        stream = stream[size:]

    assert heard == messages
    assert reader.is_ready


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" * 3, "no ZeroMQ publisher"),
        (GREETING.replace(b"NULL", b"CURV"), "no ZeroMQ publisher"),
        (GREETING.replace(b"\x7f\x03", b"\x7f\x01"), "no ZeroMQ publisher"),
        (GREETING + b"\x01\x01x\x00\x01y", "one frame"),
        (GREETING + b"\x08\x01x", "one frame"),
        (GREETING + b"\x02" + (MAX_NODE_REPORT_BYTES + 1).to_bytes(8, "big"), "at most"),
        (GREETING + b"\x06" + (2**63).to_bytes(8, "big"), "at most"),
    ],
    ids=["another protocol", "another mechanism", "ZMTP 1", "two frames", "unknown flags", "too long", "long command"],
)
def test_what_no_publisher_of_reports_says_is_refused_before_it_is_kept(said: bytes, words: str) -> None:
    with pytest.raises(MalformedMessageError, match=words):
        list(ZmtpReader().feed(said))


@given(st.binary(max_size=300))
def test_any_bytes_are_frames_or_refused(said: bytes) -> None:
    reader = ZmtpReader()
    try:
        assert sum(map(len, reader.feed(GREETING + said))) <= len(said)
    except MalformedMessageError:
        return


def test_who_hangs_up_or_speaks_before_it_is_asked_is_no_publisher() -> None:
    for said, kind in ((b"", EOFError), (GREETING + frame(b"unasked"), MalformedMessageError)):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(kind):
                subscribe(Stream(ours))
