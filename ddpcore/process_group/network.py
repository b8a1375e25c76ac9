"""What this machine's network looks like from here: the way to a host, and who holds a port."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

from ddpcore.process_group.nic_choice import Route

PROBE_S = 1.0
"""How long a host may take to answer a connection when people want to know why it did not."""

_OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation (RFC 5737 and 3849): the way to them is the default route. Nothing is sent there."""

_ANY_PORT = 9


def route_to(host: str) -> Route | None:
    """Return the way to a host, or None if there is none, or its name does not resolve.

    Sends nothing: connecting a UDP socket makes the kernel choose. A name is resolved, which may take seconds.
    """
    try:
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return None
    for family, kind, protocol, _, address in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = _without_scope(probe.getsockname()[0])
            interface = _interface_of(own)
            if interface:
                return Route(interface, own, is_loopback=ip_address(own).is_loopback)
    return None


def own_address(towards: str = "") -> str:
    """Return this machine's address by which others reach it; empty if it has none but loopback.

    Args:
        towards: A host; the address on the way there if that leads out, else the one on the default route.
    """
    for host in (towards, *_OUTSIDE):
        route = route_to(host) if host else None
        if route is not None and not route.is_loopback:
            return route.address
    return ""


def interfaces() -> set[str]:
    """Return the names of this machine's interfaces."""
    return set(psutil.net_if_addrs())


def is_own(host: str) -> bool:
    """Say whether a host's name or address is one of this machine's."""
    try:
        found = {_without_scope(str(entry[4][0])) for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return any(_interface_of(address) for address in found)


def port_holder(port: int) -> str:
    """Return which process listens on a TCP port of this machine: `pid 12 (python train.py)`; empty if nobody is seen.

    Processes of other users are only seen by root.
    """
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ""
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            if connection.pid is None:
                return "another user's process, or one of another container"
            return f"pid {connection.pid}{_command_of(connection.pid)}"
    return ""


def trouble_with(host: str, port: int) -> str:
    """Return, in words, why nobody could be met at an address: asks the network once, for a second or so."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return f"{host} does not resolve on {socket.gethostname()}"
    problem = f"{host} has no address"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(PROBE_S)
                probe.connect(address)
        except ConnectionRefusedError:
            problem = f"nobody listens on port {port} of {host}"
        except TimeoutError:
            problem = f"{host} does not answer on port {port}: another address, or a firewall"
        except OSError as error:
            problem = f"{host} cannot be reached: {error.strerror or error}"
        else:
            holder = port_holder(port) if is_own(host) else ""
            return f"what listens on port {port} of {host} is no torch store{f': {holder}' if holder else ''}"
    return problem


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(_without_scope(entry.address) == address for entry in addresses):
            return name
    return "lo" if ip_address(address).is_loopback and "lo" in psutil.net_if_addrs() else ""


def _without_scope(address: str) -> str:
    """Return fe80::1 of fe80::1%eth0."""
    return address.partition("%")[0]


def _command_of(pid: int) -> str:
    try:
        return f" ({' '.join(psutil.Process(pid).cmdline())[:100]})"
    except psutil.Error:
        return ""
