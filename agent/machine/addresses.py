"""Under which addresses this node may be reached by others."""

from __future__ import annotations

import socket
from ipaddress import ip_address, ip_interface
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_ADDRESSES = 64
_FAMILIES = (socket.AF_INET, socket.AF_INET6)


class OutwardAddress(NamedTuple):
    """An address of an interface that is up.

    Attributes:
        interface: Its name.
        address: Without a zone.
        netmask: Empty where there is none.
        mtu: Of the interface, bytes.
    """

    interface: str
    address: str
    netmask: str
    mtu: int


def outward_addresses() -> list[OutwardAddress]:
    """Return the addresses at which others could reach this node; IPv4 first, of one kind by interface."""
    stats = psutil.net_if_stats()
    found = [
        OutwardAddress(name, address.address, address.netmask or "", stats[name].mtu)
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for address in addresses
        if address.family in _FAMILIES and is_outward(address.address)
    ]
    return sorted(found, key=lambda one: (":" in one.address, one.interface))


def is_outward(address: str) -> bool:
    """Say whether others can reach a node at an address, for all that the address tells."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    # One with a zone is of one link only.
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified)


def interface_of(address: str) -> str:
    """Return the network interface that has an address of this node; empty if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return name
    return ""


def address_of_ssh(environ: Mapping[str, str]) -> str:
    """Return the address under which SSH has come here; empty where it has not.

    Args:
        environ: Of a process that sshd may have started. Source: sshd(8), SSH_CONNECTION.
    """
    parts = environ.get("SSH_CONNECTION", "").split()
    return parts[2] if len(parts) == 4 else ""


def own_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return this node's addresses with the lengths of their networks' prefixes, as `10.0.0.5/24`.

    The one under which SSH has come here stands first, the others as in `outward_addresses`.
    """
    return ordered(outward_addresses(), address_of_ssh(environ))


def ordered(found: Iterable[OutwardAddress], first: str) -> list[str]:
    """Return addresses as `own_addresses` does, the one that is `first` ahead."""
    ahead = sorted(found, key=lambda one: one.address != first)
    return [_with_prefix(one.address, one.netmask) for one in ahead[:MAX_ADDRESSES]]


def _with_prefix(address: str, netmask: str) -> str:
    try:
        # psutil writes an IPv6 netmask out, which `ipaddress` does not read.
        mask = int(ip_address(netmask)).bit_count() if ":" in netmask else netmask
        return str(ip_interface(f"{address}/{mask}" if mask else address))
    except ValueError:
        return str(ip_interface(address))
