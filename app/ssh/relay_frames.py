"""Telemetry over a plain stream, as `agent relay` writes it: four bytes of length, big endian, and the frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError
from agent.wire.reports import MAX_NODE_REPORT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH_BYTES = 4


class FrameReader:
    """Takes a stream apart; chunks may be cut anywhere."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the frames that this chunk completes.

        Raises:
            MalformedMessageError: A frame longer than any report is announced: this is not a relay.
        """
        self._buffer += chunk
        while len(self._buffer) >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if length > MAX_NODE_REPORT_BYTES:
                raise MalformedMessageError(f"a frame of {length} bytes, at most {MAX_NODE_REPORT_BYTES} are taken")
            end = LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield frame
