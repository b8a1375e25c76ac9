"""Chooses the master address: at which address of the first node the other nodes look for it. Pure.

Agents report the addresses of their nodes, and each node tries the connection before anything runs: what is chosen here
is only the order in which addresses are tried.
"""

from __future__ import annotations

from ipaddress import ip_interface
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.ssh.config import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ipaddress import IPv4Interface, IPv6Interface

    Interface = IPv4Interface | IPv6Interface

MAX_TRIED = 3
"""Addresses that are tried; each that leads nowhere costs seconds."""


def common_addresses(first: Sequence[str], others: Sequence[Sequence[str]]) -> list[str]:
    """Return addresses of the first node, the best first.

    An address ranks by how many other nodes have one in its network, equal ones by the given order: SSH's comes first.
    An address that another node has too, as that of a container's bridge, leads nowhere and is left out.

    Args:
        first: As `10.0.0.5/24`, in the order of `agent.machine.host`; invalid addresses are left out.
        others: Those of each other node.
    """
    own = _interfaces(first)
    theirs = [_interfaces(texts) for texts in others]
    taken = {interface.ip for interfaces in theirs for interface in interfaces}
    fit = [interface for interface in own if interface.ip not in taken]
    fit.sort(key=lambda one: -sum(_is_near(one, interfaces) for interfaces in theirs))
    return [str(interface.ip) for interface in fit[:MAX_TRIED]]


def _interfaces(texts: Sequence[str]) -> list[Interface]:
    found = []
    for text in texts:
        try:
            found.append(ip_interface(text))
        except ValueError:
            continue
    return found


def _is_near(one: Interface, others: Sequence[Interface]) -> bool:
    return any(other.ip in one.network for other in others)


def master_addrs(nodes: Sequence[str], addresses: Callable[[str], Sequence[str]]) -> list[str]:
    """Return the master addresses to try for a job, the best first; for a single node only its loopback.

    Args:
        nodes: The one with node rank 0 first.
        addresses: Returns those of a node.

    Raises:
        UsageError: The first node has no usable address.
    """
    first, *others = nodes
    if not others:
        return [LOOPBACK]
    found = common_addresses(addresses(first), [addresses(node) for node in others])
    if not found:
        raise UsageError(f"{first} has no address under which others could reach it", "name one: run --master-addr")
    return found
