"""What all messages have in common: bounds, decoding, and the errors for bytes that are no message.

`LongText`, `JobId` and `Port` are bounded types of fields; `CONTROL_SOCKET` and its siblings are the names of an
agent's sockets.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec

from ddpcore.wire import DECODE_ERRORS

MAX_COMMAND_BYTES = 1_048_576
"""A longer line, either way, is refused before it is decoded."""


class MalformedMessageError(ValueError):
    """A peer sent bytes that are not a message of this vocabulary."""


class IncompatibleWireError(MalformedMessageError):
    """A peer speaks another version of this vocabulary."""


_Message = TypeVar("_Message")


def decode_line(decoder: msgspec.json.Decoder[_Message], line: bytes, what: str) -> _Message:
    """Return the message in a line of JSON.

    Args:
        decoder: Decoder of the messages that may come.
        line: With or without its newline.
        what: What should come, for people.

    Raises:
        MalformedMessageError: The line is too long or something else.
    """
    if len(line) > MAX_COMMAND_BYTES:
        raise MalformedMessageError(f"{what} of {len(line)} bytes, at most {MAX_COMMAND_BYTES} are taken")
    try:
        return decoder.decode(line)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not {what}: {error}") from error


LongText = Annotated[str, msgspec.Meta(max_length=4096)]


JOB_ID_PATTERN = r"^[a-z0-9][a-z0-9-]{0,63}\Z"
JobId = Annotated[str, msgspec.Meta(pattern=JOB_ID_PATTERN)]


def is_job_id(text: str) -> bool:
    """Return whether a text is fit for the name of a job, and of its directory."""
    return re.match(JOB_ID_PATTERN, text) is not None


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


PublicKey = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")]
"""CURVE key in Z85. Source: RFC 32."""


LOSS_METRIC = "loss"
STEP_METRIC = "step"
EPOCH_METRIC = "epoch"
"""Metrics read from lines that stand for what a rank has not reported itself."""


REPORTS_SOCKET = "reports.sock"
"""Socket of an agent or a relay: sends the latest reports on request, as `agent.wire.relay` describes."""


CONTROL_SOCKET = "control.sock"
"""Socket of an agent: takes commands."""
