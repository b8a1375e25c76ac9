from __future__ import annotations

import pytest

from agent.machine.addresses import MAX_ADDRESSES, ordered, own_addresses

ETH = ("10.0.0.5", "255.255.255.0")
IB = ("192.168.7.5", "255.255.0.0")
V6 = ("2001:db8::5", "ffff:ffff:ffff:ffff::")


def test_the_address_that_ssh_has_come_to_stands_first_and_ipv4_before_ipv6() -> None:
    assert ordered([V6, ETH, IB], "") == ["10.0.0.5/24", "192.168.7.5/16", "2001:db8::5/64"]
    assert ordered([V6, ETH, IB], "10.0.0.1 51000 192.168.7.5 22") == [
        "192.168.7.5/16",
        "10.0.0.5/24",
        "2001:db8::5/64",
    ]
    assert ordered([ETH, V6], "2001:db8::1 51000 2001:db8::5 22") == ["2001:db8::5/64", "10.0.0.5/24"]


@pytest.mark.parametrize("ssh_connection", ["", "x", "1 2", "10.0.0.1 5 127.0.0.1 22", "a b c d"])
def test_what_says_nothing_of_an_address_here_changes_nothing(ssh_connection: str) -> None:
    assert ordered([ETH, IB], ssh_connection) == ["10.0.0.5/24", "192.168.7.5/16"]


@pytest.mark.parametrize(
    "pair",
    [
        ("127.0.0.1", "255.0.0.0"),
        ("::1", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
        ("fe80::1%eth0", "ffff:ffff:ffff:ffff::"),
        ("169.254.3.4", "255.255.0.0"),
        ("aa:bb:cc:dd:ee:ff", ""),
        ("10.0.0.9", "nonsense"),
    ],
)
def test_what_others_cannot_reach_or_is_no_address_is_left_out(pair: tuple[str, str]) -> None:
    assert ordered([pair, ETH], "") == ["10.0.0.5/24"]


def test_an_address_without_a_netmask_is_a_network_of_its_own() -> None:
    assert ordered([("10.8.0.2", "")], "") == ["10.8.0.2/32"]


def test_they_are_not_more_than_a_line_can_hold() -> None:
    many = [(f"10.1.{index}.1", "255.255.255.0") for index in range(200)]
    assert len(ordered(many, "")) == MAX_ADDRESSES


def test_this_machine_s_own_can_be_read() -> None:
    assert not any(text.startswith("127.") for text in own_addresses({}))
