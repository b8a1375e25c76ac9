"""Tensors of which each rank holds some rows: torch's DTensor, as `fully_shard` makes it.

A checkpoint keeps every tensor as rows in the files of several ranks anyway, so that a sharded one needs no format of
its own: it can be loaded whole, and onto any other number of ranks. torch.distributed.checkpoint would do this too, but
keeps the plan of it as pickle.

Only sharding along the first dimension is rows. Importing DTensor takes as long as the rest of this package: nobody
does it who has none.
"""

from __future__ import annotations

import itertools
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from ddpcore.checkpoint.assignment import num_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed.tensor import DTensor

_MODULE = "torch.distributed.tensor"


class Rows(NamedTuple):
    """Rows of a tensor, and a rank that holds them."""

    rank: int
    begin: int
    end: int


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Say whether something is a DTensor: what a rank holds of it is `to_local()`."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def problem_of(tensor: DTensor) -> str:
    """Return why what ranks hold of a tensor is not rows of it, or ""."""
    for placement in tensor.placements:
        if not (placement.is_replicate() or _is_rows(placement)):
            return (
                f"is placed as {placement}: only replicated tensors and ones sharded along dimension 0 can be stored; "
                "gather it first, with full_state_dict=True of torch.distributed.checkpoint.state_dict"
            )
    return ""


def holders(tensor: DTensor, ranks: Sequence[int]) -> list[Rows] | None:
    """Return which rank is to write which rows: all of them once, in order. The same on every rank.

    Args:
        tensor: One that has no problem.
        ranks: Global ranks that may write, sorted.

    Returns:
        For each different range of rows the first of these ranks that holds it; None if some rows are with no such
        rank.
    """
    mesh = tensor.device_mesh
    cuts = tuple(_is_rows(placement) for placement in tensor.placements)
    return _holders(num_rows(tensor.shape), tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()), cuts, tuple(ranks))


@lru_cache(maxsize=256)
def _holders(
    num: int, mesh_shape: tuple[int, ...], mesh_ranks: tuple[int, ...], cuts: tuple[bool, ...], ranks: tuple[int, ...]
) -> list[Rows] | None:
    """Return what `holders` does; a model has few different numbers of rows, and a mesh may have thousands of ranks."""
    writers = frozenset(ranks)
    found: dict[tuple[int, int], int] = {}
    for rank, coordinate in zip(mesh_ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        if rank in writers:
            rows = cut_rows(num, mesh_shape, coordinate, cuts)
            found[rows] = min(rank, found.get(rows, rank))
    if not found:
        return None
    wanted = [Rows(rank, *rows) for rows, rank in sorted(found.items()) if rows[0] < rows[1]]
    ends = [0, *(rows.end for rows in wanted)]
    if ends[-1] != num or any(rows.begin != end for rows, end in zip(wanted, ends, strict=False)):
        return None
    return wanted or [Rows(min(found.values()), 0, 0)]


def cut_rows(num: int, mesh_shape: Sequence[int], coordinate: Sequence[int], cuts: Sequence[bool]) -> tuple[int, int]:
    """Return the first row at a place of a mesh and the one behind its last, where rows are cut as `torch.chunk` does.

    Args:
        num: Rows of the whole tensor.
        mesh_shape: Places along each dimension of the mesh.
        coordinate: The place.
        cuts: For each dimension of the mesh whether it cuts rows, each cutting what the one before has left.
    """
    begin, end = 0, num
    for size, number, is_cut in zip(mesh_shape, coordinate, cuts, strict=True):
        if is_cut:
            chunk = -(-(end - begin) // size)
            begin, end = min(begin + number * chunk, end), min(begin + (number + 1) * chunk, end)
    return begin, end


def as_placed(whole: Tensor, target: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, placed and sharded as another one is. Needs no other rank."""
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None, "the rank has this tensor, and so a place in its mesh"
    local = whole
    if whole.dim():
        cuts = [_is_rows(placement) for placement in target.placements]
        begin, end = cut_rows(num_rows(whole.shape), target.device_mesh.shape, coordinate, cuts)
        local = whole[begin:end]
    placed: Tensor = sys.modules[_MODULE].DTensor.from_local(
        local.to(target.device, copy=True),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )
    return placed


def _is_rows(placement: Any) -> bool:
    # A subclass, as of tensor parallelism within a shard, cuts rows in another order.
    return type(placement).__name__ == "Shard" and placement.dim == 0
