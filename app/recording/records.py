"""The records of a recording: what a console received, in order, and when.

A file is a gzip stream of records, each behind its length in four bytes, the opening first. What was cut short by a
crash is read up to where it ends. Frames of telemetry are kept as they came: what decodes them then decodes them again.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Annotated

import msgspec

from agent.wire.codec import LongText  # noqa: TC001 - msgspec looks at it
from agent.wire.logs import LogLine  # noqa: TC001 - as above
from agent.wire.reports import MAX_NODE_REPORT_BYTES, READABLE_VERSIONS
from agent.wire.stacks import Stacks  # noqa: TC001 - as above
from app.text import clean
from ddpcore.wire import DECODE_ERRORS, Name, Seconds, Word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FORMAT_VERSION = 1
MAX_RECORDING_BYTES = 256 * 2**20
"""Bytes read, unpacked: a larger file is not read further. Nor is one of more records or lines, or of a longer time."""
MAX_RECORDS = 500_000
MAX_LINES = 500_000
MAX_LENGTH_S = 86_400.0
MAX_NODES = 16_384
MAX_RECORD_BYTES = 2 * MAX_NODE_REPORT_BYTES
_PIECE_BYTES = 2**20
_LENGTH = struct.Struct("<I")
_OTHER_BYTES = 512
"""Bytes of a record beside its content, roughly."""


class MalformedRecordingError(ValueError):
    """These bytes are no recording, or one of another version."""


class Opening(msgspec.Struct, frozen=True, tag="opening", omit_defaults=True):
    """What a recording is of; its first record."""

    format_version: int
    wire_version: int
    """Version of the frames."""
    rankdeck_version: Word
    made_at: Word
    """When it ends, in UTC: `2026-11-21T03:12:45Z`; when it begins, where `is_live`."""
    nodes: Annotated[list[Name], msgspec.Meta(max_length=MAX_NODES)]
    job_id: Name = ""
    why: LongText = ""
    """Why it was kept."""
    is_live: bool = False
    """Whether it was written as reports came, before its end was known."""


class ReportRecord(msgspec.Struct, frozen=True, tag="report"):
    """A node's report."""

    at_s: Seconds
    """Seconds since the recording's begin, as in the records below."""
    node: Name
    frame: bytes


class LinesRecord(msgspec.Struct, frozen=True, tag="lines"):
    """Lines that ranks of a node printed; what looks like a secret is masked."""

    at_s: Seconds
    node: Name
    lines: list[LogLine]


class StacksRecord(msgspec.Struct, frozen=True, tag="stacks"):
    """The stacks of a node's ranks, or why there are none."""

    at_s: Seconds
    node: Name
    stacks: Stacks | None
    trouble: LongText = ""


class NoticeRecord(msgspec.Struct, frozen=True, tag="notice"):
    """A sentence about the session."""

    at_s: Seconds
    text: Annotated[str, msgspec.Meta(max_length=8192)]


Record = ReportRecord | LinesRecord | StacksRecord | NoticeRecord


def size_bytes(record: Record) -> int:
    """Return roughly the bytes of a record in memory; stacks, which are taken on request, are not measured."""
    match record:
        case ReportRecord(frame=frame):
            return _OTHER_BYTES + len(frame)
        case LinesRecord(lines=lines):
            return _OTHER_BYTES + _OTHER_BYTES * len(lines) + sum([len(line.text) for line in lines])
    return _OTHER_BYTES


_encoder = msgspec.msgpack.Encoder()
_opening_decoder = msgspec.msgpack.Decoder(Opening)
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class Recording(msgspec.Struct, frozen=True):
    """A whole file."""

    opening: Opening
    records: list[Record]
    """Records in the order of `at_s`."""
    is_cut: bool
    """Whether it ends in the middle of a record, or goes on with something that is none."""

    @property
    def length_s(self) -> float:
        """Seconds from the begin to the last record."""
        return self.records[-1].at_s if self.records else 0.0


class RecordPacker:
    """Makes the content of a file, a piece at a time.

    Attributes:
        num_bytes: Number of bytes packed so far, before packing.
    """

    def __init__(self) -> None:
        self._packer = zlib.compressobj(level=6, wbits=31)
        self.num_bytes = 0

    def pack(self, record: Opening | Record) -> bytes:
        """Return what comes next in the file, often nothing yet; the opening comes first."""
        body = _encoder.encode(record)
        self.num_bytes += _LENGTH.size + len(body)
        return self._packer.compress(_LENGTH.pack(len(body)) + body)

    def settle(self) -> bytes:
        """Return what makes all records so far readable, whatever becomes of the file."""
        return self._packer.flush(zlib.Z_SYNC_FLUSH)

    def finish(self) -> bytes:
        """Return the end of the file."""
        return self._packer.flush()


def encode_recording(opening: Opening, records: Iterable[Record]) -> bytes:
    """Return the content of a file."""
    packer = RecordPacker()
    parts = [packer.pack(opening), *(packer.pack(record) for record in records)]
    return b"".join((*parts, packer.finish()))


def decode_recording(content: bytes) -> Recording:
    """Return what a file holds, as far as it goes.

    Args:
        content: The file; hostile until it is decoded.

    Raises:
        MalformedRecordingError: It does not begin as a recording does, or is of another version.
    """
    pieces = _Pieces(content)
    try:
        opening = _opening_decoder.decode(next(pieces, b""))
    except DECODE_ERRORS:
        raise MalformedRecordingError("it is not a recording") from None
    if opening.format_version != FORMAT_VERSION or opening.wire_version not in READABLE_VERSIONS:
        made_by = f"rankdeck {clean(opening.rankdeck_version, 32)}"
        raise MalformedRecordingError(f"it was made by {made_by}, whose records this one does not understand")
    records: list[Record] = []
    is_cut, at_s, num_lines = False, 0.0, 0
    while (piece := next(pieces, None)) is not None:
        try:
            record = _decoder.decode(piece)
        except DECODE_ERRORS:
            is_cut = True
            break
        num_lines += len(record.lines) if isinstance(record, LinesRecord) else 0
        if record.at_s > MAX_LENGTH_S or len(records) == MAX_RECORDS or num_lines > MAX_LINES:
            is_cut = True
            break
        # A clock that went back would make a player wait for ever.
        at_s = max(at_s, record.at_s)
        records.append(record if record.at_s == at_s else msgspec.structs.replace(record, at_s=at_s))
    return Recording(opening, records, is_cut or pieces.is_cut)


class _Pieces:
    """Iterates over the records of a file, unpacking no more than is asked for."""

    def __init__(self, content: bytes) -> None:
        self._packed = memoryview(content)
        self._unpacker = zlib.decompressobj(wbits=31)
        self._unpacked = bytearray()
        self._num_unpacked = 0
        self.is_cut = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        head = self._take(_LENGTH.size)
        if head is None:
            raise StopIteration
        (size,) = _LENGTH.unpack(head)
        body = self._take(size) if size <= MAX_RECORD_BYTES else None
        if body is None:
            self.is_cut = True
            raise StopIteration
        return body

    def _take(self, size: int) -> bytes | None:
        while len(self._unpacked) < size and self._unpack():
            pass
        if len(self._unpacked) < size:
            self.is_cut = self.is_cut or bool(self._unpacked) or not self._unpacker.eof
            return None
        taken = bytes(self._unpacked[:size])
        del self._unpacked[:size]
        return taken

    def _unpack(self) -> bool:
        """Unpack a piece more; return whether there was one."""
        if self._unpacker.eof or self._num_unpacked > MAX_RECORDING_BYTES:
            return False
        packed = self._unpacker.unconsumed_tail
        if not packed:
            packed, self._packed = bytes(self._packed[:_PIECE_BYTES]), self._packed[_PIECE_BYTES:]
        try:
            unpacked = self._unpacker.decompress(packed, _PIECE_BYTES)
        except zlib.error:
            self.is_cut = True
            self._packed = memoryview(b"")
            return False
        self._num_unpacked += len(unpacked)
        self._unpacked += unpacked
        return bool(unpacked or packed)
