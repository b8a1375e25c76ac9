"""Whatever state is saved comes back in every bit, through the files, for any number of ranks that write it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from ddpcore.checkpoint.formats import file_name
from ddpcore.checkpoint.state_tree import MalformedStateError, flatten, unflatten
from ddpcore.checkpoint.tensor_files import read_checkpoint
from tests.support.checkpoint_copies import write_checkpoint
from tests.support.examples import few_and_many
from tests.support.training_states import is_same, scalars, states

if TYPE_CHECKING:
    from pathlib import Path


@few_and_many(100, 300, states())
def test_a_state_taken_apart_and_put_together_is_the_same(state: Any) -> None:
    flat = flatten(state)

    skeleton = json.loads(json.dumps(flat.skeleton, allow_nan=False))

    assert is_same(unflatten(skeleton, flat.tensors), state)


@given(st.dictionaries(st.sampled_from(["model", "optimizer", "a.b", "#2"]), states(), max_size=3), states(), st.data())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_state_written_by_any_number_of_ranks_is_read_back_in_every_bit(
    tmp_path: Path, state: Any, own: Any, data: st.DataObject
) -> None:
    num_ranks = data.draw(st.integers(1, 4))

    path = write_checkpoint(tmp_path, state, num_ranks, per_rank=own)

    for rank in range(num_ranks):
        contents = read_checkpoint(path, rank)
        assert is_same(contents.state, state)
        assert is_same(contents.per_rank, own)
        # Plain safetensors files: their own library takes every one of them.
        load_file(path / file_name(rank))


@given(st.integers(2, 3), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tensors_large_enough_to_be_cut_come_back_whole(
    tmp_path: Path, num_ranks: int, num_rows: int, num_tensors: int
) -> None:
    state = [torch.randn(num_rows, 20_011) for _ in range(num_tensors)]

    path = write_checkpoint(tmp_path, state, num_ranks)

    assert is_same(read_checkpoint(path).state, state)


@few_and_many(
    100,
    300,
    st.recursive(
        scalars.filter(lambda it: not isinstance(it, float)),
        lambda it: (
            st.lists(it)
            | st.dictionaries(
                st.sampled_from(["$", "name", "items", "bits", "metadata"]),
                it | st.sampled_from(["tensor", "dict", "ordered", "tuple", "float", "0" * 16]),
            )
        ),
    ),
)
def test_a_skeleton_that_makes_no_sense_is_refused_and_never_crashes(skeleton: Any) -> None:
    try:
        unflatten(skeleton, {"": torch.zeros(1)})
    except MalformedStateError:
        return


def test_a_tensor_in_several_places_is_stored_once_and_is_one_again(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    state = {"embed": weight, "head": weight, "view": weight.view(3, 4), "part": weight[1:], "turned": weight.T}

    path = write_checkpoint(tmp_path, state, 1)

    loaded = read_checkpoint(path).state
    assert set(read_checkpoint(path).manifest.tensors) == {"embed", "part", "turned"}
    assert loaded["embed"] is loaded["head"] is loaded["view"]
    assert is_same(loaded, state)


@pytest.mark.parametrize("width", [torch.complex64])
def test_a_conjugate_is_not_taken_for_the_tensor_that_it_shares_memory_with(tmp_path: Path, width: torch.dtype) -> None:
    numbers = torch.randn(4, dtype=width)
    state = [numbers, numbers.conj(), numbers.imag, numbers.conj().imag]

    path = write_checkpoint(tmp_path, state, 1)

    assert all(torch.equal(*pair) for pair in zip(read_checkpoint(path).state, state, strict=True))
