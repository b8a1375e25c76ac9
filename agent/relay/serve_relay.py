"""The life of a relay's process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from agent.errors import AgentError, log_line
from agent.processes.parent_watch import watch_console, watch_signals
from agent.relay.relay import Relay
from agent.relay.relay_dir import RelayDir, listening_place
from agent.transport.relay_sockets import RelaySocket

if TYPE_CHECKING:
    from pathlib import Path

MAX_DATA_BYTES = 2 << 30
"""libzmq takes a message of many parts whole before anybody sees how long it is (MAXMSGSIZE is of each part): with this
limit it drops who sends one, before the machine has no memory for others."""


class RelayPlace(msgspec.Struct, frozen=True):
    """The JSON line of a relay that listens."""

    ready: bool
    dir: str
    invitation: str
    address: str
    port: int
    relay: str
    pid: int


def serve_relay(listen: str, directory: Path, num_expected: int, *, is_owned: bool) -> None:
    """Serve until a signal ends it.

    Args:
        listen: `INTERFACE_OR_ADDRESS[:PORT]`.
        directory: The relay's own.
        num_expected: How many nodes are to come; 0 where nobody knows.
        is_owned: It ends with the pipe on standard input, and not by SIGTERM, which Slurm may send to every process of
            a step: the agents' last reports still come.

    Raises:
        OperatorError: The directory or the address cannot be used.
        AgentError: A socket or a file cannot be made, now.
    """
    address, port = listening_place(listen)
    _limit(resource.RLIMIT_NOFILE, None)
    _limit(resource.RLIMIT_DATA, MAX_DATA_BYTES)
    place = RelayDir(directory)
    place.open()
    try:
        asyncio.run(_serve(place, address, port, num_expected, is_owned=is_owned))
    except OSError as error:
        raise AgentError(f"cannot relay at {address} port {port}: {error.strerror or error}") from error
    finally:
        place.close()


async def _serve(place: RelayDir, address: str, port: int, num_expected: int, *, is_owned: bool) -> None:
    relay_socket = RelaySocket(address, port)
    relay = Relay(place, relay_socket, address, num_expected)
    watch_signals(relay.end_soon)
    if is_owned:
        watch_console(relay.end_soon)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    await relay.run(lambda: _print_ready(place, address, relay_socket.port, relay.name))
    log_line("the relay has ended; agents dial the next one in this directory")


def _print_ready(place: RelayDir, address: str, port: int, name: str) -> None:
    place_info = RelayPlace(True, str(place.path), str(place.invitation), address, port, name, os.getpid())  # noqa: FBT003
    sys.stdout.buffer.write(msgspec.json.encode(place_info) + b"\n")
    sys.stdout.flush()


def _limit(what: int, most: int | None) -> None:
    """Set a soft limit of this process: to the hard one, or so low that it is no more than `most`."""
    _, hard = resource.getrlimit(what)
    soft = hard if most is None else most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (soft, hard))
