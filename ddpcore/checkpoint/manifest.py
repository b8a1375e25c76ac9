"""What a checkpoint consists of, as a strict JSON text: pure.

A manifest may come from anywhere: everything in it is checked before anything is done with it, and no name in it can
lead out of the checkpoint's directory.

    {"files": {"rank-00000.safetensors": {"bytes": 1024, "checksum": "89abcdef"}, ...},
     "format": "rankdeck-checkpoint/1", "step": 100, "sequence": 7, ...,
     "tensors": {"model.weight": {"dtype": "F32", "shape": [4, 3], "pieces": [["rank-00000.safetensors", 0, 4]]}, ...},
     "state": ...}

`files` comes first, since the writer puts it before what the trainer has written already.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ddpcore.checkpoint.assignment import Piece, num_rows, piece_shape
from ddpcore.checkpoint.safetensors_header import ITEM_BYTES, MAX_DIMENSIONS, Spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = "rankdeck-checkpoint/1"
CHECKSUM = "crc32"
"""zlib's: 2.3 GB/s here, faster than any of these disks; crc32c is in no library that a writer without packages has."""

MAX_MANIFEST_BYTES = 256 << 20
MAX_COUNT = 1 << 62

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Checksum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}\Z")]


class MalformedManifestError(ValueError):
    """A text is no manifest, or one that contradicts itself."""


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
    """The n-th checkpoint of its directory: going back to an earlier step and on from there makes the newest one."""
    id: _Name
    """The same for the copies that several nodes have written of one checkpoint."""
    world_size: Annotated[int, msgspec.Meta(ge=1, le=10**9)]
    ranks: tuple[_Count, ...]
    """Those that have written this copy: rank r's own state is in its file."""
    torch: str
    saved_at: str
    """Wall time, for people."""
    tensors: dict[str, TensorRecord]
    state: Any
    """Everything but the tensors' bytes (`state_tree`)."""
    metrics: dict[str, float] = {}
    """What the program has measured of it, finite, by name; left out where there is nothing, for earlier versions."""
    since: _Count = 0
    """Sequence number of the first checkpoint of its training, which began anew there; what is older does not count
    among the best. Left out of a directory's first training, for earlier versions."""


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def tensor_records(specs: Sequence[Spec], shares: Mapping[int, Sequence[Piece]]) -> dict[str, TensorRecord]:
    """Return where each tensor lies.

    Args:
        specs: All tensors.
        shares: Each rank's pieces.
    """
    pieces_of: dict[str, list[PieceRecord]] = {spec.name: [] for spec in specs}
    for rank, share in shares.items():
        for piece in share:
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
    """Return a manifest whose parts fit each other.

    Raises:
        MalformedManifestError: They do not, or this is no manifest at all.
    """
    try:
        value = json.loads(raw, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        manifest = msgspec.convert(value, Manifest)
    except RecursionError:
        raise MalformedManifestError("its manifest is nested too deep") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise MalformedManifestError(f"its manifest makes no sense: {error}") from None
    if manifest.format != FORMAT or manifest.checksum != CHECKSUM:
        raise MalformedManifestError(
            f"its format is {manifest.format!r} with {manifest.checksum!r} sums, this version reads {FORMAT!r} with "
            f"{CHECKSUM!r}"
        )
    _check_files(manifest)
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest.files)
    return manifest


def specs_of_file(manifest: Manifest, file: str) -> list[tuple[Spec, Piece]]:
    """Return the pieces of the state that lie in a file, each with what its header must say of it."""
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
