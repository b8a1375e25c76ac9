"""The file formats of a checkpoint: safetensors header, manifest and commit marker, and who writes which bytes.

Pure.

Safetensors (`lay_out`, `encode_header`, `decode_header`): a file is 8 bytes of length (little endian), that many bytes
of JSON, then the tensors' bytes without holes.

Source: https://huggingface.co/docs/safetensors/index#format

Assignment (`assign`): which rank writes which bytes of a state that all ranks hold alike, with the same answer on every
rank. Small tensors go to the first rank, all of them: replicas may differ in them (BatchNorm's running statistics do,
between two syncs), and so a checkpoint holds those of one rank, not a mixture. The others are dealt out in the order of
the state, each rank taking its part of the bytes that are left; where a part ends within a tensor, that one is cut
along its first dimension. So a rank has at most one piece of a tensor.

Manifest (`Manifest`, `encode_body`, `decode_manifest`): a strict JSON text of what a checkpoint consists of. It may
come from anywhere: everything in it is checked before anything is done with it, and no name in it can lead out of the
checkpoint's directory.

    {"files": {"rank-00000.safetensors": {"bytes": 1024, "checksum": "89abcdef"}, ...},
     "format": "rankdeck-checkpoint/1", "step": 100, "sequence": 7, ...,
     "tensors": {"model.weight": {"dtype": "F32", "shape": [4, 3], "pieces": [["rank-00000.safetensors", 0, 4]]}, ...},
     "state": ...}

`files` comes first, since the writer puts it before what the trainer has written already.

Commit marker (`Marker`, `marker_tail`, `decode_marker`): the file COMMITTED, written last, read first.

    rankdeck-commit/2 89abcdef 5120 7 1f2e3d4c.7 step_00000100 01234567

These are the format, the manifest's checksum and size, the checkpoint's sequence number and id, the name of its
directory, and a checksum of all that stands before. Markers of earlier versions have only the four in the middle: such
a checkpoint is used if its directory, its marker and its manifest agree.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
"""Boundary at which the data begins, so that every element lies on a multiple of its size in memory too."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of the format itself."""

MAX_DIMENSIONS = 64
"""Limit of torch itself."""


class MalformedHeaderError(ValueError):
    """Bytes that are no header, or one of another file."""


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
    """A tensor and its place, in bytes from the end of the header."""

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
    """Return the length and the header; the tensors' bytes follow it directly."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for spec, begin, end in entries:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def decode_length(raw: bytes, file_bytes: int) -> int:
    """Return the length of the header's JSON from a file's first bytes; raise MalformedHeaderError if it is none."""
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    if len(raw) < LENGTH_BYTES or length > min(MAX_HEADER_BYTES, file_bytes - LENGTH_BYTES):
        raise MalformedHeaderError(f"its header would be {length} bytes long")
    return length


def decode_header(text: bytes, data_bytes: int) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors in the order of the file, and the file's own texts.

    `text` is the JSON without the length before it. Raises MalformedHeaderError if it is no header, or does not fit
    `data_bytes`, the bytes behind it.
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


SMALL_BYTES = 65_536
"""Largest tensor that goes whole to the first rank, and least piece worth cutting off."""


class Piece(NamedTuple):
    """Rows of a tensor along its first dimension; a tensor without dimensions is one row."""

    name: str
    begin: int
    end: int


def num_rows(shape: Sequence[int]) -> int:
    """Return the size of the first dimension, 1 without one."""
    return shape[0] if shape else 1


def piece_shape(shape: Sequence[int], begin: int, end: int) -> tuple[int, ...]:
    """Return the shape of some rows of a tensor."""
    return (end - begin, *shape[1:]) if shape else ()


def assign(specs: Sequence[Spec], num_shares: int) -> list[list[Piece]]:
    """Return the pieces of each share, in the order of `specs`.

    No share exceeds the mean by more than the small tensors, or by a few halves of the largest row.
    """
    row_bytes = {spec.name: spec.num_bytes // max(1, num_rows(spec.shape)) for spec in specs}
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    queue: list[Piece] = []
    for spec in specs:
        pieces = shares[0] if spec.num_bytes <= SMALL_BYTES else queue
        pieces.append(Piece(spec.name, 0, num_rows(spec.shape)))
    queue.reverse()
    bytes_left = sum(spec.num_bytes for spec in specs)
    for number, part in enumerate(shares[:-1]):
        has_bytes = _sum_bytes(part, row_bytes)
        part.extend(_take(queue, row_bytes, bytes_left / (num_shares - number) - has_bytes))
        bytes_left -= _sum_bytes(part, row_bytes)
    shares[-1] += reversed(queue)
    return shares


def _take(queue: list[Piece], row_bytes: Mapping[str, int], wanted_bytes: float) -> list[Piece]:
    """Take about that many bytes off the end of the queue, in whole rows."""
    taken = []
    while queue:
        name, begin, end = queue[-1]
        fitting = max(0, min(end - begin, round(wanted_bytes / row_bytes[name])))
        if fitting * row_bytes[name] < SMALL_BYTES:
            break
        if (end - begin - fitting) * row_bytes[name] < SMALL_BYTES:
            fitting = end - begin
        taken.append(Piece(name, begin, begin + fitting))
        wanted_bytes -= fitting * row_bytes[name]
        if fitting < end - begin:
            queue[-1] = Piece(name, begin + fitting, end)
            break
        queue.pop()
    return taken


def _sum_bytes(pieces: Sequence[Piece], row_bytes: Mapping[str, int]) -> int:
    return sum(row_bytes[piece.name] * (piece.end - piece.begin) for piece in pieces)


MANIFEST_FORMAT = "rankdeck-checkpoint/1"
CHECKSUM = "crc32"
"""zlib's: 2.3 GB/s here, faster than any of these disks; crc32c is in no library that a writer without packages has."""

MAX_MANIFEST_BYTES = 256 << 20
MAX_COUNT = 1 << 62

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}\Z")]


class MalformedManifestError(ValueError):
    """A text that is no manifest, or one that contradicts itself."""


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    bytes: _Count
    checksum: _Checksum


class PieceRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Rows of a tensor, and the file that holds them under the tensor's name."""

    file: str
    begin: _Count
    end: _Count


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor and where its rows lie."""

    dtype: str
    shape: tuple[_Count, ...]
    pieces: tuple[PieceRecord, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole checkpoint."""

    files: dict[str, FileRecord]
    format: str
    checksum: str
    step: _Count
    sequence: _Count
    """Number of the checkpoint in its directory: one that continues from an earlier step still gets the highest."""
    id: _Name
    """Id that is equal on the copies that several nodes have written of one checkpoint."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    ranks: tuple[_Count, ...]
    """Ranks that have written this copy: rank r's own state is in its file."""
    torch: str
    saved_at: str
    """Wall time, for messages."""
    tensors: dict[str, TensorRecord]
    state: Any
    """All but the tensors' bytes (`state_tree`)."""
    metrics: dict[str, float] = {}
    """Metrics by the program, finite, by name; left out where there are none, for earlier versions."""
    since: _Count = 0
    """Sequence number of the first checkpoint of its training, which was a new one there; what is older does not count
    among the best. Left out of a directory's first training, for earlier versions."""


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def tensor_records(specs: Sequence[Spec], shares: Mapping[int, Sequence[Piece]]) -> dict[str, TensorRecord]:
    """Return where each tensor lies, from all tensors and each rank's pieces."""
    pieces_of: dict[str, list[PieceRecord]] = {spec.name: [] for spec in specs}
    for rank, part in shares.items():
        for piece in part:
            pieces_of[piece.name].append(PieceRecord(file_name(rank), piece.begin, piece.end))
    return {
        spec.name: TensorRecord(spec.dtype, spec.shape, tuple(sorted(pieces_of[spec.name], key=lambda one: one.begin)))
        for spec in specs
    }


def encode_body(manifest: Manifest) -> bytes:
    """Return the manifest's text but for its files, which are known only once they are written."""
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__ if name != "files"}
    if not manifest.metrics:
        del fields["metrics"]
    if manifest.since <= 1:
        del fields["since"]
    fields["tensors"] = msgspec.to_builtins(manifest.tensors)
    # Not msgspec's encoder: in the state a text may hold a lone surrogate, and an integer more than 64 bits.
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()


def decode_manifest(raw: bytes) -> Manifest:
    """Return a manifest; raise MalformedManifestError if it is none, or its parts do not fit each other."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        manifest = msgspec.convert(value, Manifest)
    except RecursionError:
        raise MalformedManifestError("its manifest is nested too deep") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise MalformedManifestError(f"its manifest makes no sense: {error}") from None
    if manifest.format != MANIFEST_FORMAT or manifest.checksum != CHECKSUM:
        raise MalformedManifestError(
            f"its format is {manifest.format!r} with {manifest.checksum!r} sums, this version reads "
            f"{MANIFEST_FORMAT!r} with {CHECKSUM!r}"
        )
    _check_files(manifest)
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest.files)
    return manifest


def specs_of_file(manifest: Manifest, file: str) -> list[tuple[Spec, Piece]]:
    """Return the pieces of the state that lie in a file, each with its tensor's name, dtype and shape."""
    return [
        (
            Spec(name, tensor.dtype, piece_shape(tensor.shape, piece.begin, piece.end)),
            Piece(name, piece.begin, piece.end),
        )
        for name, tensor in manifest.tensors.items()
        for piece in tensor.pieces
        if piece.file == file
    ]


def _check_files(manifest: Manifest) -> None:
    if list(manifest.files) != [file_name(rank) for rank in manifest.ranks] or not manifest.ranks:
        raise MalformedManifestError("its manifest names other files than its ranks have written")
    if manifest.ranks[-1] >= manifest.world_size or list(manifest.ranks) != sorted(set(manifest.ranks)):
        raise MalformedManifestError("its manifest names ranks that cannot be")


def _check_tensor(name: str, tensor: TensorRecord, files: Mapping[str, FileRecord]) -> None:
    # An empty tensor may have large dimensions beside the empty one, but not ones that overflow.
    if (
        tensor.dtype not in ITEM_BYTES
        or len(tensor.shape) > MAX_DIMENSIONS
        or math.prod(max(1, size) for size in tensor.shape) > MAX_COUNT
    ):
        raise MalformedManifestError(f"its manifest makes no sense at tensor {name!r}")
    end, holders = 0, set()
    for piece in tensor.pieces:
        if piece.begin != end or piece.end < piece.begin or piece.file not in files or piece.file in holders:
            raise MalformedManifestError(f"its manifest has tensor {name!r} in pieces that do not fit")
        end = piece.end
        holders.add(piece.file)
    if end != num_rows(tensor.shape) or not tensor.pieces:
        raise MalformedManifestError(f"its manifest has only a part of tensor {name!r}")


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


COMMITTED = "COMMITTED"
MARKER_FORMAT = "rankdeck-commit/2"
MAX_MARKER_BYTES = 512

_OLD = re.compile(rb"([0-9a-f]{8}) ([0-9]{1,18}) ([0-9]{1,18}) ([A-Za-z0-9_.:-]{1,128})\n")
_NEW = re.compile(
    MARKER_FORMAT.encode() + rb" ([0-9a-f]{8}) ([0-9]{1,18}) ([0-9]{1,18}) ([A-Za-z0-9_.:-]{1,128}) (step_[0-9.]{8,29})"
    rb" ([0-9a-f]{8})\n"
)


class MalformedMarkerError(ValueError):
    """Bytes that are no commit marker."""


class Marker(NamedTuple):
    """Content of a commit marker; `name`, that of the directory, is "" in a marker of an earlier version."""

    manifest_checksum: int
    manifest_bytes: int
    sequence: int
    id: str
    name: str


def marker_tail(sequence: int, checkpoint_id: str, name: str) -> str:
    """Return the part of a marker that is known before the manifest is written; the writer adds the rest."""
    return f"{sequence} {checkpoint_id} {name}"


def decode_marker(raw: bytes) -> Marker:
    """Return the content of a marker; raise MalformedMarkerError if it is none or its bytes have changed."""
    if found := _OLD.fullmatch(raw):
        return Marker(int(found[1], 16), int(found[2]), int(found[3]), found[4].decode(), "")
    found = _NEW.fullmatch(raw)
    if found is None:
        raise MalformedMarkerError(f"its {COMMITTED} is damaged: it is no commit marker")
    if int(found[6], 16) != zlib.crc32(raw[: found.start(6) - 1]):
        raise MalformedMarkerError(f"its {COMMITTED} is damaged: its checksum differs")
    return Marker(int(found[1], 16), int(found[2]), int(found[3]), found[4].decode(), found[5].decode())
