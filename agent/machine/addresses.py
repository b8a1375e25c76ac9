"""Under which addresses this node may be reached by others."""

from __future__ import annotations

from ipaddress import IPv6Interface, ip_interface
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from ipaddress import IPv4Interface

    Interface = IPv4Interface | IPv6Interface

MAX_ADDRESSES = 64


def own_addresses(environ: Mapping[str, str]) -> list[str]:
    """Return this node's addresses with the lengths of their networks' prefixes, as `10.0.0.5/24`.

    The one under which SSH has come here stands first, the others in the order of the interfaces, IPv4 before IPv6.
    Loopback and link-local ones are left out.

    Args:
        environ: Of a process that SSH may have started. Source: sshd(8), SSH_CONNECTION.
    """
    stats = psutil.net_if_stats()
    found = [
        (address.address, address.netmask or "")
        for name, addresses in psutil.net_if_addrs().items()
        if name in stats and stats[name].isup
        for address in addresses
    ]
    return ordered(found, environ.get("SSH_CONNECTION", ""))


def ordered(found: Iterable[tuple[str, str]], ssh_connection: str) -> list[str]:
    """Return the fit ones of (address, netmask), as `own_addresses` does."""
    interfaces = [interface for pair in found if (interface := _interface(*pair)) is not None]
    reached = (ssh_connection.split() or [""] * 4)[2:3]
    interfaces.sort(key=lambda one: (str(one.ip) not in reached, one.version))
    return [str(interface) for interface in interfaces[:MAX_ADDRESSES]]


def _interface(address: str, netmask: str) -> Interface | None:
    """Return an address in its network; None for one that others cannot use, or that is none, as a MAC is."""
    try:
        # psutil writes an IPv6 netmask out, which `ipaddress` does not read.
        mask = int(ip_interface(netmask).ip).bit_count() if ":" in netmask else netmask
        interface = ip_interface(f"{address}/{mask}" if mask else address)
    except ValueError:
        return None
    return None if interface.is_loopback or interface.is_link_local else interface
