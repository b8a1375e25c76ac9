"""Whether this machine reaches where hosts would listen for it: real verbs, and hosts that lie."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from agent.machine.addresses import outward_addresses
from app.preflight.findings import Answers, TelemetryLook, TelemetryWish, Wanted
from app.preflight.telemetry_way import look_at_telemetry
from app.ssh.local_link import LocalLink
from tests.support.examinations import answers

if TYPE_CHECKING:
    from pathlib import Path

AT = {"schema": 1, "address": "10.0.0.1", "port": 47_003, "token": "t", "addresses": ["10.0.0.1"]}
ADDRESS_OF_SSH = "192.0.2.73"
RANGE = TelemetryWish("eth0", (47_000, 47_009))


def link_by(path: Path, program: str) -> LocalLink:
    """Return a link to a host whose Python is a shell program."""
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700)
    link = LocalLink(str(path))
    link.host = path.name
    return link


def looked(wish: TelemetryWish, *links: LocalLink) -> list[TelemetryLook]:
    found = {
        link.host: Answers(
            Wanted(link.host, telemetry=wish), examination=answers(link.host, address=ADDRESS_OF_SSH).examination
        )
        for link in links
    }
    look_at_telemetry({link.host: link for link in links}, found)
    looks = [one.telemetry for one in found.values()]
    assert all(looks)
    return [look for look in looks if look is not None]


def look_at_liar(tmp_path: Path, wish: TelemetryWish, **said: Any) -> TelemetryLook:
    line = json.dumps(AT | said)
    (look,) = looked(wish, link_by(tmp_path / "h1", f"echo '{line}'; cat > /dev/null"))
    return look


@pytest.fixture
def address() -> str:
    """An address of this machine at which others could reach it."""
    found = [one.address for one in outward_addresses() if ":" not in one.address]
    if not found:
        pytest.skip("this machine has no address but its own")
    return found[0]


def test_no_host_holds_its_port_until_another_has_begun(tmp_path: Path, address: str) -> None:
    """The second begins when the first has let go, as on a machine that is slow."""
    ended = tmp_path / "ended"
    real = f'"{sys.executable}" "$@"'
    first = link_by(tmp_path / "h1", f'{real}; touch "{ended}"')
    second = link_by(tmp_path / "h2", f'while [ ! -e "{ended}" ]; do sleep 0.05; done; exec {real}')

    looks = looked(TelemetryWish(address, (0, 0)), first, second)

    for look in looks:
        assert look.listening is not None, look.error
        assert [one.error for one in look.reached] == [""]
        assert look.reached[0].token == look.listening.token


def test_a_port_is_free_again_when_all_is_said(address: str) -> None:
    here = LocalLink()
    (first,) = looked(TelemetryWish(address, (0, 0)), here)
    assert first.listening is not None, first.error
    port = first.listening.port

    (again,) = looked(TelemetryWish(address, (port, port)), here)

    assert again.listening is not None, again.error
    assert (again.listening.port, again.listening.error) == (port, "")
    assert [one.token for one in again.reached] == [again.listening.token]


@pytest.mark.parametrize("is_agents", [False, True])
def test_a_host_that_names_a_port_that_was_not_wished_for_is_not_knocked_at(tmp_path: Path, is_agents: bool) -> None:
    look = look_at_liar(tmp_path, RANGE, port=22, is_agents=is_agents)

    assert look == TelemetryLook(error="it names port 22, which telemetry_port does not")


def test_a_host_that_names_addresses_of_ours_is_not_knocked_at(tmp_path: Path) -> None:
    ours = ["127.0.0.1", "::ffff:127.0.0.1", "::1", "169.254.169.254", "fe80::1", "0.0.0.0", "::ffff:0.0.0.0"]

    look = look_at_liar(tmp_path, RANGE, addresses=ours)

    assert look.listening is not None
    assert (look.listening.addresses, look.reached, look.error) == (ours, (), "")


def test_only_those_addresses_are_knocked_at_that_a_console_tries(tmp_path: Path) -> None:
    """That of SSH first, and no more than three; nobody is there."""
    addresses = ["::1", "127.0.0.2", *(f"192.0.2.{number}" for number in range(70, 75))]

    look = look_at_liar(tmp_path, RANGE, addresses=addresses)

    assert [one.target for one in look.reached] == ["192.0.2.73:47003", "192.0.2.70:47003", "192.0.2.71:47003"]
    assert all(one.error for one in look.reached)
