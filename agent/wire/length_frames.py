"""Frames over a plain stream: four bytes of length, big endian, and the frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH_BYTES = 4


def with_length(frame: bytes) -> bytes:
    """Return a frame as it goes over a stream."""
    return len(frame).to_bytes(LENGTH_BYTES, "big") + frame


class FrameReader:
    """Takes a stream apart; chunks may be cut anywhere."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes` is of the longest frame."""
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the frames that this chunk completes.

        Raises:
            MalformedMessageError: A longer frame than may come is announced: this is something else.
        """
        self._buffer += chunk
        while len(self._buffer) >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:LENGTH_BYTES], "big")
            if length > self._max_bytes:
                raise MalformedMessageError(f"a frame of {length} bytes, at most {self._max_bytes} are taken")
            end = LENGTH_BYTES + length
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[LENGTH_BYTES:end])
            del self._buffer[:end]
            yield frame
