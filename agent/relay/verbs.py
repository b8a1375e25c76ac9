"""The verbs of a relay: `relay` serves, `roster` prints whom it knows."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import click
import msgspec

from agent.errors import NoAgentError
from agent.relay.relay_dir import NUM_NODES_VARIABLE, RelayDir, default_relay_directory, expected_nodes
from agent.wire.codec import REPORTS_SOCKET, MalformedMessageError
from agent.wire.relay import MAX_NODES, NO_RELAY, Roster, RosterEntry, decode_merged, known_node

ANSWER_S = 10.0


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
    help="Where agents reach this machine; without a port, a free one. Nobody without the invitation is let in.",
)
@_directory
@click.option(
    "--expect",
    "num_expected",
    type=click.IntRange(0, MAX_NODES),
    default=lambda: expected_nodes(os.environ),
    show_default=f"${NUM_NODES_VARIABLE}",
    help="How many nodes are to come, for consoles to show.",
)
@click.option("--until-stdin-ends", "is_owned", is_flag=True, help="End with the pipe on standard input.")
def relay(*, listen: str, directory: Path, num_expected: int, is_owned: bool) -> None:
    """Let agents dial in from their nodes, and serve all of them to consoles here; prints one JSON line once it does.

    Agents are given the invitation that it writes: `serve --relay DIR/invitation.json`.
    """
    from agent.relay.serve_relay import serve_relay  # noqa: PLC0415 - the other verbs start without it

    serve_relay(listen, directory, num_expected, is_owned=is_owned)


@click.command()
@_directory
@click.option("--brief", "is_brief", is_flag=True, help="Leave the nodes out, but for their number.")
def roster(*, directory: Path, is_brief: bool) -> None:
    """Print which nodes a relay knows, when each last sent something, and its agent's own facts."""
    roster = _read_roster(RelayDir(directory).path, is_brief=is_brief)
    sys.stdout.buffer.write(msgspec.json.encode(roster) + b"\n")
    sys.stdout.flush()


def _read_roster(directory: Path, *, is_brief: bool = False) -> Roster:
    """Return which nodes a relay knows; with `is_brief` only how many.

    Raises:
        NoAgentError: No relay answers in the directory.
    """
    from agent.transport.report_sockets import ask_reports  # noqa: PLC0415 - who asks for help does not pay for it

    path = directory / REPORTS_SOCKET
    nodes: dict[str, RosterEntry] = {}
    relay, num_expected = "", 0
    try:
        for frame in ask_reports(path, ANSWER_S):
            merged = decode_merged(frame)
            nodes.update((entry.node, entry) for entry in merged.nodes)
            relay, num_expected = merged.relay, merged.num_expected
            if merged.is_whole:
                break
    except OSError as error:
        raise NoAgentError(f"{NO_RELAY} at {path}: {error.strerror or error}") from error
    except MalformedMessageError as error:
        raise NoAgentError(f"what answers at {path} is no relay of this version: {error}") from error
    return Roster(
        relay=relay,
        dir=str(directory),
        num_expected=num_expected,
        num_here=sum(entry.is_here for entry in nodes.values()),
        nodes=[] if is_brief else [known_node(nodes[node]) for node in sorted(nodes)],
    )
