"""How this node is on the network: its addresses, the one that others should use, and what its own name leads to."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from agent.jobs.network_path import local_address
from agent.machine.addresses import address_of_ssh, is_outward, outward_addresses
from agent.wire.examination import MAX_INTERFACES, Health, Interface, Row

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that are nobody's, which the default route leads to. Source: RFC 5737, RFC 3849."""


def outward_interfaces() -> list[Interface]:
    """Return the addresses at which others could reach this node; see `outward_addresses`."""
    return [Interface(one.interface[:64], one.address, one.mtu) for one in outward_addresses()[:MAX_INTERFACES]]


def own_address(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> str:
    """Return the address at which other nodes should reach this one; empty if there is none.

    The one that SSH came in by, since that is known to be reached; else the one on the way out.

    Args:
        interfaces: As `outward_interfaces` returns them.
        environ: The environment: sshd sets SSH_CONNECTION.
    """
    known = [interface.address for interface in interfaces]
    if (reached := address_of_ssh(environ)) in known:
        return reached
    for road in _FAR_AWAY:
        try:
            address = local_address(road)
        except OSError:
            continue
        if address in known:
            return address
    return known[0] if known else ""


def network_rows(interfaces: Sequence[Interface], address: str) -> Iterator[Row]:
    """Yield what is to be said of the network."""
    yield _loopback_row()
    if interfaces:
        detail = ", ".join(f"{interface.name} {interface.address}" for interface in interfaces[:8])
        yield Row("interfaces", Health.OK, detail)
    else:
        yield Row(
            "interfaces",
            Health.WARN,
            "no interface has an address that others can reach",
            "jobs over several nodes need one",
        )
    yield _hostname_row(socket.gethostname(), address)


def _loopback_row() -> Row:
    """Bind a port on loopback, as the store of a job on one node does."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            port = listener.getsockname()[1]
    except OSError as error:
        todo = "bring up lo: ip link set lo up"
        return Row("ports", Health.BAD, f"cannot listen on 127.0.0.1: {error.strerror}", todo)
    return Row("ports", Health.OK, f"can listen on loopback (tried port {port})")


def _hostname_row(hostname: str, address: str) -> Row:
    """Say where the node's own name leads: gloo without an interface's name takes that address.

    Debian writes 127.0.1.1 for it into /etc/hosts, and then gloo connects nobody.
    """
    try:
        resolved = [str(found[4][0]) for found in socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        todo = f"add a line to /etc/hosts: {address or '<its address>'} {hostname}"
        return Row("hostname", Health.WARN, f"{hostname} has no address", todo)
    if address and not any(map(is_outward, resolved)):
        todo = f"in /etc/hosts, give it {address}; rankdeck's own jobs name addresses and do without"
        return Row("hostname", Health.WARN, f"{hostname} is {resolved[0]}", todo)
    return Row("hostname", Health.OK, f"{hostname} is {resolved[0]}")
