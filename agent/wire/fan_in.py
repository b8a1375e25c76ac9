"""What an agent and a relay say to each other: one msgpack frame a message, over a ZeroMQ socket that CURVE guards.

The agent dials. A report goes only where the relay asks for one (`Take`), so that one at most is under way, whatever
stands still; bytes of a command stream go only as far as the other end has given credit for.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from agent.wire.codec import MalformedMessageError
from agent.wire.fields import LongText
from agent.wire.reports import MAX_NODE_REPORT_BYTES
from ddpcore.wire import DECODE_ERRORS, Count

RELAY_VERSION = 1
"""Of this vocabulary and of `agent.wire.merged`."""
MAX_NODES = 4096
MAX_CHUNK_BYTES = 16_384
MAX_PLACE_BYTES = 16_384
MAX_FAN_IN_BYTES = MAX_NODE_REPORT_BYTES + 256
WINDOW_BYTES = 65_536
"""Of one direction of a stream: so much may be under way, and no more is kept for whoever reads slowly."""
SILENT_S = 8.0
"""Whoever has said nothing for so long is gone."""
BEAT_S = 2.0

NodeName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]
"""It becomes the name of a directory of the relay."""
Milliseconds = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""Sums of some, and of any uptime, are still a `Count`."""
StreamId = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """An agent: who it is; whatever was under way before is over."""

    version: Count
    node: NodeName
    instance: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    """Of the agent's process: the same node twice is not the same agent."""
    place: Annotated[bytes, msgspec.Meta(max_length=MAX_PLACE_BYTES)]
    """The JSON line of `agent.service.whereabouts`."""
    num_expected: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    """Of how many nodes its allocation is; 0 where it knows of none."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report", gc=False):
    """An agent: its newest report, since one was wanted."""

    age_ms: Milliseconds
    """Since it came from the agent."""
    held_ms: Milliseconds
    """Since the `Take` that it answers: what is left of the time until the relay has it was spent on the way."""
    frame: Annotated[bytes, msgspec.Meta(max_length=MAX_NODE_REPORT_BYTES)]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """Either: I live."""


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """A relay: it knows the agent now."""


class NotWelcome(msgspec.Struct, frozen=True, array_like=True, tag="not_welcome"):
    """A relay: it does not take the agent."""

    why: LongText


class WhoAreYou(msgspec.Struct, frozen=True, array_like=True, tag="who"):
    """A relay: it does not know who speaks."""


class Take(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """A relay: it would take a report; somebody looks on."""


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
FromNode = Hello | Report | Beat | Farewell | Data | Credit | End | Reset
FromRelay = Welcome | NotWelcome | WhoAreYou | Take | Beat | Farewell | Open | Data | Credit | End | Reset

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_from_relay: msgspec.msgpack.Decoder[FromRelay] = msgspec.msgpack.Decoder(FromRelay)
_Message = TypeVar("_Message")


def encode_fan_in(message: FromNode | FromRelay) -> bytes:
    """Return one frame."""
    return _encoder.encode(message)


def decode_from_node(frame: bytes) -> FromNode:
    """Return what an agent says.

    Raises:
        MalformedMessageError: The bytes are too many or something else.
    """
    return _decoded(_from_node, frame)


def decode_from_relay(frame: bytes) -> FromRelay:
    """Return what a relay says; raises as `decode_from_node` does."""
    return _decoded(_from_relay, frame)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes) -> _Message:
    if len(frame) > MAX_FAN_IN_BYTES:
        raise MalformedMessageError(f"a message of {len(frame)} bytes, at most {MAX_FAN_IN_BYTES} are taken")
    try:
        return decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a message between agent and relay: {error}") from error
