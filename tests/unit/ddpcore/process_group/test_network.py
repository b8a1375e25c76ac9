"""The way to a host, who holds a port, and why nobody answers."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from ddpcore.process_group.machine import interfaces, is_own, own_address, port_holder, route_to, trouble_with


def test_the_way_to_this_machine_itself_is_loopback() -> None:
    route = route_to("127.0.0.1")

    assert route is not None
    assert (route.address, route.is_loopback) == ("127.0.0.1", True)
    assert route.interface in interfaces()


def test_any_loopback_address_leads_to_the_loopback_interface() -> None:
    """Debian's 127.0.1.1 stands on no interface."""
    route = route_to("127.0.1.1")

    assert route is not None
    assert route.is_loopback
    assert route.interface in interfaces()


def test_every_own_address_is_reached_over_its_own_interface() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family not in {socket.AF_INET, socket.AF_INET6} or "%" in address.address:
                continue
            route = route_to(address.address)
            assert route is not None
            assert route.address == address.address
            assert route.interface == name
            assert is_own(address.address)


def test_ipv6_has_a_way_too() -> None:
    if not socket.has_ipv6 or "::1" not in {a.address for entry in psutil.net_if_addrs().values() for a in entry}:
        pytest.skip("this machine has no IPv6")
    route = route_to("::1")

    assert route is not None
    assert (route.address, route.is_loopback) == ("::1", True)


def test_a_name_that_does_not_resolve_has_no_way() -> None:
    assert route_to("no-such-host.invalid") is None
    assert route_to("x" * 300) is None
    assert not is_own("no-such-host.invalid")


def test_the_own_address_is_one_that_others_can_reach() -> None:
    address = own_address("127.0.0.1")

    assert not address.startswith("127.")
    assert not address or is_own(address)


def test_another_machine_s_address_is_not_its_own() -> None:
    assert not is_own("192.0.2.1")


def test_who_listens_on_a_port_is_found() -> None:
    with socket.socket() as holds_port:  # and does not listen: whoever wants some port gets another one
        holds_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds_port.bind(("127.0.0.1", 0))
        port = holds_port.getsockname()[1]
        with socket.create_server(("127.0.0.1", port)):
            assert port_holder(port).startswith(f"pid {os.getpid()} (")
            assert trouble_with("127.0.0.1", port).startswith(
                f"what listens on port {port} of 127.0.0.1 is no torch store: pid {os.getpid()} ("
            )

        assert port_holder(port) == ""
        assert trouble_with("127.0.0.1", port) == f"nobody listens on port {port} of 127.0.0.1"


def test_a_name_that_does_not_resolve_is_said_so() -> None:
    assert trouble_with("no-such-host.invalid", 1) == f"no-such-host.invalid does not resolve on {socket.gethostname()}"
