"""What all messages have in common: bounds, and what is raised for bytes that are none."""

from __future__ import annotations

from typing import TypeVar

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
        decoder: Of the messages that may come.
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
