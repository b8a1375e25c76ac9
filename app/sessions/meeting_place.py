"""Under which address the first node of a job is looked for by the others. Pure.

The agents say which addresses their nodes have, and each node tries the way before anything runs: what is chosen here
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
"""Each that leads nowhere costs seconds."""


def meeting_addresses(first: Sequence[str], others: Sequence[Sequence[str]]) -> list[str]:
    """Return addresses of the first node, the best first.

    Ahead are those in whose networks most other nodes have an address; of equal ones that to which SSH has come. An
    address that another node has too, as that of a container's bridge, leads nowhere and is left out.

    Args:
        first: As `10.0.0.5/24`, in the order of `agent.machine.addresses`; what is no address is left out.
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


def places_to_meet(nodes: Sequence[str], addresses: Callable[[str], Sequence[str]]) -> list[str]:
    """Return where the nodes of a job may meet, the best first; a single one on its loopback alone.

    Args:
        nodes: The one with node rank 0 first.
        addresses: Returns those of a node.

    Raises:
        UsageError: Nowhere.
    """
    first, *others = nodes
    if not others:
        return [LOOPBACK]
    found = meeting_addresses(addresses(first), [addresses(node) for node in others])
    if not found:
        raise _no_address(first)
    return found


def _no_address(node: str) -> UsageError:
    """Return what is to be said of a first node without an address."""
    return UsageError(f"{node} has no address under which others could reach it", "name one: run --master-addr")
