"""The way from this node to where a job's store listens: its address, whether it leads there, over which interface."""

from __future__ import annotations

import asyncio
import socket

from agent.machine.addresses import interface_of
from agent.wire.replies import RefusalReason, Refused

Address = tuple[int, str]
"""Address family and host."""

CONNECT_S = 3.0
"""Two lost SYNs; a console waits ten seconds for the whole answer."""


async def resolve(host: str) -> Address | Refused:
    """Return the address that a job's store is to listen on."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return Refused(RefusalReason.BAD_ADDRESS, f"{host} is not a name or address that this node knows")
    family, _, _, _, (address, *_) = found[0]
    return family, str(address)


async def refusal_by_network(address: Address, port: int) -> Refused | None:
    """Return why this node cannot connect to a store that listens elsewhere; None if it can.

    Whoever listens sees a connection that says nothing and ends, which torch's store takes for what it is.
    """
    host = address[1]
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        why = f"no answer in {CONNECT_S:.0f} s"
    except OSError as error:
        why = error.strerror or str(error)
    else:
        return None
    todo = "let the nodes reach each other on every TCP port, or name another address of the first one: --master-addr"
    return Refused(RefusalReason.UNREACHABLE, f"no way from here to {host} port {port}, the first node: {why}; {todo}")


def local_address(peer: Address) -> str:
    """Return the address from which this node speaks to `peer`; nothing is sent.

    Raises:
        OSError: There is no way there.
    """
    family, host = peer
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as road:
        road.connect((host, 9))
        return str(road.getsockname()[0])


def interface_to(peer: Address) -> str:
    """Return the network interface over which this node speaks to `peer`; empty if none has that address.

    Raises:
        OSError: There is no way there.
    """
    return interface_of(local_address(peer))
