"""A checkpoint's files as tensors in memory: read, checked, put together."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcore.checkpoint.formats import file_name
from ddpcore.checkpoint.reading import read_file, read_manifest
from ddpcore.checkpoint.state_tree import DTYPES, MalformedStateError, places, select, stored_names, unflatten
from ddpcore.errors import CheckpointContentError, CheckpointInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from torch import Tensor

    from ddpcore.checkpoint.formats import Entry, Manifest, Piece

PER_RANK = "per_rank"
"""The text in a rank's file that holds its own state, but for the tensors."""


class Contents(NamedTuple):
    """A checkpoint in memory; `per_rank` is None if the checkpoint does not hold that rank's own state."""

    manifest: Manifest
    state: Any
    per_rank: Any


def read_checkpoint(
    path: Path,
    rank: int | None = None,
    *,
    parts: Collection[str] | None = None,
    device: torch.device | str = "cpu",
) -> Contents:
    """Read a checkpoint, checking every byte of it.

    `rank` is whose own state to return too. `parts` are keys of the state to return, None for all; absent ones,
    and a state that is no dict of texts, are no error. Raises CheckpointInvalidError, and MemoryError if it does not
    fit into memory.
    """
    manifest = read_manifest(path)
    skeleton = manifest.state if parts is None else select(manifest.state, parts)
    kept = stored_names(skeleton) if parts is not None else manifest.tensors.keys()
    tensors = _make_room(manifest, kept)
    own_file = file_name(rank) if rank is not None else ""
    own_tensors: dict[str, Tensor] = {}
    own_text = None
    for name, record in manifest.files.items():
        placing = _placing(tensors, own_tensors if name == own_file else None)
        texts = read_file(path / name, record, manifest, placing)
        if name == own_file:
            own_text = texts.get(PER_RANK)
    try:
        per_rank = unflatten(json.loads(own_text), own_tensors) if own_text is not None else None
        placed = {name: tensor.to(device) for name, tensor in tensors.items()}
        return Contents(manifest, unflatten(skeleton, placed), per_rank)
    except (MalformedStateError, ValueError, RecursionError) as error:
        raise CheckpointInvalidError(str(error)) from None


def read_tensors(path: Path, wanted: Collection[str]) -> tuple[Manifest, dict[str, Tensor]]:
    """Read some tensors of a checkpoint to the CPU, checking every byte of the files that they lie in.

    `wanted` are their places in the state, keys joined by dots: "model.layers.0.weight". Raises CheckpointContentError
    if the state has no such tensor, CheckpointInvalidError, and MemoryError.
    """
    manifest = read_manifest(path)
    stored = _places(manifest.state)
    for place in wanted:
        if place not in stored:
            near = difflib.get_close_matches(place, stored, n=3)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise CheckpointContentError(f"{path.name} has no tensor {place!r}{hint}")
    names = {stored[place] for place in wanted}
    if unknown := names - manifest.tensors.keys():
        raise CheckpointInvalidError(f"its manifest lacks tensor {min(unknown)!r}")
    tensors = _make_room(manifest, names)
    files = {piece.file for name in names for piece in manifest.tensors[name].pieces}
    for name in sorted(files):
        read_file(path / name, manifest.files[name], manifest, _placing(tensors, None))
    return manifest, {place: tensors[stored[place]] for place in wanted}


def _places(skeleton: object) -> dict[str, str]:
    try:
        return places(skeleton)
    except MalformedStateError as error:
        raise CheckpointInvalidError(str(error)) from None


def _make_room(manifest: Manifest, names: Collection[str]) -> dict[str, Tensor]:
    try:
        return {
            name: torch.empty(record.shape, dtype=DTYPES[record.dtype])
            for name, record in manifest.tensors.items()
            if name in names
        }
    except RuntimeError as error:
        # torch's word for it; what the tensors are has been checked.
        num_bytes = sum(record.bytes for record in manifest.files.values())
        raise MemoryError(f"there is no memory for its {num_bytes} bytes") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def size_in_bytes(tensors: Sequence[Tensor]) -> int:
    """Return what tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _placing(
    tensors: dict[str, Tensor], own_tensors: dict[str, Tensor] | None
) -> Callable[[Entry, Piece | None], memoryview | None]:
    def place(entry: Entry, piece: Piece | None) -> memoryview | None:
        if piece is not None:
            tensor = tensors.get(piece.name)
            if tensor is None:
                return None
            return bytes_of(tensor[piece.begin : piece.end] if tensor.dim() else tensor)
        if own_tensors is None:
            return None
        own_tensors[entry.spec.name] = torch.empty(entry.spec.shape, dtype=DTYPES[entry.spec.dtype])
        return bytes_of(own_tensors[entry.spec.name])

    return place
