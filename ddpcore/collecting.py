"""What ranks have, put together on every rank: trees of tensors and numbers, gathered or reduced.

For what is no mean over samples: areas under curves, F1, perplexity. Ranks meet at a barrier and compare what they
bring by name, type and shape: a rank that does not come, or brings something else, is named before any collective could
hang. Then all leaves travel at once, through the memory of the hosts, on a gloo group that the program does not use.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ddpcore.agreement import common_problem, difference, speakers
from ddpcore.arguments import refuse
from ddpcore.barriers.named_barriers import exchange
from ddpcore.errors import EngineUseError, MetricMismatchError, UnsplittableBatchError
from ddpcore.nested import named_leaves, with_leaves
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tree = TypeVar("Tree")

ReduceOp = Literal["sum", "mean", "min", "max"]

_C10D_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

MOST_EXACT = 1 << 53
"""Numbers that are no tensors travel as float64, in which whole ones are exact up to this."""


MOST_OF_INT64 = (1 << 63) - 1

_NO_NUMBERS = re.compile(r"torch\.(bits|u?int[1-7]$|float4)")
"""Types without arithmetic, most of them smaller than a byte."""

ALONE = "the value"
"""What errors call a leaf that is the whole tree."""


class _Leaf(NamedTuple):
    """A leaf of this rank's tree: in the host's memory, a number as float64; `number` is None for a tensor."""

    host: Tensor
    device: torch.device
    number: float | None

    @property
    def rows(self) -> Tensor:
        """What is gathered: a value without dimensions is one row."""
        return self.host if self.host.ndim else self.host.reshape(1)

    @property
    def kind(self) -> str:
        """What has to be the same on all ranks, besides the shape."""
        return "a number" if self.number is not None else str(self.host.dtype).removeprefix("torch.")


class _Brought(NamedTuple):
    """One rank's description of its tree.

    `problem` is why it cannot be collected, or "". `digest` is of what has to be the same on all ranks, `lengths` of
    dimension 0 by name. `fractions` are the names of numbers that are not whole.
    """

    problem: str
    digest: str
    lengths: dict[str, int]
    fractions: list[str]


def gather(tree: Tree, *, group: ProcessGroup | None, timeout_s: float) -> Tree:
    """Return all ranks' tensors, one behind the other; see `Engine.gather`.

    `group` is a gloo group of all ranks that nothing else uses now; None without other ranks.
    """
    leaves, problem = _leaves_of(tree)
    listing = {name or ALONE: f"{leaf.kind} of shape {_any_length(leaf.host)}" for name, leaf in leaves.items()}
    brought = _meet("engine.gather", leaves, listing, problem, timeout_s)
    names = sorted(leaves)
    rows = {name: leaves[name].rows for name in names}
    row_bytes = [rows[name].element_size() * math.prod(rows[name].shape[1:]) for name in names]
    sizes = [[one.lengths[name] * size for name, size in zip(names, row_bytes, strict=True)] for one in brought]
    vectors = _gather_bytes(torch.cat([_bytes_of(rows[name]) for name in names]), [sum(one) for one in sizes], group)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for one, vector, sizes_of_rank in zip(brought, vectors, sizes, strict=True):
        for name, part in zip(names, torch.split(vector, sizes_of_rank), strict=True):
            # A copy is aligned for its type, a part of a vector may not be.
            values = part.clone().view(rows[name].dtype)
            parts[name].append(values.reshape(one.lengths[name], *rows[name].shape[1:]))
    gathered = {name: torch.cat(parts[name]) for name in names}
    fractions = {name for one in brought for name in one.fractions}
    for name, leaf in leaves.items():
        if leaf.number is not None and name not in fractions:
            gathered[name] = gathered[name].to(torch.int64)
        gathered[name] = gathered[name].to(leaf.device)
    return with_leaves(tree, gathered)


def reduce(tree: Tree, op: ReduceOp, *, group: ProcessGroup | None, timeout_s: float) -> Tree:
    """Return the sum, mean, least or greatest of all ranks' values, element by element; see `Engine.reduce`."""
    if op not in tuple(get_args(ReduceOp)):
        raise refuse(EngineUseError, "op", op, " or ".join(f'"{one}"' for one in get_args(ReduceOp)))
    leaves, problem = _leaves_of(tree, op)
    listing = {name or ALONE: f"{leaf.kind} of shape {tuple(leaf.host.shape)}" for name, leaf in leaves.items()}
    listing["op"] = op
    brought = _meet("engine.reduce", leaves, listing, problem, timeout_s)
    reduced: dict[str, Any] = {}
    fractions = {name for one in brought for name in one.fractions}
    for wide in (torch.float64, torch.int64):
        own = {name: leaf for name, leaf in sorted(leaves.items()) if _widened(leaf.host).dtype == wide}
        vectors = [_widened(leaf.host).reshape(-1) for leaf in own.values()]
        if not vectors:
            continue
        total = _reduce_vector(torch.cat(vectors), op, group)
        for (name, leaf), part in zip(own.items(), torch.split(total, [len(one) for one in vectors]), strict=True):
            reduced[name] = _result(leaf, part, op, len(brought), is_whole=name not in fractions)
    return with_leaves(tree, reduced)


def _leaves_of(tree: object, op: str = "") -> tuple[dict[str, _Leaf], str]:
    """Return the leaves by name, and why they cannot be collected, or ""."""
    leaves: dict[str, _Leaf] = {}
    try:
        values = list(named_leaves(tree))
    except UnsplittableBatchError as error:
        return {}, str(error)
    for name, value in values:
        if isinstance(value, Tensor):
            if problem := _problem_of(value, op):
                return {}, f"the value{name and ' at '}{name} is {problem}"
            host = value.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
            leaves[name] = _Leaf(host, value.device, None)
        elif isinstance(value, int | float):
            if isinstance(value, int) and abs(value) > MOST_EXACT:
                return {}, f"the number{name and ' at '}{name} is too large to be exact: give it as a tensor"
            leaves[name] = _Leaf(torch.tensor(value, dtype=torch.float64), torch.device("cpu"), value)
        else:
            return {}, f"the value{name and ' at '}{name} is of type {type(value).__name__}: give tensors or numbers"
    return leaves, "" if leaves else "there is nothing in it: give tensors or numbers"


def _problem_of(tensor: Tensor, op: str) -> str:
    """Return what of a tensor cannot be collected, or ""."""
    if type(tensor).__name__ == "DTensor":
        return "a DTensor: make it a plain dense one first"
    if tensor.is_nested or tensor.is_meta:
        return f"a {'nested' if tensor.is_nested else 'meta'} tensor: give one with plain values"
    if tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor: make it a plain dense one first"
    if tensor.is_quantized or _NO_NUMBERS.match(str(tensor.dtype)):
        return f"of {tensor.dtype}, which torch cannot compute with: make it a plain one first"
    if op in ("min", "max") and tensor.is_complex():
        return f"complex, and has no {op}"
    if op and tensor.dtype == torch.uint64:
        return "uint64, which int64 does not hold: give it as another type"
    if op in ("sum", "mean") and not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel():
        least, most = (int(one) for one in torch.aminmax(tensor.to(torch.int64)))
        world_size = current_placement().world_size
        if world_size > 1 and max(-least, most) > MOST_OF_INT64 // world_size:
            return f"so large that int64 may not hold the sum of {world_size} ranks: give it as float64"
    return ""


def _meet(
    label: str, leaves: dict[str, _Leaf], listing: dict[str, str], problem: str, timeout_s: float
) -> list[_Brought]:
    """Return each rank's description, the same types and shapes on all. Every rank calls it; blocks for the others.

    Raises EngineUseError if a rank's tree cannot be collected, MetricMismatchError if the trees differ (the same text
    on every rank), BarrierTimeoutError.
    """
    text = json.dumps(sorted(listing.items()))
    lengths = {name: len(leaf.rows) for name, leaf in leaves.items()}
    fractions = [name for name, leaf in leaves.items() if isinstance(leaf.number, float)]
    own = _Brought(problem, hashlib.sha256(text.encode()).hexdigest(), lengths, fractions)
    brought = [_Brought(*json.loads(answer)) for answer in exchange(label, json.dumps(own), timeout_s)]
    if found := common_problem([one.problem for one in brought]):
        raise EngineUseError(f"{label}: {found}")
    digests = [one.digest for one in brought]
    speaking = speakers(digests)
    if not speaking:
        return brought
    texts = exchange(label, text if current_placement().rank in speaking else "", timeout_s)
    found = difference(digests, {rank: dict(json.loads(texts[rank])) for rank in speaking})
    raise MetricMismatchError(f"{label}: the ranks do not bring the same: {found}")


def _any_length(tensor: Tensor) -> str:
    """Return a shape that leaves dimension 0 open: `(any, 3)`."""
    return f"({', '.join(['any', *map(str, tensor.shape[1:])])})" if tensor.ndim else "()"


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _gather_bytes(own: Tensor, sizes: list[int], group: ProcessGroup | None) -> list[Tensor]:
    """Return each rank's bytes."""
    if group is None:
        return [own]
    # Collectives want one size on all ranks.
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(own)] = own
    vectors = [torch.empty_like(padded) for _ in sizes]
    if max(sizes):
        dist.all_gather(vectors, padded, group=group)
    return [vector[:size] for vector, size in zip(vectors, sizes, strict=True)]


def _widened(tensor: Tensor) -> Tensor:
    """Return a tensor as what it is added up in."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.to(torch.complex128).resolve_conj())
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64)


def _reduce_vector(vector: Tensor, op: ReduceOp, group: ProcessGroup | None) -> Tensor:
    if group is None or not len(vector):
        return vector
    is_nan = vector.isnan().to(torch.uint8)
    vector = vector.clone()
    dist.all_reduce(vector, _C10D_OPS[op], group=group)
    if op in ("min", "max") and vector.is_floating_point():
        # What a comparison with NaN leaves depends on the order of ranks.
        dist.all_reduce(is_nan, dist.ReduceOp.MAX, group=group)
        vector[is_nan.bool()] = math.nan
    return vector


def _result(leaf: _Leaf, total: Tensor, op: ReduceOp, num_ranks: int, *, is_whole: bool) -> Tensor | float:
    own = leaf.host
    if own.is_complex():
        total = torch.view_as_complex(total.reshape(*own.shape, 2))
    value = total.reshape(own.shape)
    if op == "mean":
        # A quotient of whole tensors would be of torch's default type, which does not hold them.
        value = (value if own.is_complex() else value.to(torch.float64)) / num_ranks
    if leaf.number is not None:
        return int(value) if is_whole and op != "mean" else float(value)
    is_kept = own.is_floating_point() or own.is_complex() or op in ("min", "max")
    return (value.to(own.dtype) if is_kept else value).to(leaf.device)
