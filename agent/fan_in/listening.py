"""At which address of this machine a relay listens: one that a person names, never all of them."""

from __future__ import annotations

import re
import socket
from ipaddress import IPv6Address, ip_address

import psutil

from agent.errors import OperatorError
from agent.machine.addresses import outward_addresses

_PLACE = re.compile(r"(?:\[(?P<bracketed>[^\]]*)\]|(?P<plain>[^:\[\]]*))(?::(?P<port>[0-9]{1,5}))?")
MAX_PORT = 65_535


def listening_place(text: str) -> tuple[str, int]:
    """Return the address and the port, 0 for a free one, that `INTERFACE_OR_ADDRESS[:PORT]` means here.

    Raises:
        OperatorError: It means nothing here, or all addresses.
    """
    try:
        place, port = str(IPv6Address(text)), ""
    except ValueError:
        match = _PLACE.fullmatch(text)
        if match is None or int(match["port"] or 0) > MAX_PORT:
            raise OperatorError(f"--listen {text!r} is no INTERFACE_OR_ADDRESS[:PORT]") from None
        place, port = match["bracketed"] or match["plain"] or "", match["port"] or ""
    own = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    try:
        parsed = ip_address(place)
    except ValueError:
        return _of_interface(place), int(port or 0)
    if parsed.is_unspecified:
        raise OperatorError(f"--listen {place} would be every network of this machine: {_what_there_is()}")
    if str(parsed) not in own and not parsed.is_loopback:
        raise OperatorError(f"--listen {place}: this machine has no such address: {_what_there_is()}")
    return str(parsed), int(port or 0)


def _of_interface(name: str) -> str:
    families = (socket.AF_INET, socket.AF_INET6)
    of_name = psutil.net_if_addrs().get(name, [])
    found = sorted((address.family, address.address) for address in of_name if address.family in families)
    fit = [address for _, address in found if not ip_address(address).is_link_local]
    if not fit:
        raise OperatorError(f"--listen {name}: no such interface with an address here: {_what_there_is()}")
    return fit[0]


def _what_there_is() -> str:
    there = [f"{one.interface} ({one.address})" for one in outward_addresses()]
    return f"name one of {', '.join(there)}" if there else "it has none that others could reach"
