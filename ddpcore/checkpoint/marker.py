"""The commit marker of a checkpoint, the file COMMITTED: written last, read first. Pure.

    rankdeck-commit/2 89abcdef 5120 7 1f2e3d4c.7 step_00000100 01234567

These are the format, the manifest's checksum and size, the checkpoint's sequence number and id, the name of its
directory, and a checksum of all that stands before. Markers of earlier versions have only the four in the middle: such
a checkpoint is used if its directory, its marker and its manifest agree.
"""

from __future__ import annotations

import re
import zlib
from typing import NamedTuple

COMMITTED = "COMMITTED"
FORMAT = "rankdeck-commit/2"
MAX_MARKER_BYTES = 512

_OLD = re.compile(rb"([0-9a-f]{8}) ([0-9]{1,18}) ([0-9]{1,18}) ([A-Za-z0-9_.:-]{1,128})\n")
_NEW = re.compile(
    FORMAT.encode() + rb" ([0-9a-f]{8}) ([0-9]{1,18}) ([0-9]{1,18}) ([A-Za-z0-9_.:-]{1,128}) (step_[0-9.]{8,29})"
    rb" ([0-9a-f]{8})\n"
)


class MalformedMarkerError(ValueError):
    """These bytes are no commit marker."""


class Marker(NamedTuple):
    """What a commit marker holds.

    Attributes:
        manifest_checksum: Of the manifest's bytes.
        manifest_bytes: Size of the manifest.
        sequence: As of the manifest.
        id: As of the manifest.
        name: Of the checkpoint's directory; "" in a marker of an earlier version.
    """

    manifest_checksum: int
    manifest_bytes: int
    sequence: int
    id: str
    name: str


def marker_tail(sequence: int, checkpoint_id: str, name: str) -> str:
    """Return the part of a marker that is known before the manifest is written; the writer adds the rest."""
    return f"{sequence} {checkpoint_id} {name}"


def decode_marker(raw: bytes) -> Marker:
    """Return what a marker holds.

    Raises:
        MalformedMarkerError: It is none, or its bytes have changed since it was written.
    """
    if found := _OLD.fullmatch(raw):
        return Marker(int(found[1], 16), int(found[2]), int(found[3]), found[4].decode(), "")
    found = _NEW.fullmatch(raw)
    if found is None:
        raise MalformedMarkerError(f"its {COMMITTED} is damaged: it is no commit marker")
    if int(found[6], 16) != zlib.crc32(raw[: found.start(6) - 1]):
        raise MalformedMarkerError(f"its {COMMITTED} is damaged: its checksum differs")
    return Marker(int(found[1], 16), int(found[2]), int(found[3]), found[4].decode(), found[5].decode())
