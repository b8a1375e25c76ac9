"""At which of the addresses that a host tells its reports may be heard, or a connection be tried. Pure.

A host says itself where it is, and what it says is where others connect: an address that is this machine's own, or of
its own link, is never one of a host.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_ADDRESSES = 3
"""Of a host that are tried."""


def addresses_to_try(told: Iterable[str], preferred: str) -> list[str]:
    """Return at which addresses of a host to try, in this order.

    Args:
        told: By the host.
        preferred: Under which SSH goes there; empty where it is not known.
    """
    usable = dict.fromkeys(address for one in told if (address := address_elsewhere(one)))
    return sorted(usable, key=lambda address: address != preferred)[:MAX_ADDRESSES]


def address_elsewhere(text: str) -> str:
    """Return an address as it is to be used; empty unless it may be one of another machine."""
    try:
        parsed = ip_address(text)
    except ValueError:
        return ""
    # Not all Pythons look through ::ffff:127.0.0.1, and the kernel does.
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    is_ours = parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast or parsed.is_link_local
    return "" if is_ours else str(parsed)
