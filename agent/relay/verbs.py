"""The verbs of a relay: `relay` serves, `roster` says whom it knows."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click
import msgspec

from agent.relay.relay_dir import NUM_NODES_VARIABLE, RelayDir, default_relay_directory, expected_nodes
from agent.wire.relay import MAX_NODES


def _usual_directory() -> Path:
    return default_relay_directory(os.environ, socket.gethostname())


_directory = click.option(
    "--dir",
    "directory",
    default=_usual_directory,
    show_default="$XDG_STATE_HOME/rankdeck/HOSTNAME/relay",
    type=click.Path(path_type=Path),
    help="The relay's own 0700 directory.",
)


@click.command()
@click.option(
    "--listen",
    required=True,
    metavar="INTERFACE_OR_ADDRESS[:PORT]",
    help="Where agents reach this machine; without a port, a free one. Nobody without the invitation is heard.",
)
@_directory
@click.option(
    "--expect",
    "num_expected",
    type=click.IntRange(0, MAX_NODES),
    default=lambda: expected_nodes(os.environ),
    show_default=f"${NUM_NODES_VARIABLE}",
    help="How many nodes are to come, for consoles to tell.",
)
def relay(*, listen: str, directory: Path, num_expected: int) -> None:
    """Let agents dial in from their nodes, and serve all of them to consoles here; says in one JSON line when it does.

    Agents are given the invitation that it writes: `serve --relay DIR/invitation.json`.
    """
    from agent.relay.serve_relay import serve_relay  # noqa: PLC0415 - the other verbs start without it

    serve_relay(listen, directory, num_expected)


@click.command()
@_directory
@click.option("--follow", is_flag=True, help="Carry the stream of merged reports over standard input and output.")
@click.option("--brief", "is_brief", is_flag=True, help="Leave the nodes out, but for their number.")
def roster(*, directory: Path, follow: bool, is_brief: bool) -> None:
    """Print which nodes a relay knows, when each was heard last, and what its agent says of itself."""
    from agent.relay.ask_relay import carry_merged, read_roster  # noqa: PLC0415

    path = RelayDir(directory).path
    if follow:
        carry_merged(path, sys.stdin.fileno(), sys.stdout.fileno())
        return
    sys.stdout.buffer.write(msgspec.json.encode(read_roster(path, is_brief=is_brief)) + b"\n")
    sys.stdout.flush()
