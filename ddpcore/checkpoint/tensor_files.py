"""A checkpoint's files as tensors in memory: read, checked, put together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ddpcore.checkpoint.manifest import file_name
from ddpcore.checkpoint.reading import read_file, read_manifest
from ddpcore.checkpoint.state_tree import DTYPES, MalformedStateError, unflatten
from ddpcore.errors import CheckpointInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from ddpcore.checkpoint.assignment import Piece
    from ddpcore.checkpoint.manifest import Manifest
    from ddpcore.checkpoint.safetensors_header import Entry

PER_RANK = "per_rank"
"""The text in a rank's file that holds its own state, but for the tensors."""


class Contents(NamedTuple):
    """A checkpoint in memory.

    Attributes:
        manifest: What it consists of.
        state: As it was saved, on the CPU.
        per_rank: That of the asked rank; None if the checkpoint does not hold it.
    """

    manifest: Manifest
    state: Any
    per_rank: Any


def read_checkpoint(path: Path, rank: int | None = None) -> Contents:
    """Read a checkpoint, checking every byte of it.

    Args:
        path: Its directory.
        rank: Whose own state to return too; None for nobody's.

    Raises:
        CheckpointInvalidError: What is wrong with it. Nothing has been kept of it then.
        MemoryError: It does not fit into memory.
    """
    manifest = read_manifest(path)
    try:
        tensors = {
            name: torch.empty(record.shape, dtype=DTYPES[record.dtype]) for name, record in manifest.tensors.items()
        }
    except RuntimeError as error:
        # torch's word for it; what the tensors are has been checked.
        num_bytes = sum(record.bytes for record in manifest.files.values())
        raise MemoryError(f"there is no memory for its {num_bytes} bytes") from error
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
        return Contents(manifest, unflatten(manifest.state, tensors), per_rank)
    except (MalformedStateError, ValueError, RecursionError) as error:
        raise CheckpointInvalidError(str(error)) from None


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
            tensor = tensors[piece.name]
            return bytes_of(tensor[piece.begin : piece.end] if tensor.dim() else tensor)
        if own_tensors is None:
            return None
        own_tensors[entry.spec.name] = torch.empty(entry.spec.shape, dtype=DTYPES[entry.spec.dtype])
        return bytes_of(own_tensors[entry.spec.name])

    return place
