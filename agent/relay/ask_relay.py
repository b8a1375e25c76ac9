"""What a relay on this machine says to whoever asks it once, or for as long as somebody listens."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from agent.errors import NoAgentError
from agent.transport.proxy import carry_socket
from agent.wire.codec import FrameReader, MalformedMessageError
from agent.wire.relay import (
    ASK,
    MAX_MERGED_BYTES,
    MERGED_SOCKET,
    NO_RELAY,
    Merged,
    Roster,
    RosterEntry,
    decode_merged,
    known_node,
)

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_S = 10.0
CHUNK_BYTES = 65_536


def carry_merged(directory: Path, in_fd: int, out_fd: int) -> None:
    """Carry bytes between two descriptors and a relay's stream of merged reports; see `agent.wire.relay`.

    Raises:
        NoAgentError: No relay serves in the directory.
    """
    carry_socket(directory / MERGED_SOCKET, in_fd, out_fd, has_last_word=False)


def read_roster(directory: Path, *, is_brief: bool = False) -> Roster:
    """Return which nodes a relay knows; with `is_brief` only how many.

    Raises:
        NoAgentError: No relay answers in the directory.
    """
    path = directory / MERGED_SOCKET
    nodes: dict[str, RosterEntry] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        try:
            connection.connect(str(path))
            while True:
                merged = _next_frame(connection)
                nodes.update((entry.node, entry) for entry in merged.nodes)
                if merged.is_whole:
                    break
        except OSError as error:
            raise NoAgentError(f"{NO_RELAY} at {path}: {error.strerror or error}") from error
        except MalformedMessageError as error:
            raise NoAgentError(f"what answers at {path} is no relay of this version: {error}") from error
    return Roster(
        relay=merged.relay,
        dir=str(directory),
        num_expected=merged.num_expected,
        num_here=sum(entry.is_here for entry in nodes.values()),
        nodes=[] if is_brief else [known_node(nodes[node]) for node in sorted(nodes)],
    )


def _next_frame(connection: socket.socket) -> Merged:
    reader = FrameReader(MAX_MERGED_BYTES)
    connection.sendall(ASK)
    while chunk := connection.recv(CHUNK_BYTES):
        for frame in reader.feed(chunk):
            return decode_merged(frame)  # one is asked for at a time, so nothing follows it
    raise ConnectionResetError("it has ended")
