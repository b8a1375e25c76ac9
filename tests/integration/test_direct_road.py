"""The socket over TCP: there only while a console has asked, at the named addresses, for those whose keys are known."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from agent.roads.curve import KeyPair, new_key
from agent.roads.direct_road import LEASE_S, REST_S, DirectRoad
from agent.roads.publisher import Publisher
from agent.wire.direct import ListenForTelemetry, Listening
from agent.wire.replies import RefusalReason, Refused
from agent.wire.reports import encode_node_report
from app.roads.direct_source import DirectSource
from app.roads.telemetry import Telemetry
from tests.support.knocks import LET_IN, REFUSED, Visitor
from tests.support.node_reports import node_report
from tests.support.subscriber import Subscriber
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE, THERE = "127.0.0.1", "127.0.0.2"


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def road(clock: Clock) -> Iterator[DirectRoad]:
    road = DirectRoad(clock)
    yield road
    road.close()


def opened(road: DirectRoad, key: KeyPair, *addresses: str, ports: tuple[int, int] = (0, 0)) -> Listening:
    reply = road.open(ListenForTelemetry(key.public, "eth0", *ports), addresses or [HERE])
    assert isinstance(reply, Listening), reply
    return reply


def refused(road: DirectRoad, *addresses: str, ports: tuple[int, int] = (0, 0)) -> Refused:
    reply = road.open(ListenForTelemetry(new_key().public, "eth0", *ports), addresses)
    assert isinstance(reply, Refused), reply
    return reply


def listening() -> set[str]:
    """Return where this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in found if one.status == psutil.CONN_LISTEN}


def visitor(at: Listening, key: KeyPair | None) -> Visitor:
    return Visitor(at.addresses[0], at.port, key, at.server_key)


def hears(road: DirectRoad, guest: Visitor) -> bool:
    def said_and_heard() -> bool:
        assert road.outlet is not None
        road.outlet.has_listeners()
        road.outlet.publish(b"report")
        return guest.hears() == b"report"

    return until(said_and_heard, 5, "it hears what is said")


def test_a_console_that_has_asked_hears_reports_at_the_named_address_alone(road: DirectRoad) -> None:
    key, before = new_key(), listening()

    at = opened(road, key)

    assert listening() - before == {f"{HERE}:{at.port}"}
    assert not at.is_renewal
    assert at.lease_s == LEASE_S
    with visitor(at, key) as guest:
        assert guest.reception() == LET_IN
        assert hears(road, guest)
        assert road.outlet is not None
        assert road.outlet.has_listeners()


def test_strangers_whoever_has_no_key_and_who_believes_another_server_are_not_let_in(road: DirectRoad) -> None:
    key = new_key()
    at = opened(road, key)

    with visitor(at, new_key()) as stranger, visitor(at, None) as keyless:
        assert stranger.reception() == REFUSED
        assert keyless.reception() != LET_IN
        with Visitor(HERE, at.port, key, new_key().public) as deceived:
            assert deceived.reception() != LET_IN
        with visitor(at, key) as guest:
            assert hears(road, guest)
        assert stranger.hears() is None
        assert keyless.hears() is None


def test_nothing_listens_and_no_thread_is_left_once_the_last_console_has_gone(road: DirectRoad, clock: Clock) -> None:
    before, num_threads, key = listening(), threading.active_count(), new_key()
    for says_so in (True, False):
        at = opened(road, key)
        with visitor(at, key) as guest:
            assert guest.reception() == LET_IN
            if says_so:
                road.forget(key.public)
            clock.now_s += LEASE_S
            road.beat()
            assert guest.loses_connection()
        assert road.outlet is None
        until(lambda: listening() == before, 5, "nothing listens")
        assert threading.active_count() == num_threads


def test_a_second_console_comes_in_at_once_and_stays_when_the_first_one_is_cut(road: DirectRoad, clock: Clock) -> None:
    first, second = new_key(), new_key()
    at = opened(road, first)
    clock.now_s += 10
    assert opened(road, second) == at
    with visitor(at, first) as gone, visitor(at, second) as stays:
        assert (gone.reception(), stays.reception()) == (LET_IN, LET_IN)

        clock.now_s += LEASE_S - 5
        road.beat()

        assert gone.loses_connection()
        assert gone.reception() == REFUSED
        assert stays.loses_connection()
        assert stays.reception() == LET_IN, "on the same port, with the same key"
        assert hears(road, stays)
        assert gone.hears() is None


def test_who_asks_again_is_known_for_longer_and_keeps_the_connection(road: DirectRoad, clock: Clock) -> None:
    key = new_key()
    at = opened(road, key)
    with visitor(at, key) as guest:
        assert hears(road, guest)
        for _ in range(3):
            clock.now_s += LEASE_S - 1
            again = opened(road, key)
            assert (again.port, again.server_key, again.is_renewal) == (at.port, at.server_key, True)
        assert hears(road, guest)


def test_ports_are_those_of_the_range_and_each_address_has_the_same(road: DirectRoad) -> None:
    other = DirectRoad()
    with contextlib.closing(other):
        taken = opened(other, new_key()).port

        reply = refused(road, HERE, ports=(taken, taken))
        assert (reply.reason, "telemetry_port" in reply.message) == (RefusalReason.PORT_TAKEN, True)
        assert road.outlet is None
        port = opened(road, new_key(), ports=(taken, min(taken + 50, 65535))).port
        assert taken < port <= taken + 50
        assert f"let in at port {port}" in refused(road, HERE, ports=(taken, taken)).message
        before = listening()
        at = opened(road, new_key(), HERE, THERE)
        assert listening() - before == {f"{THERE}:{at.port}"}


def test_what_another_console_wanted_closes_with_its_lease(road: DirectRoad, clock: Clock) -> None:
    first, second, before = new_key(), new_key(), listening()
    opened(road, first, HERE, THERE)
    clock.now_s += 10
    at = opened(road, second)

    clock.now_s += LEASE_S - 5
    road.beat()

    until(lambda: listening() - before == {f"{HERE}:{at.port}"}, 5, "only what is still wanted listens")


def test_an_interface_without_an_address_is_refused_with_the_remedy(road: DirectRoad) -> None:
    reply = refused(road)

    assert reply.reason is RefusalReason.NO_INTERFACE
    assert "no address on eth0: name one of this node by telemetry_interface" in reply.message
    assert road.outlet is None


def test_a_publisher_speaks_on_both_roads_and_hears_listeners_on_either(tmp_path: Path) -> None:
    publisher, key = Publisher(str(tmp_path / "telemetry.sock")), new_key()
    with contextlib.closing(publisher):
        assert not publisher.has_listeners()
        at = publisher.listen(ListenForTelemetry(key.public, "eth0"), [HERE])
        assert isinstance(at, Listening)
        with visitor(at, key) as far, contextlib.closing(Subscriber(tmp_path / "telemetry.sock")) as near:
            heard: set[str] = set()

            def both_have_heard() -> bool:
                assert publisher.has_listeners() or not heard
                publisher.publish(b"report")
                heard.update(who for who, frame in (("far", far.hears()), ("near", near.take())) if frame == b"report")
                return heard == {"far", "near"}

            until(both_have_heard, 5, "both hear")
            publisher.stop_listening(key.public)
            assert far.loses_connection()
            assert publisher.has_listeners(), "the one on this machine"


def test_a_console_hears_a_node_where_it_is_told_to_and_after_a_refusal_by_asking_anew(road: DirectRoad) -> None:
    key, report = new_key(), encode_node_report(node_report(1, [], []))
    telemetry = Telemetry({"a": Path("/nowhere/telemetry.sock")})
    telemetry.hear("a", None)
    telemetry.start()
    with contextlib.closing(telemetry):
        at = opened(road, new_key())
        source = DirectSource(HERE, at.port, at.server_key, key)
        telemetry.hear("a", source)
        with visitor(at, key) as as_it:
            assert as_it.reception() == REFUSED
        opened(road, key)
        telemetry.hear("a", source)

        def is_heard() -> bool:
            assert road.outlet is not None
            road.outlet.publish(report)
            return bool(telemetry.drain())

        until(is_heard, 5, "it is heard")
        assert telemetry.heard_s.keys() == {"a"}


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48) + b"\x06" + (2**40).to_bytes(8, "big") + bytes(64)],
    ids=["nothing", "too much"],
)
def test_a_stranger_who_says_nothing_or_too_much_is_dropped_and_hinders_nobody(road: DirectRoad, said: bytes) -> None:
    key = new_key()
    at = opened(road, key)
    with socket.create_connection((HERE, at.port), timeout=10) as stranger, visitor(at, key) as guest:
        stranger.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass  # the server's greeting
        assert hears(road, guest)


def test_nothing_listens_any_more_before_strangers_have_taken_all_descriptors(
    road: DirectRoad, clock: Clock, few_descriptors: None
) -> None:
    before, key = listening(), new_key()
    at = opened(road, key)
    with contextlib.ExitStack() as crowd:

        def is_crowded() -> bool:
            crowd.enter_context(socket.create_connection((HERE, at.port), timeout=10))
            road.beat()
            return road.outlet is None

        until(is_crowded, 5, "it listens no more")
        until(lambda: listening() == before, 5, "nothing listens")
    assert "firewall" in refused(road, HERE).message
    clock.now_s += REST_S
    opened(road, key)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * len(list(Path("/proc/self/fd").iterdir())) + 60, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_console_may_name_an_interface_of_the_other_family_than_the_first_one_did(road: DirectRoad) -> None:
    at = opened(road, new_key(), HERE)
    before = listening()

    opened(road, new_key(), "::1")

    assert listening() - before == {f"::1:{at.port}"}
