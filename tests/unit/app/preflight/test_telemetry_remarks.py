"""What is said of hosts whose reports are to come straight over TCP."""

from __future__ import annotations

import msgspec
import pytest

from agent.wire.examination import Health, Listening, Reached
from app.errors import ExitCode
from app.inventory.inventory import CURVE, HostEntry
from app.preflight.comparison import compare
from app.preflight.findings import TelemetryLook, TelemetryWish, telemetry_wish
from app.preflight.mesh import target_text
from app.preflight.telemetry_remarks import telemetry_remarks
from app.ssh.config import THIS_MACHINE
from tests.support.examinations import H1, H2, answers

ANY_PORT = TelemetryWish("eth0", (0, 0))
RANGE = TelemetryWish("eth0", (47_000, 47_009))
AT = Listening(1, "10.0.0.1", 47_003, "token", addresses=["10.0.0.1", "fd00::1"])
WAY = Reached("10.0.0.1:47003", "token", 0.0004)
NO_WAY = Reached("10.0.0.1:47003", error="No answer within 4 s")


def said(look: TelemetryLook | None, wish: TelemetryWish | None = ANY_PORT) -> list[tuple[Health, str, str]]:
    host = answers(H1)
    host = msgspec.structs.replace(host, wanted=msgspec.structs.replace(host.wanted, telemetry=wish), telemetry=look)
    rows = [row for name, row in telemetry_remarks([host, answers(H2)]) if name == H1]
    found = compare([host, answers(H2)])
    assert [row for row in found.hosts[0].rows if row.name == "telemetry"] == rows, "they are among all that is said"
    assert found.exit_code is ExitCode.WELL, "no job fails of it"
    return [(row.status, row.detail, row.todo) for row in rows]


def test_a_port_that_is_reached_by_any_address_is_well() -> None:
    place = "eth0, 10.0.0.1, fd00::1, TCP port 47003"
    assert said(TelemetryLook(AT, (NO_WAY, WAY))) == [
        (Health.OK, f"{place}, is reached from this machine in 0.4 ms", "")
    ]


@pytest.mark.parametrize(
    ("wish", "todo"),
    [
        (ANY_PORT, "let it through the firewalls (telemetry_port fixes it), or name another telemetry_interface; "),
        (RANGE, "let TCP ports 47000-47009 through the firewalls, or name another telemetry_interface; "),
        (TelemetryWish("eth0", (47_003, 47_003)), "let TCP port 47003 through the firewalls, or name another tel"),
    ],
)
def test_a_port_that_is_not_reached_is_told_with_what_a_firewall_must_let_through(
    wish: TelemetryWish, todo: str
) -> None:
    ((status, detail, advice),) = said(TelemetryLook(AT, (NO_WAY, NO_WAY)), wish)

    assert status is Health.WARN
    assert detail.startswith("this machine does not reach eth0, 10.0.0.1, fd00::1, TCP port 47003: no answer within")
    assert advice.startswith(todo)


def test_another_machine_that_answers_in_its_place_is_not_taken_for_it() -> None:
    ((status, detail, _),) = said(TelemetryLook(AT, (Reached("", "another token"),)))

    assert (status, "another machine answers there" in detail) == (Health.WARN, True)


@pytest.mark.parametrize(
    ("look", "detail", "todo"),
    [
        (
            TelemetryLook(Listening(1, error="it has no interface eth0, but lo")),
            "it has no interface eth0, but lo",
            "name one that it has by telemetry_interface",
        ),
        (
            TelemetryLook(Listening(1, "10.0.0.1", error="port 47009 of 10.0.0.1 is taken", addresses=["10.0.0.1"])),
            "it cannot listen on eth0: port 47009 of 10.0.0.1 is taken",
            "name other ports by telemetry_port",
        ),
        (
            TelemetryLook(Listening(1, "127.0.0.1", 47_003, addresses=["127.0.0.1"])),
            "it listens at eth0, 127.0.0.1, TCP port 47003, where no other machine can reach it",
            "name one with an address that this machine has a route to by telemetry_interface",
        ),
        (
            TelemetryLook(error="`agent listen` ended there"),
            "it does not say where it would listen: `a",
            "try again, or bring the same",
        ),
        (
            TelemetryLook(AT, error="python does not run"),
            "eth0, 10.0.0.1, fd00::1, TCP port 47003: whether it is reached is not known: python does not run",
            "try again",
        ),
    ],
)
def test_what_is_in_the_way_is_told_with_what_to_do(look: TelemetryLook, detail: str, todo: str) -> None:
    ((status, told, advice),) = said(look)

    assert status is Health.WARN
    assert told.startswith(detail)
    assert advice.startswith(todo)


def test_where_the_agent_listens_already_nothing_is_held_against_it() -> None:
    at = msgspec.structs.replace(AT, token="", is_agents=True)

    assert said(TelemetryLook(at)) == [
        (
            Health.OK,
            "its agent listens at eth0, 10.0.0.1, fd00::1, TCP port 47003 for a console that looks on; not tried",
            "",
        )
    ]


def test_where_reports_come_by_ssh_nothing_is_said() -> None:
    assert said(None, None) == said(TelemetryLook(AT, (WAY,)), None) == said(None) == []


def test_it_is_the_inventory_that_says_whose_reports_come_straight() -> None:
    entry = HostEntry("h1", telemetry=CURVE, telemetry_interface="eth0", telemetry_ports=(47_000, 47_009))

    assert telemetry_wish(entry) == RANGE
    assert telemetry_wish(msgspec.structs.replace(entry, host=THIS_MACHINE)) is None
    assert telemetry_wish(HostEntry("h1", telemetry_interface="eth0")) is None


def test_each_address_of_an_interface_is_a_place_of_its_own() -> None:
    assert [target_text(AT, one) for one in [*AT.addresses, "127.0.0.1"]] == [
        *("10.0.0.1:47003", "[fd00::1]:47003", ""),
    ]
