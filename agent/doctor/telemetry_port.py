"""Where this node would listen for a console that has its reports come straight over TCP, held to be knocked at.

It takes what `agent.roads.direct_road` would: the same addresses of the interface, and one port for all of them.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import TYPE_CHECKING

import psutil

from agent.errors import NoAgentError
from agent.jobs.preflight import holder_of, listen_at
from agent.machine.addresses import addresses_of, outward_addresses, why_no_address
from agent.roads.ask import ask
from agent.wire.commands import GetStatus, ShowJob
from agent.wire.direct import MAX_DIRECT_ADDRESSES
from agent.wire.examination import Listening
from agent.wire.jobs import JobState
from agent.wire.replies import Shown, Status

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from agent.wire.reports import NodeReport

NUM_TRIES = 8
"""Of any port that is free, where it must be the same on several addresses."""
ASK_S = 3.0
"""For the agent's answer: whoever has this verb begun waits for its first line, too."""


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
    if port := port_of_agent(directory, addresses, ports):
        return [], Listening(1, addresses[0], port, addresses=addresses, is_agents=True)
    first, last = ports
    held = hold_first_free(addresses, range(first, last + 1) if first else [0] * NUM_TRIES)
    if isinstance(held, str):
        return [], Listening(1, where.address, error=held[:1024], addresses=addresses)
    return held, Listening(1, where.address, held[0].getsockname()[1], addresses=addresses)


def hold_first_free(addresses: Sequence[str], ports: Sequence[int]) -> list[socket.socket] | str:
    """Return sockets that listen at all addresses, on the first port that is free on all; or why there are none.

    Args:
        addresses: Of this node.
        ports: To choose from; 0 is any.
    """
    last_taken = ("", 0)
    for port in ports:
        with ExitStack() as undo:
            held: list[socket.socket] = []
            for address in addresses:
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                wanted = held[0].getsockname()[1] if held else port
                try:
                    held.append(undo.enter_context(listen_at((family, address), wanted)))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        return _why_none(error, address, wanted)
                    last_taken = (address, wanted)
                    break
            else:
                undo.pop_all()
                return held
    address, port = last_taken
    # Its holder is looked for once: for each port of a long range that would take longer than anybody waits.
    taken = f"port {port} of {address} is taken by {holder_of(port)}"
    return taken if len(ports) == 1 else f"none of {len(ports)} ports is free; {taken}"


def _why_none(error: OSError, address: str, port: int) -> str:
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than an agent has, unlike those above 1023"
    return f"cannot listen at {address}, port {port}: {error.strerror}"


def port_of_agent(directory: Path, addresses: Sequence[str], ports: tuple[int, int]) -> int:
    """Return the port at which this node's own agent listens for a console now; 0 where it does not."""
    first, last = ports
    try:
        _, reply = ask(directory, GetStatus(), ASK_S)
        if not isinstance(reply, Status):
            return 0
        stores = _ports_of_stores(directory, reply.report)
        found = psutil.Process(reply.report.agent_pid).net_connections("tcp")
    except (NoAgentError, psutil.Error):
        return 0
    listening = {
        (one.laddr.ip, one.laddr.port)
        for one in found
        if one.status == psutil.CONN_LISTEN and one.laddr.port not in stores
    }
    return next(
        (
            port
            for address, port in sorted(listening)
            if (not first or first <= port <= last) and all((other, port) in listening for other in addresses)
        ),
        0,
    )


def _ports_of_stores(directory: Path, report: NodeReport) -> set[int]:
    """Return the ports that the agent holds for stores of jobs, which it does until their launchers run."""
    held = [job.job_id for job in report.jobs if job.state is JobState.PREPARED]
    shown = [ask(directory, ShowJob(job_id), ASK_S)[1] for job_id in held]
    return {reply.master_port for reply in shown if isinstance(reply, Shown)}
