"""The messages of a relay: to and from agents, and the merged reports for consoles.

Agents and a relay exchange one msgpack frame a message (`Hello` to `Reset`), over a ZeroMQ socket that CURVE guards.
The agent dials. A report goes only where the relay asks for one (`Take`), so that one at most is under way, whatever
stands still; bytes of a command stream go only as far as the other end has given credit for.

Consoles get reports from a ROUTER socket (`REPORTS_SOCKET`): of a relay the latest report of every node, many in one
frame, and which nodes there are (`Merged`); of an agent its own. A connection begins with an empty message of the
console (ZMQ_PROBE_ROUTER), which is answered by a frame without reports. After each frame the console asks for the
next one (`encode_ask`), which comes once something has changed and holds only that. So one frame at most is under way
to a console: a slow link makes reports rarer, never older than shown. A report is no older than its own age plus the
time since its frame was asked for, less the time that the request was held.

`pack` and `unpack` are for reports of one node in a row: they resemble each other, so that a tenth of their bytes is
left.

Source: RFC 1950, the format.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from agent.wire.codec import IncompatibleWireError, LongText, MalformedMessageError
from agent.wire.reports import MAX_NODE_REPORT_BYTES
from ddpcore.wire import DECODE_ERRORS, Count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RELAY_VERSION = 2
"""Version of this vocabulary."""
MAX_NODES = 4096
MAX_CHUNK_BYTES = 16_384
MAX_PLACE_BYTES = 16_384
MAX_RELAY_BYTES = MAX_NODE_REPORT_BYTES + 256
WINDOW_BYTES = 65_536
"""Bytes of one direction of a stream: so many may be under way, and no more are kept for a slow reader."""
SILENT_S = 8.0
"""Seconds after which a peer that has sent nothing is gone."""
HEARTBEAT_S = 2.0
"""Seconds between two signs of life, messages of this vocabulary: libzmq's own heartbeats (ZMQ_HEARTBEAT_IVL) abort a
process that reads too slowly. Source: https://github.com/zeromq/libzmq/issues/3937."""

NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
"""Name of a node, also that of its directory at the relay."""
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""Sums of some, and of any uptime, are still a `Count`."""
StreamId = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """An agent: who it is; whatever was under way before is over."""

    version: Count
    node: NodeName
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Id of the agent's process: the same node twice is not the same agent."""
    place: Annotated[bytes, msgspec.Meta(max_length=MAX_PLACE_BYTES)]
    """The JSON line of `agent.service.agent_info`."""
    num_expected: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Nodes of its allocation; 0 where it knows of none."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report", gc=False):
    """An agent: its latest report, since one was requested."""

    age_ms: Milliseconds
    """Milliseconds since it came from the agent."""
    held_ms: Milliseconds
    """Milliseconds since the `Take` that it answers: the rest of the time until it is there was spent on the way."""
    frame: Annotated[bytes, msgspec.Meta(max_length=MAX_NODE_REPORT_BYTES)]


class RelayHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Either: I live."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A relay: it knows the agent now."""


class NotWelcome(msgspec.Struct, frozen=True, array_like=True, tag="not_welcome"):
    """A relay: it does not take the agent."""

    why: LongText


class WhoAreYou(msgspec.Struct, frozen=True, array_like=True, tag="who"):
    """A relay: it does not know who speaks."""


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """A relay: it would take a report; a console watches."""


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """Either: it ends."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """A relay: somebody wants to speak to the agent's command socket."""

    stream: StreamId
    """Never used before by this relay."""
    who: Annotated[str, msgspec.Meta(max_length=64)]
    """Who it is, as far as the relay knows."""


class Data(msgspec.Struct, frozen=True, array_like=True, tag="data", gc=False):
    """Either: bytes of a stream."""

    stream: StreamId
    chunk: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_CHUNK_BYTES)]


class Credit(msgspec.Struct, frozen=True, array_like=True, tag="credit", gc=False):
    """Either: so many bytes of a stream have been handed on, and as many more may come."""

    stream: StreamId
    num_bytes: Annotated[int, msgspec.Meta(ge=1, le=WINDOW_BYTES)]


class End(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """Either: no more bytes of a stream will come this way."""

    stream: StreamId


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Either: a stream is over, both ways."""

    stream: StreamId


OfStream = Data | Credit | End | Reset
FromNode = Hello | Report | RelayHeartbeat | Farewell | Data | Credit | End | Reset
FromRelay = Welcome | NotWelcome | WhoAreYou | Take | RelayHeartbeat | Farewell | Open | Data | Credit | End | Reset

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_from_relay: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)
_Message = TypeVar("_Message")


def encode_relay_message(message: FromNode | FromRelay) -> bytes:
    """Return one frame."""
    return _encoder.encode(message)


def decode_from_node(frame: bytes) -> FromNode:
    """Return a message of an agent.

    Raises:
        MalformedMessageError: The bytes are too many or something else.
    """
    return _decoded(_from_node, frame)


def decode_from_relay(frame: bytes) -> FromRelay:
    """Return a message of a relay; raises as `decode_from_node` does."""
    return _decoded(_from_relay, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    if len(frame) > MAX_RELAY_BYTES:
        raise MalformedMessageError(f"a message of {len(frame)} bytes, at most {MAX_RELAY_BYTES} are taken")
    try:
        return decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message between agent and relay: {error}") from error


NO_RELAY = "no relay answers"
"""Message of `agent roster` where none answers."""
INVITATION_FILE = "invitation.json"
"""Name of the file in a relay's directory by which agents find it."""
NODES_DIR = "nodes"
"""Directory of the relay's with one for each node, with the command socket of its agent."""
MERGED_BYTES = 262_144
"""A frame is cut once it is so long; a single report may be longer."""
MAX_MERGED_BYTES = MERGED_BYTES + MAX_NODE_REPORT_BYTES + MAX_PLACE_BYTES + 8192


class RosterEntry(msgspec.Struct, frozen=True):
    """A node that the relay knows, or has known."""

    node: NodeName
    is_here: bool
    why: LongText = ""
    """Reason why it is not here."""
    silent_ms: Count = msgspec.field(default=0, name="heard_ms")
    """Milliseconds since its last message."""
    place: Annotated[bytes, msgspec.Meta(max_length=MAX_PLACE_BYTES)] = b""
    """The JSON line of `agent.service.agent_info`."""
    has_ended: bool = False
    """Whether it is not here since its agent has ended, and has reported that."""


class MergedReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The latest report of a node."""

    node: NodeName
    age_ms: Count
    """Age when this frame was made."""
    frame: Annotated[bytes, msgspec.Meta(max_length=MAX_NODE_REPORT_BYTES)]


class Merged(msgspec.Struct, frozen=True):
    """What has changed since the last frame of this console."""

    relay: str
    """Random name of the relay's process, or the agent's."""
    held_ms: Count
    """Milliseconds between the request and this frame."""
    num_expected: Count = 0
    """Number of nodes that there are to be; 0 where nobody has announced it."""
    is_whole: bool = False
    """Whether every node that the relay knows has been sent by now."""
    nodes: Annotated[list[RosterEntry], msgspec.Meta(max_length=MAX_NODES)] = []
    reports: Annotated[list[MergedReport], msgspec.Meta(max_length=MAX_NODES)] = []
    asked: Count = 0
    """The number of the request; 0 of the frame that begins a connection."""
    version: int = RELAY_VERSION


class KnownNode(msgspec.Struct, frozen=True):
    """A node in `Roster`: a `RosterEntry` for people and scripts."""

    node: NodeName
    is_here: bool
    why: LongText
    silent_s: float = msgspec.field(name="heard_s")
    """Seconds since its last message."""
    place: dict[str, object]
    """Facts that `agent where` prints on that node."""
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
    return KnownNode(entry.node, entry.is_here, entry.why, entry.silent_ms / 1000, place, entry.has_ended)


_roster = msgspec.json.Decoder(Roster)
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


MAX_FRAMES_ASKED = 8
MAX_REPLY_BYTES = (MAX_FRAMES_ASKED + 1) * MAX_MERGED_BYTES
"""Bytes for one request, with the frame that begins a connection. MAXMSGSIZE is of each part of a message: libzmq keeps
all parts of one before anybody sees how long it is."""
_REQUEST = struct.Struct(">QB")


REQUEST_PREFIX = bytes([0, _REQUEST.size])
"""How ZMTP frames a request: flags and length. The answer to a host's PING, which libzmq sends by itself, has other
flags. Source: RFC 23."""


def encode_request(number: int, num_frames: int) -> bytes:
    """Return a request for the next frames; `number` is greater than that of the request before."""
    return _REQUEST.pack(number, num_frames)


def decode_request(message: bytes) -> tuple[int, int]:
    """Return the number of a request and how many frames it wants; (0, 0) if it is none."""
    if len(message) != _REQUEST.size:
        return 0, 0
    number, num_frames = _REQUEST.unpack(message)
    return number, min(num_frames, MAX_FRAMES_ASKED)


def encode_merged(merged: Merged) -> bytes:
    """Return one frame."""
    return _encoder.encode(merged)


def decode_merged(frame: bytes) -> Merged:
    """Return a frame of a relay.

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


MAX_UNPACKED_BYTES = 500_000
"""Bytes of the reports in one reply together; a single larger one comes alone."""
MAX_REPORT_BYTES = 200_000
"""A larger report is not kept by its node: even alone it would not fit into a reply."""
_LEVEL = 1
"""Half of the time of the usual one, for three halves of its bytes."""


def pack(frames: Sequence[bytes]) -> bytes:
    """Return frames as one piece; their sizes travel beside it."""
    return zlib.compress(b"".join(frames), _LEVEL)


def unpack(packed: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield the frames of a piece, each unpacked when it is wanted.

    Raises:
        MalformedMessageError: It holds something else, or too much.
    """
    if sum(sizes) > MAX_UNPACKED_BYTES + MAX_REPORT_BYTES:
        raise MalformedMessageError(f"reports of {sum(sizes)} bytes in one reply")
    unpacker, left = zlib.decompressobj(), packed
    for size in sizes:
        frame = b""
        while len(frame) < size:
            try:
                piece = unpacker.decompress(left, size - len(frame))
            except zlib.error as error:
                raise MalformedMessageError(f"not packed reports: {error}") from error
            left = unpacker.unconsumed_tail
            if not piece and not left:
                raise MalformedMessageError(f"a packed report ends after {len(frame)} of {size} bytes")
            frame += piece
        yield frame
