"""The receiving end of telemetry, against real nodes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from agent.transport.subscribers import NodeReports
from agent.wire.reports import MAX_NODE_REPORT_BYTES, WIRE_VERSION, NodeReport, encode_node_report
from app.fleet.telemetry import Received, Telemetry
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def node_report(seq: int, *, version: int = WIRE_VERSION) -> NodeReport:
    return NodeReport(version, node="says-so", epoch="e", report_seq=seq, hostname="h", agent_pid=1, num_cpus=2)


class Publishers:
    """Nodes that report when the test says so, served by a thread."""

    def __init__(self, directory: Path, names: list[str]) -> None:
        self.paths = {name: directory / f"{name}.sock" for name in names}
        self._nodes = {name: NodeReports(str(path), "epoch") for name, path in self.paths.items()}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        for node in self._nodes.values():
            self._call(node.open)

    def send(self, name: str, frame: bytes) -> None:
        self._call(self._nodes[name].publish, frame)

    def close(self) -> None:
        for node in self._nodes.values():
            self._call(node.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, do: Callable[..., None], *arguments: bytes) -> None:
        async def done() -> None:
            do(*arguments)

        asyncio.run_coroutine_threadsafe(done(), self._loop).result(10)


@pytest.fixture
def publishers(tmp_path: Path) -> Iterator[Publishers]:
    publishers = Publishers(tmp_path, ["a", "b"])
    yield publishers
    publishers.close()


@pytest.fixture
def telemetry(publishers: Publishers) -> Iterator[Telemetry]:
    telemetry = Telemetry(publishers.paths)
    telemetry.start()
    yield telemetry
    telemetry.close()


def received_after(publishers: Publishers, telemetry: Telemetry, name: str, frame: bytes) -> list[Received]:
    def send_and_drain() -> list[Received]:
        publishers.send(name, frame)
        return telemetry.drain()

    return until(send_and_drain, 5, "a report arrives")


@pytest.mark.fault(row=30)
def test_a_report_is_its_socket_s_whatever_name_it_carries(publishers: Publishers, telemetry: Telemetry) -> None:
    (received,) = received_after(publishers, telemetry, "b", encode_node_report(node_report(1)))

    assert received.node == "b"
    assert received.report.node == "says-so"


def test_only_the_newest_report_of_a_node_is_kept(publishers: Publishers, telemetry: Telemetry) -> None:
    received_after(publishers, telemetry, "a", encode_node_report(node_report(1)))
    for seq in range(2, 101):
        publishers.send("a", encode_node_report(node_report(seq)))

    def newest_of_a_drain() -> int:
        drained = telemetry.drain()
        assert len(drained) <= 1
        return drained[0].report.report_seq == 100 if drained else False

    until(newest_of_a_drain, 5, "the newest arrives")


@pytest.mark.fault(row=30)
def test_bytes_that_are_no_report_are_counted_and_do_no_harm(publishers: Publishers, telemetry: Telemetry) -> None:
    def babble() -> int:
        publishers.send("a", b"\xc1\xff")
        telemetry.drain()
        return telemetry.num_malformed["a"]

    until(babble, 5, "the malformed frame is counted")
    assert telemetry.unreadable["a"][1]

    received_after(publishers, telemetry, "a", encode_node_report(node_report(1)))
    assert telemetry.unreadable == {}


@pytest.mark.fault(row=30)
def test_an_oversize_frame_does_not_reach_the_console(publishers: Publishers, telemetry: Telemetry) -> None:
    publishers.send("a", b"x" * (MAX_NODE_REPORT_BYTES + 1))

    received = received_after(publishers, telemetry, "b", encode_node_report(node_report(1)))

    assert [r.node for r in received] == ["b"]


def test_another_wire_version_is_kept_for_the_person_to_see(publishers: Publishers, telemetry: Telemetry) -> None:
    frame = encode_node_report(msgspec.structs.replace(node_report(1), wire_version=99))

    def send() -> str:
        publishers.send("a", frame)
        telemetry.drain()
        return telemetry.incompatible.get("a", "")

    assert "version 99" in until(send, 5, "the version is noticed")


def test_closing_ends_the_thread_even_if_nothing_ever_spoke(tmp_path: Path) -> None:
    telemetry = Telemetry({"a": tmp_path / "never.sock"})
    telemetry.start()

    telemetry.close()

    assert telemetry.drain() == []


def test_more_nodes_than_a_context_has_sockets_by_itself_are_heard(publishers: Publishers, tmp_path: Path) -> None:
    silent = {f"silent-{number}": tmp_path / f"{number}.sock" for number in range(1100)}
    telemetry = Telemetry({**silent, **publishers.paths})
    telemetry.start()
    try:
        (received,) = received_after(publishers, telemetry, "b", encode_node_report(node_report(1)))
    finally:
        telemetry.close()

    assert received.node == "b"


def test_of_many_nodes_some_are_taken_and_the_others_wait(telemetry: Telemetry) -> None:
    for turn in (1, 2):
        for name in ("a", "b"):
            telemetry.take(name, encode_node_report(node_report(turn)))
    assert telemetry.num_waiting == 2

    (first,) = telemetry.drain(1)
    (second,) = telemetry.drain(1)

    assert [(one.node, one.report.report_seq) for one in (first, second)] == [("a", 2), ("b", 2)]
    assert telemetry.drain(1) == []
