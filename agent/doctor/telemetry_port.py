"""Where this node would listen for a console that has its reports come straight over TCP, held to be knocked at.

It takes what `agent.roads.direct_road` would: the same addresses of the interface, and one port for all of them.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from agent.errors import NoAgentError
from agent.jobs.preflight import reserve_port
from agent.machine.addresses import addresses_of, outward_addresses, why_no_address
from agent.roads.ask import ask
from agent.wire.commands import GetStatus
from agent.wire.direct import MAX_DIRECT_ADDRESSES
from agent.wire.examination import Listening
from agent.wire.replies import Refused, Status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

NUM_TRIES = 8
"""Of any port that is free, where it must be the same on several addresses."""


def hold_ports(interface: str, ports: tuple[int, int], directory: Path) -> tuple[list[socket.socket], Listening]:
    """Listen at the addresses of an interface, and return where; or nowhere, and why.

    Args:
        interface: Its name, or an address or a network of it.
        ports: The first and the last to choose from; 0 and 0 is any that is free.
        directory: Of the agent, which may listen there itself by now.
    """
    try:
        addresses = addresses_of(outward_addresses(), interface)[:MAX_DIRECT_ADDRESSES]
    except ValueError as error:
        return [], Listening(1, error=str(error)[:1024])
    if not addresses:
        return [], Listening(1, error=why_no_address(interface)[:1024])
    where = Listening(1, addresses[0], addresses=addresses)
    if port := _port_of_agent(directory, addresses, ports):
        return [], Listening(1, addresses[0], port, addresses=addresses, is_agents=True)
    first, last = ports
    held = _held(addresses, range(first, last + 1) if first else [0] * NUM_TRIES)
    if isinstance(held, Refused):
        return [], Listening(1, where.address, error=held.message[:1024], addresses=addresses)
    return held, Listening(1, where.address, held[0].getsockname()[1], addresses=addresses)


def _held(addresses: Sequence[str], ports: Iterable[int]) -> list[socket.socket] | Refused:
    """Return sockets that listen at all addresses, on the first port that is free on all; or what holds the last."""
    refused = None
    for port in ports:
        with ExitStack() as undo:
            held: list[socket.socket] = []
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                taken = reserve_port((family, address), held[0].getsockname()[1] if held else port)
                if isinstance(taken, Refused):
                    refused = taken
                    break
                held.append(undo.enter_context(taken))
            else:
                undo.pop_all()
                return held
    assert refused is not None
    return refused


def _port_of_agent(directory: Path, addresses: Sequence[str], ports: tuple[int, int]) -> int:
    """Return the port at which this node's own agent listens for a console now; 0 where it does not."""
    first, last = ports
    try:
        _, reply = ask(directory, GetStatus())
        if not isinstance(reply, Status):
            return 0
        found = psutil.Process(reply.report.agent_pid).net_connections("tcp")
    except (NoAgentError, psutil.Error):
        return 0
    listening = {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}
    return next(
        (
            port
            for address, port in sorted(listening)
            if (not first or first <= port <= last) and all((other, port) in listening for other in addresses)
        ),
        0,
    )
