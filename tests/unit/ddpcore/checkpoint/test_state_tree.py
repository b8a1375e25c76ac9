"""What a checkpoint cannot hold is refused, with its place and what to do; names are ones that people can read."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from ddpcore.checkpoint.state_tree import flatten, unflatten
from ddpcore.errors import StateNotStorableError


class Pair(NamedTuple):
    left: int
    right: int


class Level(IntEnum):
    LOW = 1


def endless() -> list[Any]:
    it: list[Any] = []
    it.append(it)
    return it


REFUSED = {
    "bytes": (b"raw", "is a builtins.bytes: make it a torch.uint8 tensor"),
    "numpy array": (np.zeros(3), "is a numpy.ndarray: make it a tensor with torch.from_numpy"),
    "numpy number": (np.float64(3), "is a numpy.float64: make it a Python number"),
    "enum": (Level.LOW, "Level: make it a Python number"),
    "size": (torch.zeros(2).shape, "is a torch.Size: make it a tuple"),
    "named tuple": (Pair(1, 2), "Pair: keep tensors, numbers, texts"),
    "default dict": (defaultdict(int), "is a collections.defaultdict: keep tensors"),
    "set": ({1}, "is a builtins.set: make it a list"),
    "function": (print, "is a builtins.builtin_function_or_method: keep tensors"),
    "device": (torch.device("cpu"), "is a torch.device: make it a str"),
    "sparse": (torch.zeros(3).to_sparse(), "is sparse or quantized: make it a plain tensor"),
    "meta": (torch.zeros(3, device="meta"), "is on the meta device: make it a plain tensor"),
    "complex double": (torch.zeros(3, dtype=torch.complex128), "is torch.complex128, which safetensors does not know"),
    "huge number": (1 << 9000, "is an integer of 9001 bits: 8192 is the most"),
    "tuple as key": ({(1, 2): 3}, "has the key (1, 2): keys are texts, numbers, booleans or None"),
    "itself": (endless(), "lies more than 100 levels deep: does the state contain itself?"),
    "lazy": (nn.UninitializedParameter(), "is a UninitializedParameter: make it a plain tensor"),
}


@pytest.mark.parametrize(("part", "problem"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_stored_is_refused_with_its_place(part: Any, problem: str) -> None:
    with pytest.raises(StateNotStorableError) as refusal:
        flatten({"model": {"ok": 1}, "extra": [None, part]})

    assert str(refusal.value).startswith("state['extra'][1]")
    assert problem in str(refusal.value)
    assert refusal.value.path.startswith("state['extra'][1]")


def test_tensors_have_the_names_that_a_module_gives_them() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    assert list(flatten({"model": net.state_dict(), "moments": {0: {"exp_avg": torch.zeros(1)}}}).tensors) == [
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
        "model.1.running_mean",
        "model.1.running_var",
        "model.1.num_batches_tracked",
        "moments.0.exp_avg",
    ]


def test_names_never_collide() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}, "__metadata__": torch.ones(3), "\ud800": torch.ones(4)}

    assert list(flatten(state).tensors) == ["a.b", "a.b#2", "__metadata__#2", "\\ud800"]
    assert next(iter(flatten(state, taken={"a.b"}).tensors)) == "a.b#2"
    assert list(flatten(torch.ones(1)).tensors) == ["state"]


def test_a_module_s_version_numbers_are_kept() -> None:
    state = nn.BatchNorm1d(3).state_dict()
    flat = flatten(state)

    back = unflatten(flat.skeleton, flat.tensors)

    assert type(back) is OrderedDict
    assert back._metadata == state._metadata == {"": {"version": 2}}  # type: ignore[attr-defined]


def test_a_listing_says_what_stands_where_but_not_its_value() -> None:
    one = flatten({"a": torch.zeros(2, 3), "b": [1, None]}).listing
    other = flatten({"a": torch.ones(2, 3), "b": [2.5, "x"]}).listing

    assert one == other
    assert one["state['a']"] == "F32 [2, 3]"
    assert one != flatten({"a": torch.zeros(3, 2), "b": [1, None]}).listing


def test_a_listing_says_which_places_have_one_tensor() -> None:
    weight = torch.zeros(2)

    tied, apart = (flatten({"a": {"w": weight}, "b": other}).listing for other in (weight, weight.clone()))

    assert (tied["state['b']"], apart["state['b']"]) == ("F32 [2] (the same tensor as a.w)", "F32 [2]")
