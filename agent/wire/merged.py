"""What a relay says to a console: the newest report of every node, many in one frame, and which nodes there are.

An agent says the same of itself alone.

A console asks for each frame with one byte (`ASK`) and gets what has changed since the one before; a frame comes once
there is something. So nothing waits for a console that is slow, and how old a report is stays true however long a frame
has been under way: no older than the frame says plus the time since it was asked for, less the time that it was held.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from agent.wire.codec import IncompatibleWireError, MalformedMessageError
from agent.wire.fan_in import MAX_NODES, MAX_PLACE_BYTES, RELAY_VERSION, NodeName
from agent.wire.fields import LongText
from agent.wire.reports import MAX_NODE_REPORT_BYTES
from ddpcore.wire import DECODE_ERRORS, Count

MERGED_SOCKET = "merged.sock"
"""Of a relay, in its 0700 directory."""
NO_RELAY = "no relay answers"
"""What `agent roster` says where none does."""
NODES_DIR = "nodes"
"""There: a directory for each node, with the command socket of its agent."""
ASK = b"?"
MAX_ASKED = 8
"""Frames that a console may have asked for and not yet got."""
MERGED_BYTES = 262_144
"""A frame is cut once it is so long; a single report may be longer."""
MAX_MERGED_BYTES = MERGED_BYTES + MAX_NODE_REPORT_BYTES + MAX_PLACE_BYTES + 8192


class RosterEntry(msgspec.Struct, frozen=True):
    """A node that the relay knows, or has known."""

    node: NodeName
    is_here: bool
    why: LongText = ""
    """It is not."""
    heard_ms: Count = 0
    """Ago."""
    place: Annotated[bytes, msgspec.Meta(max_length=MAX_PLACE_BYTES)] = b""
    """The JSON line of `agent.service.whereabouts`."""
    has_ended: bool = False
    """It is not here since its agent has ended, and has said so."""


class MergedReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The newest report of a node."""

    node: NodeName
    age_ms: Count
    """When this frame was made."""
    frame: Annotated[bytes, msgspec.Meta(max_length=MAX_NODE_REPORT_BYTES)]


class Merged(msgspec.Struct, frozen=True):
    """What has changed since the last frame of this console."""

    relay: str
    """Of the relay's process, or the agent's."""
    held_ms: Count
    """Between the question and this frame."""
    num_expected: Count = 0
    """How many nodes there are to be; 0 where nobody has said."""
    is_whole: bool = False
    """Every node that the relay knows has been told of by now."""
    nodes: Annotated[list[RosterEntry], msgspec.Meta(max_length=MAX_NODES)] = []
    reports: Annotated[list[MergedReport], msgspec.Meta(max_length=MAX_NODES)] = []
    version: int = RELAY_VERSION


class KnownNode(msgspec.Struct, frozen=True):
    """A node in `Roster`: a `RosterEntry` for people and scripts."""

    node: NodeName
    is_here: bool
    why: LongText
    heard_s: float
    """Ago."""
    place: dict[str, object]
    """As `agent where` prints it on that node."""
    has_ended: bool = False


class Roster(msgspec.Struct, frozen=True):
    """The JSON line of `agent roster`."""

    relay: str
    dir: str
    num_expected: int
    num_here: int
    """Nodes that are there."""
    nodes: Annotated[list[KnownNode], msgspec.Meta(max_length=MAX_NODES)]
    version: int = RELAY_VERSION


def known_node(entry: RosterEntry) -> KnownNode:
    """Return an entry as a roster has it.

    Raises:
        MalformedMessageError: Its place is no JSON object.
    """
    try:
        place = msgspec.json.decode(entry.place, type=dict[str, object])
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not the place of an agent: {error}") from error
    return KnownNode(entry.node, entry.is_here, entry.why, entry.heard_ms / 1000, place, entry.has_ended)


_roster = msgspec.json.Decoder(Roster)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Merged)


def decode_roster(line: bytes) -> Roster:
    """Return the roster in a line.

    Raises:
        IncompatibleWireError: It is of another version.
        MalformedMessageError: It is none.
    """
    try:
        roster = _roster.decode(line)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not the roster of a relay: {error}") from error
    _check(roster.version)
    return roster


def encode_merged(merged: Merged) -> bytes:
    """Return one frame."""
    return _encoder.encode(merged)


def decode_merged(frame: bytes) -> Merged:
    """Return what a relay says.

    Raises:
        IncompatibleWireError: It is of another version.
        MalformedMessageError: The bytes are too many or something else.
    """
    if len(frame) > MAX_MERGED_BYTES:
        raise MalformedMessageError(f"a frame of {len(frame)} bytes, at most {MAX_MERGED_BYTES} are taken")
    try:
        merged = _decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a frame of a relay: {error}") from error
    _check(merged.version)
    return merged


def _check(version: int) -> None:
    if version != RELAY_VERSION:
        raise IncompatibleWireError(f"its reports are of version {version}, this console takes {RELAY_VERSION}")
