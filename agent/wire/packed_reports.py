"""Reports of one node in a row, packed: they resemble each other, so that a tenth of their bytes is left.

Source: RFC 1950, the format.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from agent.wire.codec import MalformedMessageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_UNPACKED_BYTES = 500_000
"""Of the reports in one reply together; a single larger one comes alone."""
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
