"""The socket on which an agent or a relay sends reports, and the reader of a console."""

from __future__ import annotations

import asyncio
import operator
import os
import socket
import stat
import struct
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

import pytest
import zmq

from agent.transport import subscribers
from agent.transport.latest_reports import LatestReports
from agent.transport.report_sockets import ask_reports
from agent.transport.subscribers import NodeReports, ReportSubscribers
from agent.wire.relay import (
    MAX_FRAMES_ASKED,
    MAX_MERGED_BYTES,
    Merged,
    MergedReport,
    RosterEntry,
    decode_merged,
    decode_request,
    encode_merged,
    encode_request,
)
from app.fleet.report_reader import ReportReader
from tests.support.waiting import until, until_async

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.codec import MalformedMessageError

WAIT_S = 20.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reports.sock"


@pytest.fixture
async def node(path: Path) -> NodeReports:
    """An agent's reports; the test closes them."""
    reports = NodeReports(str(path), "epoch")
    reports.open()
    return reports


class Reader:
    """A console, and what it has received."""

    def __init__(self, path: Path) -> None:
        self.frames: list[bytes] = []
        self.ages_s: list[float] = []
        self.errors: list[str] = []
        self.num_lost = 0
        paths = {"a": path, "nobody": path.with_name("nobody")}  # of several, reports are taken together
        self._reader = ReportReader(paths, self._take, self._malformed, self._lost)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def _take(self, _name: str, merged: Merged, way_s: float) -> None:
        self.frames += [report.frame for report in merged.reports]
        self.ages_s += [way_s + report.age_ms / 1000 for report in merged.reports]

    def _malformed(self, _name: str, error: MalformedMessageError) -> None:
        self.errors.append(str(error))

    def _lost(self, _name: str) -> None:
        self.num_lost += 1


@contextmanager
def client(path: Path) -> Iterator[zmq.Socket[bytes]]:
    """Lend a connection that says only what the test says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"ipc://{path}")
        yield dealer


@contextmanager
def server(path: Path) -> Iterator[zmq.Socket[bytes]]:
    """Lend an agent that answers only what the test answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(f"ipc://{path}")
        yield router


def received(router: zmq.Socket[bytes]) -> tuple[bytes, bytes]:
    assert router.poll(int(WAIT_S * 1000)), "nothing came"
    peer, message = router.recv_multipart()
    return peer, message


def greeted(router: zmq.Socket[bytes]) -> bytes:
    """Answer the message that begins a connection; return whose it is."""
    peer, message = received(router)
    assert message == b""
    router.send_multipart([peer, encode_merged(Merged("r", 0))])
    return peer


def answer(router: zmq.Socket[bytes], peer: bytes, asked: int, frame: bytes, held_ms: int = 0, age_ms: int = 0) -> None:
    merged = Merged("r", held_ms, asked=asked, reports=[MergedReport("here", age_ms, frame)])
    router.send_multipart([peer, encode_merged(merged)])


async def answers(dealer: zmq.Socket[bytes], within_s: float = WAIT_S) -> Merged | None:
    """Return the next frame, while the loop of the test serves."""
    try:
        return decode_merged(
            await until_async(lambda: dealer.recv(zmq.NOBLOCK) if dealer.poll(0) else b"", within_s, "")
        )
    except AssertionError:
        return None


async def test_a_connection_begins_with_a_frame_without_reports_and_each_request_gets_what_it_asks_for(
    node: NodeReports, path: Path
) -> None:
    with client(path) as dealer:
        dealer.send(b"")
        assert await answers(dealer) == Merged("epoch", 0, 1)
        node.publish(b"1")
        dealer.send(encode_request(7, 2))
        first = await answers(dealer)
        node.publish(b"2")
        second = await answers(dealer)
        node.publish(b"3")
        assert await answers(dealer, 0.5) is None, "no more was asked for"
        dealer.send(encode_request(8, 1))
        third = await answers(dealer)
    node.close()

    assert first
    assert second
    assert third
    assert [(one.asked, one.reports[0].frame) for one in (first, second, third)] == [(7, b"1"), (7, b"2"), (8, b"3")]


async def test_only_its_user_may_connect(node: NodeReports, path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116 - a file in memory
    node.close()


async def test_what_is_no_request_is_left_out_and_others_are_served(node: NodeReports, path: Path) -> None:
    with client(path) as dealer, socket.socket(socket.AF_UNIX) as browser:
        browser.connect(str(path))
        browser.sendall(b"GET / HTTP/1.1\r\n\r\n")
        for nonsense in (b"?", b"x" * 9, b"x" * 500, struct.pack(">QB", 0, 0), struct.pack(">QB", 3, 0)):
            dealer.send(nonsense)
        dealer.send_multipart([encode_request(1, 1)] * 3)
        node.publish(b"1")
        with Reader(path) as reader:
            await until_async(lambda: reader.frames == [b"1"], WAIT_S, "another one is served")
    node.close()


async def test_at_most_so_many_frames_are_sent_for_a_request(node: NodeReports, path: Path) -> None:
    with client(path) as dealer:
        dealer.send(encode_request(1, 255))
        num_frames = 0
        for number in range(2 * MAX_FRAMES_ASKED):
            node.publish(b"%d" % number)
            num_frames += await answers(dealer, 1.0) is not None
    node.close()

    assert num_frames == MAX_FRAMES_ASKED


async def test_a_console_counts_as_watching_until_it_is_gone(node: NodeReports, path: Path) -> None:
    assert not node.look()
    with Reader(path) as reader:
        node.publish(b"1")
        await until_async(lambda: reader.frames, WAIT_S, "it reads")
        assert node.look()

    def is_unwatched() -> bool:
        node.publish(b"for nobody")
        return not node.look()

    await until_async(is_unwatched, WAIT_S, "that it is gone is found out by the next report")
    node.close()


async def test_a_console_that_no_longer_asks_does_not_count_for_ever(
    node: NodeReports, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(path) as dealer:
        dealer.send(encode_request(1, 1))
        node.publish(b"1")
        assert await answers(dealer)
        assert node.look()
        monkeypatch.setattr(subscribers, "AWAY_S", 0.0)
        assert not node.look()
        dealer.send(encode_request(2, 1))
        assert await answers(dealer), "it is known again as soon as it asks"
    node.close()


async def test_a_reader_reads_on_after_its_agent_began_again(node: NodeReports, path: Path) -> None:
    with Reader(path) as reader:
        for number in (b"1", b"2"):
            node.publish(number)
            await until_async(partial(operator.contains, reader.frames, number), WAIT_S, "it reads")
        node.close()
        await until_async(lambda: reader.num_lost == 1, WAIT_S, "the end is seen")
        again = NodeReports(str(path), "another epoch")
        again.open()
        again.publish(b"after")
        await until_async(lambda: reader.frames[-1] == b"after", WAIT_S, "it reads again")
        again.close()
    assert reader.errors == []


async def test_the_last_report_of_an_agent_reaches_who_has_not_asked_for_it_yet_and_who_does_not_look_at_once(
    node: NodeReports, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.report_reader.GATHER_S", 0.15)
    with Reader(path) as reader:
        node.publish(b"first")
        await until_async(lambda: reader.frames == [b"first"], WAIT_S, "it reads")
        for number in range(2 * MAX_FRAMES_ASKED):
            node.publish(b"%d" % number)
        node.publish(b"last" * 10_000)
        await node.finish(WAIT_S)
        node.close()
        await until_async(lambda: reader.num_lost > 0, WAIT_S, "the end is seen")
    assert reader.frames[-1] == b"last" * 10_000


async def test_an_agent_that_nobody_watches_does_not_wait_for_anybody(
    node: NodeReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscribers, "READING_S", 10 * WAIT_S)
    node.publish(b"last")
    async with asyncio.timeout(WAIT_S):
        await node.finish(10 * WAIT_S)
    node.close()


async def test_a_relay_merges_what_has_come_in_one_frame(path: Path) -> None:
    latest = LatestReports()
    for name in "abc":
        latest.put_node(RosterEntry(name, is_here=True), time.monotonic())
    relay = ReportSubscribers(str(path), latest, "relay", lambda: 3)
    relay.open()
    with client(path) as dealer:
        dealer.send(encode_request(1, 4))
        first = await answers(dealer)
        for name in "abc":
            latest.put_report(name, name.encode(), time.monotonic())
            relay.send_news()
        second = await answers(dealer)
    relay.close()

    assert first
    assert second
    assert first.is_whole
    assert [entry.node for entry in first.nodes] == ["a", "b", "c"]
    assert {report.node for report in second.reports} == {"a", "b", "c"}


async def test_a_request_for_several_frames_is_answered_by_all_that_a_cut_one_left(path: Path) -> None:
    latest = LatestReports()
    for number in range(60):  # a roster of several frames, of nodes that report nothing any more
        latest.put_node(RosterEntry(f"n{number}", is_here=False, place=b"x" * 15_000), time.monotonic())
    relay = ReportSubscribers(str(path), latest, "relay")
    relay.open()
    nodes: set[str] = set()
    with client(path) as dealer:
        dealer.send(encode_request(1, MAX_FRAMES_ASKED))
        while (merged := await answers(dealer)) is not None and not merged.is_whole:
            nodes |= {entry.node for entry in merged.nodes}
    relay.close()

    assert merged is not None
    assert len(nodes | {entry.node for entry in merged.nodes}) == 60


def test_a_frame_of_before_this_machine_slept_is_not_taken_for_new(path: Path) -> None:
    with server(path) as router, Reader(path) as reader:
        peer = greeted(router)
        asked, _ = decode_request(received(router)[1])
        answer(router, peer, asked, b"held for longer than anybody has waited here", held_ms=3_600_000)
        until(lambda: reader.errors, WAIT_S, "it is told")
        answer(router, peer, decode_request(received(router)[1])[0], b"new")
        until(lambda: reader.frames == [b"new"], WAIT_S, "it reads on")


def test_a_report_is_as_old_as_it_says_and_as_its_frame_may_have_been_under_way(path: Path) -> None:
    with server(path) as router, Reader(path) as reader:
        peer = greeted(router)
        _, request = received(router)
        asked, num_frames = decode_request(request)
        began_s = time.monotonic()
        until(lambda: time.monotonic() - began_s > 0.5, WAIT_S, "the frame is under way for a while")
        answer(router, peer, asked, b"late")
        until(lambda: reader.frames == [b"late"], WAIT_S, "it has come")
        _, request = received(router)
        answer(router, peer, decode_request(request)[0], b"kept", age_ms=30_000)
        until(lambda: reader.frames[-1] == b"kept", WAIT_S, "it has come")

    assert num_frames == 1, "before the way is known to be short one frame is asked for"
    assert decode_request(request) == (asked + 1, 1), "the way is long"
    assert 0.5 <= reader.ages_s[0] < 30.0
    assert reader.ages_s[1] >= 30.0


def test_where_the_way_is_short_several_are_asked_for(path: Path) -> None:
    with server(path) as router, Reader(path):
        peer = greeted(router)
        _, request = received(router)
        answer(router, peer, decode_request(request)[0], b"1")
        number, num_frames = decode_request(received(router)[1])
        assert num_frames == MAX_FRAMES_ASKED
        for index in range(num_frames):
            assert not router.poll(100), f"asked for more after {index} frames"
            answer(router, peer, number, b"%d" % index)
        assert decode_request(received(router)[1])[0] == number + 1


def test_a_frame_that_a_request_has_overtaken_is_dated_by_its_own_request(path: Path) -> None:
    with server(path) as router, Reader(path) as reader:
        peer = greeted(router)
        first, _ = decode_request(received(router)[1])
        began_s = time.monotonic()
        until(lambda: time.monotonic() - began_s > 0.5, WAIT_S, "time passes")
        router.send_multipart([peer, encode_merged(Merged("r", 0))])  # as if the connection had begun once more
        second, _ = decode_request(received(router)[1])
        answer(router, peer, first, b"first")
        until(lambda: reader.frames == [b"first"], WAIT_S, "it has come")
        assert not router.poll(300), "the second request is not answered yet"
        answer(router, peer, second, b"second")
        until(lambda: reader.frames == [b"first", b"second"], WAIT_S, "it has come")

    assert second == first + 1
    assert reader.ages_s[0] >= 0.5 > reader.ages_s[1]


@pytest.mark.fault(row=30)
@pytest.mark.parametrize(
    "nonsense",
    [
        [b"\xc1"],
        [b"", b""],
        [encode_merged(Merged("r", 0))] * 2,
        [encode_merged(Merged("r", 0, version=99))],
        [encode_merged(Merged("r", 0, asked=9, reports=[MergedReport("here", 0, b"unasked")]))],
    ],
    ids=["no frame", "two empty parts", "two parts", "another version", "reports that nobody has asked for"],
)
def test_nonsense_is_told_and_the_next_frame_is_asked_for(path: Path, nonsense: list[bytes]) -> None:
    with server(path) as router, Reader(path) as reader:
        peer = greeted(router)
        received(router)
        router.send_multipart([peer, *nonsense])
        until(lambda: reader.errors, WAIT_S, "it is told")
        asked, _ = decode_request(received(router)[1])
        answer(router, peer, asked, b"sense")
        until(lambda: reader.frames == [b"sense"], WAIT_S, "it reads on")


@pytest.mark.fault(row=30)
def test_one_that_floods_a_console_holds_up_nobody(tmp_path: Path) -> None:
    frames: list[str] = []
    paths = {name: tmp_path / f"{name}.sock" for name in ("flood", "quiet")}
    reader = ReportReader(paths, lambda name, _merged, _way_s: frames.append(name), lambda *_: None)
    with server(paths["flood"]) as flood, server(paths["quiet"]) as quiet:
        reader.start()
        try:
            peer = greeted(flood)
            for _ in range(500):
                flood.send_multipart([peer, b"x" * 1000])
            greeted(quiet)
            until(lambda: "quiet" in frames, WAIT_S, "the other one is read")
        finally:
            reader.close()


def test_who_asks_once_gets_frames_or_is_told_that_nobody_is_there(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        next(ask_reports(path, 1.0))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(TimeoutError, match="no answer within"):
            next(ask_reports(path, 0.2))


def test_the_longest_frame_may_be_received(path: Path) -> None:
    with server(path) as router, Reader(path) as reader:
        peer = greeted(router)
        asked, _ = decode_request(received(router)[1])
        reports = [MergedReport("here", 0, bytes(MAX_MERGED_BYTES // 2 - 100)) for _ in range(2)]
        frame = encode_merged(Merged("r", 0, asked=asked, reports=reports))
        assert MAX_MERGED_BYTES - 400 < len(frame) <= MAX_MERGED_BYTES
        router.send_multipart([peer, frame])
        until(lambda: len(reader.frames) == 2, WAIT_S, "it has come")
