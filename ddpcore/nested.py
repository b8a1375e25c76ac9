"""Batches as trees: what a DataLoader's collate makes of samples, and people's own batch classes.

A tree's branches are mappings, lists, tuples, named tuples and dataclasses, each rebuilt as what it was, its further
attributes included; anything else is a leaf. Where a batch is cut into parts, dimension 0 counts samples:

    tensor or numpy array of at least one dimension     cut along dimension 0
    list or tuple of leaves, none of them an array      one item a sample (what collate makes of strings): cut too
    everything else: numbers, strings, 0-dim tensors    belongs to every part as it is

Nothing is copied: the parts are views.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ddpcore.errors import UnsplittableBatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Tree = TypeVar("Tree")

_ARRAYS = (Tensor, np.ndarray)
_BRANCHES = (Mapping, list, tuple)

MAX_DEPTH = 100
"""Branches within each other. Each takes up to four of the 1000 calls that Python nests, with those of the program."""


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return the tree with every tensor replaced by what `function` makes of it; other leaves stay.

    The given tree is not changed. Of a `PackedSequence` the batch sizes stay as they are: torch wants them on the CPU.
    """
    mapped: Tree = _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)
    return mapped


def named_leaves(tree: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with the piece of source text that reaches it, such as `['scores'][0]`, in the tree's order.

    Raises UnsplittableBatchError if the tree is nested too deep.
    """
    if not _is_branch(tree):
        yield path, tree
    elif depth == MAX_DEPTH:
        raise UnsplittableBatchError(f"the value is nested more than {MAX_DEPTH} deep, or holds itself: flatten it")
    for key, child in _children(tree):
        yield from named_leaves(child, path + key, depth + 1)


def with_leaves(tree: Tree, leaves: Mapping[str, Any], path: str = "") -> Tree:
    """Return the tree with other leaves, by the names that `named_leaves` gives them."""
    if not _is_branch(tree):
        replaced: Tree = leaves[path]
        return replaced
    keys = iter([key for key, _ in _children(tree)])
    rebuilt: Tree = _rebuild(tree, lambda child: with_leaves(child, leaves, path + next(keys)))
    return rebuilt


def zip_leaves(function: Callable[[list[Any]], Any], trees: Sequence[Tree]) -> Tree:
    """Return one tree, shaped as the first, whose leaves `function` makes of the leaves that stand in one place.

    Raises UnsplittableBatchError if the trees have different shapes.
    """
    first = trees[0]
    if not _is_branch(first):
        merged: Tree = function(list(trees))
        return merged
    columns = [dict(_children(tree)) for tree in trees]
    if any(column.keys() != columns[0].keys() for column in columns):
        raise UnsplittableBatchError(f"one part has {', '.join(columns[0])} where another has not the same")
    zipped = iter([zip_leaves(function, [column[key] for column in columns]) for key in columns[0]])
    rebuilt: Tree = _rebuild(first, lambda _: next(zipped))
    return rebuilt


def num_samples_of(tree: object, name: str = "batch", *, are_lists_cut: bool = True) -> int:
    """Return how many samples a batch holds.

    `name` is what errors call it; `are_lists_cut` is as of `split_sizes`. Raises UnsplittableBatchError if its parts
    disagree, or nothing in it has samples.
    """
    return _agreed(dict(_counts(tree, name, are_lists_cut=are_lists_cut)), name)


def split_samples(tree: Tree, num_parts: int) -> list[Tree]:
    """Cut a batch into micro-batches whose numbers of samples differ by at most one.

    No part is empty: a batch of fewer than `num_parts` samples makes one part a sample, an empty batch one part. Raises
    UnsplittableBatchError as `num_samples_of`.
    """
    if num_parts < 1:
        raise UnsplittableBatchError(f"a batch is split into at least 1 part, not {num_parts}")
    num_samples = num_samples_of(tree)
    num_parts = max(1, min(num_parts, num_samples))
    bounds = [num_samples * part // num_parts for part in range(num_parts + 1)]
    return split_sizes(tree, [end - begin for begin, end in pairwise(bounds)])


def split_sizes(tree: Tree, sizes: Sequence[int], *, are_lists_cut: bool = True, name: str = "batch") -> list[Tree]:
    """Cut a batch into consecutive parts of the given numbers of samples; a part may be empty.

    Without `are_lists_cut` every part gets lists without arrays whole, as `nn.DataParallel` does with arguments. Raises
    UnsplittableBatchError as `num_samples_of`, or if the batch has not as many samples as the sizes.
    """
    num_samples = num_samples_of(tree, name, are_lists_cut=are_lists_cut)
    if num_samples != sum(sizes) or min(sizes, default=0) < 0:
        raise UnsplittableBatchError(f"{name} has {num_samples} samples and cannot be split into {list(sizes)}")
    parts = []
    begin = 0
    for size in sizes:
        parts.append(_cut(tree, slice(begin, begin + size), are_lists_cut=are_lists_cut))
        begin += size
    return parts


def _agreed(counts: Mapping[str, int], name: str) -> int:
    if not counts:
        raise UnsplittableBatchError(f"{name} has no samples to count: no tensor of at least one dimension is in it")
    (first, num_samples), *rest = counts.items()
    for path, count in rest:
        if count != num_samples:
            raise UnsplittableBatchError(
                f"{path} has {count} samples and {first} has {num_samples}: each counts its samples in dimension 0; "
                "put what all samples share into a 0-dim tensor or outside of the batch"
            )
    return num_samples


def _counts(tree: Any, path: str, *, are_lists_cut: bool) -> Iterator[tuple[str, int]]:
    """Yield (path, number of samples) of everything that is cut."""
    if _is_array(tree):
        yield path, len(tree)
    elif isinstance(tree, PackedSequence):
        raise UnsplittableBatchError(f"{path} is a PackedSequence, which cannot be split: pack after splitting")
    elif _is_list_of_samples(tree):
        if are_lists_cut:
            yield path, len(tree)
    else:
        for key, child in _children(tree):
            yield from _counts(child, path + key, are_lists_cut=are_lists_cut)


def _cut(tree: Any, part: slice, *, are_lists_cut: bool) -> Any:
    if _is_array(tree):
        return tree[part]
    if _is_list_of_samples(tree):
        return _with_items(tree, list(tree[part])) if are_lists_cut else tree
    return _rebuild(tree, lambda child: _cut(child, part, are_lists_cut=are_lists_cut))


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, _ARRAYS) and leaf.ndim > 0


def _is_list_of_samples(tree: object) -> bool:
    """Return whether a list holds one item a sample: leaves without a sample dimension of their own, at least one."""
    if not isinstance(tree, list | tuple) or hasattr(tree, "_fields") or not tree:
        return False
    return not any(isinstance(item, _ARRAYS) or _is_branch(item) for item in tree)


def _map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    if not _is_branch(tree):
        return function(tree)
    if isinstance(tree, PackedSequence):
        mapped = [leaf if leaf is tree.batch_sizes else function(leaf) for leaf in tree]
        return type(tree)._make(mapped)
    return _rebuild(tree, lambda child: _map_leaves(function, child))


def _is_branch(tree: object) -> bool:
    return isinstance(tree, _BRANCHES) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield each child with the piece of source text that reaches it; nothing for a leaf."""
    if not _is_branch(tree):
        return
    if isinstance(tree, Mapping):
        yield from ((f"[{key!r}]", child) for key, child in tree.items())
    elif hasattr(tree, "_fields"):
        yield from ((f".{field}", child) for field, child in zip(tree._fields, tree, strict=True))
    elif isinstance(tree, list | tuple):
        yield from ((f"[{index}]", child) for index, child in enumerate(tree))
    else:
        yield from ((f".{field}", getattr(tree, field)) for field in _fields_of(tree))


def _rebuild(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a shallow copy of a branch with each child replaced; a leaf as it is."""
    if not _is_branch(tree):
        return tree
    if isinstance(tree, Mapping):
        return _with_values(tree, {key: function(child) for key, child in tree.items()})
    if isinstance(tree, list | tuple):
        return _with_items(tree, [function(child) for child in tree])
    rebuilt = copy.copy(tree)
    for field in _fields_of(tree):
        # A frozen dataclass refuses plain assignment; its constructor might compute or refuse.
        object.__setattr__(rebuilt, field, function(getattr(tree, field)))
    return rebuilt


def _with_values(tree: Any, values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other values."""
    if type(tree) is dict:
        return values
    if not isinstance(tree, MutableMapping):
        return type(tree)(values)
    # A copy keeps what a constructor would want: a default factory, a tokenizer's further attributes.
    rebuilt = copy.copy(tree)
    if not isinstance(tree, dict) and not hasattr(tree, "__copy__"):
        _unshare_dicts(rebuilt)
    for (key, child), value in zip(list(tree.items()), values.values(), strict=True):
        rebuilt[key] = value
        if value is not child and tree[key] is value:
            tree[key] = child
            raise UnsplittableBatchError(
                f"a {type(tree).__name__} shares its items with what copy.copy makes of it: "
                "give the class a __copy__ whose result can be changed alone, or make batches dicts"
            )
    return rebuilt


def _unshare_dicts(rebuilt: Any) -> None:
    """Copy the dicts among the attributes of a plain copy: a mapping of one's own keeps its items in one of them."""
    attributes = getattr(rebuilt, "__dict__", {})
    copies = {id(held): copy.copy(held) for held in attributes.values() if isinstance(held, dict)}
    attributes.update({name: copies.get(id(held), held) for name, held in attributes.items()})


def _with_items(tree: Any, items: list[Any]) -> Any:
    """Return a list or tuple of the same type with other items."""
    if type(tree) is list:
        return items
    if isinstance(tree, list):
        rebuilt = copy.copy(tree)
        rebuilt[:] = items
        return rebuilt
    # A named tuple's constructor may have been overridden.
    return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)


def _fields_of(tree: Any) -> list[str]:
    """Return a dataclass's fields that have been set."""
    return [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)]
