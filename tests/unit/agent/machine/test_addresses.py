from __future__ import annotations

import pytest

from agent.machine.host import (
    MAX_ADDRESSES,
    OutwardAddress,
    address_of_ssh,
    is_outward,
    ordered,
    outward_addresses,
    own_addresses,
)

ETH = OutwardAddress("eth0", "10.0.0.5", "255.255.255.0", 1500)
IB = OutwardAddress("ib0", "192.168.7.5", "255.255.0.0", 4096)
V6 = OutwardAddress("eth0", "2001:db8::5", "ffff:ffff:ffff:ffff::", 1500)


def test_the_address_that_ssh_has_come_to_stands_first() -> None:
    assert ordered([ETH, IB, V6], "") == ["10.0.0.5/24", "192.168.7.5/16", "2001:db8::5/64"]
    assert ordered([ETH, IB, V6], "192.168.7.5") == ["192.168.7.5/16", "10.0.0.5/24", "2001:db8::5/64"]
    assert ordered([ETH, V6], "2001:db8::5") == ["2001:db8::5/64", "10.0.0.5/24"]
    assert ordered([ETH, IB], "127.0.0.1") == ["10.0.0.5/24", "192.168.7.5/16"]


@pytest.mark.parametrize(
    ("connection", "address"),
    [("10.0.0.1 51000 10.0.0.5 22", "10.0.0.5"), ("", ""), ("x", ""), ("1 2", ""), ("1 2 3 4 5", "")],
)
def test_where_ssh_has_come_to_is_read_from_what_sshd_says(connection: str, address: str) -> None:
    assert address_of_ssh({"SSH_CONNECTION": connection}) == address


@pytest.mark.parametrize("netmask", ["", "nonsense", "1:2:3:nonsense"])
def test_an_address_without_a_netmask_is_a_network_of_its_own(netmask: str) -> None:
    assert ordered([OutwardAddress("tun0", "10.8.0.2", netmask, 1500)], "") == ["10.8.0.2/32"]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "::1", "169.254.1.1", "fe80::1", "fe80::1%eth0", "0.0.0.0", "aa:bb:cc:dd:ee:ff", ""],
)
def test_some_addresses_lead_nowhere(address: str) -> None:
    assert not is_outward(address)


def test_they_are_not_more_than_a_line_can_hold() -> None:
    many = [OutwardAddress("eth0", f"10.1.{index}.1", "255.255.255.0", 1500) for index in range(200)]
    assert len(ordered(many, "")) == MAX_ADDRESSES


def test_this_machine_s_own_can_be_read() -> None:
    assert all(is_outward(one.address) and one.mtu for one in outward_addresses())
    assert len(own_addresses({})) == min(MAX_ADDRESSES, len(outward_addresses()))
