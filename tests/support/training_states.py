"""States as a training has them, for hypothesis and for ranks, and what it means that two are the same."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ddpcore.checkpoint.state_tree import DTYPES

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_same(left: Any, right: Any) -> bool:
    """Say whether two states are equal in every bit, and in the types of all their parts."""
    if type(left) is not type(right) and not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bits(left), _bits(right))
    if isinstance(left, dict):
        keys = zip(left, right, strict=False)
        return len(left) == len(right) and all(
            is_same(one, other) and is_same(left[one], right[other]) for one, other in keys
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(is_same, left, right))
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return bool(left == right)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().contiguous().view(BITS[tensor.element_size()])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, any bits; without dimensions, without elements, and not contiguous among them."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = int(torch.Size(shape).numel())
    # bool has two values: other bits in it are no value at all.
    item_bytes = torch.empty((), dtype=dtype).element_size()
    raw = draw(st.binary(min_size=count * item_bytes, max_size=count * item_bytes))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    kind = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded"]))
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "sliced" and tensor.dim():
        return tensor[::2]
    if kind == "expanded":
        return tensor.expand(2, *tensor.shape)
    return tensor


texts = st.text(st.characters(codec=None), max_size=8)
keys = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), texts)


def states() -> st.SearchStrategy[Any]:
    """Trees of everything that a checkpoint can hold, with tensors that stand in several places."""
    return st.lists(tensors(), min_size=1, max_size=4).flatmap(
        lambda some: st.recursive(
            st.one_of(scalars, st.sampled_from(some)),
            lambda inner: st.one_of(
                st.lists(inner, max_size=4),
                st.lists(inner, max_size=4).map(tuple),
                st.dictionaries(keys, inner, max_size=4),
                st.dictionaries(texts, inner, max_size=4).map(OrderedDict),
                st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
            ),
            max_leaves=12,
        )
    )
