"""The address that others should use, and where a node's own name leads."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from agent.doctor import network
from agent.doctor.network import network_rows, outward_interfaces, own_address
from agent.wire.examination import Health, Interface, Row

ETH0 = Interface("eth0", "10.0.0.7", 1500)
ETH1 = Interface("eth1", "192.168.7.7", 9000)


def hostname_row(monkeypatch: pytest.MonkeyPatch, found: list[str] | OSError, address: str = "10.0.0.7") -> Row:
    def getaddrinfo(*_: object, **__: object) -> list[Any]:
        if isinstance(found, OSError):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return next(row for row in network_rows([ETH0], address) if row.name == "hostname")


def test_the_address_that_ssh_came_in_by_counts_first() -> None:
    environ = {"SSH_CONNECTION": "10.0.0.1 40000 192.168.7.7 22"}

    assert own_address([ETH0, ETH1], environ) == "192.168.7.7"


@pytest.mark.parametrize("connection", ["", "1 2", "127.0.0.1 1 127.0.0.1 22", "a b 10.9.9.9 d"])
def test_else_the_one_on_the_way_out(monkeypatch: pytest.MonkeyPatch, connection: str) -> None:
    monkeypatch.setattr(network, "local_address", lambda _road: "192.168.7.7")

    assert own_address([ETH0, ETH1], {"SSH_CONNECTION": connection}) == "192.168.7.7"


def test_without_a_way_out_the_first_one_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_road: object) -> str:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network, "local_address", unreachable)
    assert own_address([ETH0, ETH1], {}) == "10.0.0.7"
    assert own_address([], {}) == ""
    monkeypatch.setattr(network, "local_address", lambda _road: "172.17.0.9")
    assert own_address([ETH0], {}) == "10.0.0.7", "an address that is on no interface is nobody's"


def test_this_machine_has_interfaces_that_are_up() -> None:
    assert all(one.name and one.mtu for one in outward_interfaces())
    rows = {row.name: row for row in network_rows([], "")}
    assert (rows["interfaces"].status, rows["ports"].status) == (Health.WARN, Health.OK)


def test_the_name_that_leads_to_loopback_is_told_with_the_line_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hostname_row(monkeypatch, ["127.0.1.1"])

    note = "rankdeck's jobs do without; torchrun lines of your own need 10.0.0.7 for it in /etc/hosts"
    assert (row.status, row.detail.endswith(f" is 127.0.1.1: {note}"), row.todo) == (Health.OK, True, "")
    assert hostname_row(monkeypatch, ["10.0.0.7", "127.0.1.1"]).status is Health.OK
    assert hostname_row(monkeypatch, ["127.0.1.1"], address="").status is Health.OK, "it has no other"


def test_a_name_that_leads_nowhere_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    row = hostname_row(monkeypatch, socket.gaierror(-2, "Name or service not known"))

    assert (row.status, "10.0.0.7" in row.todo) == (Health.WARN, True)
