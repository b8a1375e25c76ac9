"""The header of a safetensors file, written and read: pure.

A file is 8 bytes of length (little endian), that many bytes of JSON, then the tensors' bytes without holes.

Source: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes of one element."""

METADATA = "__metadata__"
"""The one name that no tensor can have."""

LENGTH_BYTES = 8
ALIGNMENT_BYTES = 64
"""Where the data begins, so that every element lies on a multiple of its size in memory too."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MAX_DIMENSIONS = 64
"""torch's own limit."""


class MalformedHeaderError(ValueError):
    """These bytes are no header, or one of another file."""


class Spec(NamedTuple):
    """A tensor without its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


class Entry(NamedTuple):
    """A tensor and where it lies, in bytes from the end of the header."""

    spec: Spec
    begin: int
    end: int


def lay_out(specs: Iterable[Spec]) -> list[Entry]:
    """Return a place for every tensor, in the order of the file: largest elements first, so that all are aligned."""
    entries, begin = [], 0
    for spec in sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]):
        entries.append(Entry(spec, begin, begin + spec.num_bytes))
        begin = entries[-1].end
    return entries


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header; the tensors' bytes follow it at once."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for spec, begin, end in entries:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def decode_length(raw: bytes, file_bytes: int) -> int:
    """Return the length of the header's JSON from the first bytes of a file of `file_bytes`.

    Raises:
        MalformedHeaderError: No header of such a file is that long.
    """
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise MalformedHeaderError(f"its header would be {length} bytes long")
    return length


def decode_header(text: bytes, data_bytes: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors in the order of the file, and the file's own texts.

    Args:
        text: The JSON, without the length before it.
        data_bytes: Bytes that follow the header.

    Raises:
        MalformedHeaderError: It is no header, or one that does not fit its file.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise MalformedHeaderError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise MalformedHeaderError("its header is no JSON object")
    metadata = header.pop(METADATA, {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise MalformedHeaderError("its header's own texts are no texts")
    entries = sorted((_entry(name, value) for name, value in header.items()), key=lambda entry: entry[1:])
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise MalformedHeaderError(f"{entry.spec.name!r} does not begin where the tensor before it ends")
        end = entry.end
    if end != data_bytes:
        raise MalformedHeaderError(f"its header speaks of {end} bytes, {data_bytes} follow")
    return entries, metadata


def _entry(name: str, value: object) -> Entry:
    match value:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)], **rest}:
            is_known = dtype in ITEM_BYTES and not rest and len(shape) <= MAX_DIMENSIONS
            if is_known and all(type(size) is int and size >= 0 for size in shape) and begin >= 0:
                spec = Spec(name, dtype, tuple(shape))
                if end - begin == spec.num_bytes:
                    return Entry(spec, begin, end)
    raise MalformedHeaderError(f"its header makes no sense at {name!r}")
