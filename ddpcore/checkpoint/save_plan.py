"""One rank's share of a save: what goes where in its snapshot, and the manifest that the leader adds to it."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import torch

from ddpcore.checkpoint.formats import (
    CHECKSUM,
    MANIFEST_FORMAT,
    Manifest,
    Piece,
    assign,
    encode_body,
    encode_header,
    file_name,
    lay_out,
    piece_shape,
    tensor_records,
)
from ddpcore.checkpoint.restoring import holders, is_sharded
from ddpcore.checkpoint.state_tree import FlatState, flatten, spec_of
from ddpcore.checkpoint.tensor_files import PER_RANK
from ddpcore.errors import StateNotStorableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ddpcore.checkpoint.meeting import Site


class FileContent(NamedTuple):
    """Content of a rank's file: its header, then each tensor or some of its rows with its offset in the file."""

    header: bytes
    items: list[tuple[int, Tensor]]
    num_bytes: int

    def cuda_device(self) -> torch.device | None:
        """Return a CUDA device that tensors come from, if any does."""
        return next((tensor.device for _, tensor in self.items if tensor.is_cuda), None)


class SavePlan:
    """A state taken apart, on every rank in the same way.

    `state` has one structure on all ranks, `per_rank` is this rank's own or None, `site` are the ranks that write one
    copy together. `digest` is the same on ranks whose states have one structure. Raises StateNotStorableError if
    something in the state cannot be stored.
    """

    def __init__(self, state: object, per_rank: object, site: Site) -> None:
        self.flat = flatten(state)
        self.digest = hashlib.blake2b(json.dumps(self.flat.listing).encode(), digest_size=16).hexdigest()
        self._own = flatten(per_rank, PER_RANK, self.flat.tensors)
        for name, tensor in self._own.tensors.items():
            if is_sharded(tensor):
                raise StateNotStorableError(f"{name} is sharded over ranks: it belongs into the state of all", name)
        self._site = site
        self._specs = self.flat.specs()
        self._shares = _assign(self.flat, site.ranks)

    def content(self) -> FileContent:
        tensors = _pieces(self.flat, self._shares[self._site.position])
        tensors |= self._own.tensors
        texts = {"format": "pt"}
        if self._own.skeleton is not None:
            texts[PER_RANK] = json.dumps(self._own.skeleton, separators=(",", ":"), allow_nan=False)
        entries = lay_out(spec_of(name, tensor) for name, tensor in tensors.items())
        header = encode_header(entries, texts)
        items = [(len(header) + entry.begin, tensors[entry.spec.name]) for entry in entries]
        return FileContent(header, items, len(header) + (entries[-1].end if entries else 0))

    def manifest_body(
        self,
        step: int,
        sequence: int,
        checkpoint_id: str,
        world_size: int,
        metrics: Mapping[str, float],
        since: int = 0,
    ) -> bytes:
        """Return the manifest of this site's copy, but for its files."""
        shares = dict(zip(self._site.ranks, self._shares, strict=True))
        return encode_body(
            Manifest(
                files={},
                format=MANIFEST_FORMAT,
                checksum=CHECKSUM,
                step=step,
                sequence=sequence,
                id=checkpoint_id,
                world_size=world_size,
                ranks=self._site.ranks,
                torch=torch.__version__,
                saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
                tensors=tensor_records(self._specs, shares),
                state=self.flat.skeleton,
                metrics=dict(metrics),
                since=since,
            )
        )

    def file_names(self) -> list[str]:
        return [file_name(rank) for rank in self._site.ranks]


def _assign(flat: FlatState, ranks: Sequence[int]) -> list[list[Piece]]:
    """Return the pieces of each of the ranks: what all hold is dealt out, what is sharded is written where it lies."""
    sharded = {name: tensor for name, tensor in flat.tensors.items() if is_sharded(tensor)}
    shares = assign([spec for spec in flat.specs() if spec.name not in sharded], len(ranks))
    position = {rank: number for number, rank in enumerate(ranks)}
    for name, tensor in sharded.items():
        found = holders(tensor, ranks)
        if found is None:
            raise StateNotStorableError(
                f"{name} has rows on ranks that do not share this directory: save into one that all nodes share", name
            )
        for rank, begin, end in found:
            shares[position[rank]].append(Piece(name, begin, end))
    return shares


def _pieces(flat: FlatState, content: list[Piece]) -> dict[str, Tensor]:
    found = {}
    for name, begin, end in content:
        tensor = flat.tensors[name]
        if is_sharded(tensor):
            found[name] = tensor.to_local()
            continue
        is_whole = piece_shape(tensor.shape, begin, end) == tuple(tensor.shape)
        found[name] = tensor if is_whole else tensor[begin:end]
    return found
