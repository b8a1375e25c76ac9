"""GPUs in the arguments of torch's calls, as the CPU that stands for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.rehearsal.device_arguments import CPU, GpusAreCpu, device_on_cpu, location_on_cpu, on_cpu

INDEX = st.none() | st.integers(0, 127)
GPU_NAMES = INDEX.map(lambda index: "cuda" if index is None else f"cuda:{index}")


@given(GPU_NAMES)
def test_a_gpu_is_the_cpu_however_it_is_named(name: str) -> None:
    assert on_cpu(name) == "cpu"
    assert on_cpu(torch.device(name)) == CPU


@given(st.integers(0, 127))
def test_a_number_is_a_gpu_where_a_device_stands(number: int) -> None:
    assert device_on_cpu(number) == CPU
    assert on_cpu(number) == number


@given(st.one_of(st.booleans(), st.floats(), st.sampled_from(["cpu", "meta", "mps", "sum", "", "CUDA"]), st.text("ab")))
def test_anything_else_stays_as_it_is(value: object) -> None:
    assert on_cpu(value) is value
    assert device_on_cpu(value) is value


def test_a_type_of_tensors_on_gpus_is_that_of_the_cpu() -> None:
    assert on_cpu("torch.cuda.HalfTensor") == "torch.HalfTensor"
    assert on_cpu("torch.FloatTensor") == "torch.FloatTensor"


@pytest.mark.parametrize(
    "location",
    [None, "cuda:3", torch.device("cuda", 1), 1, {"cuda:0": "cuda:1"}, {}, lambda storage, _: storage, lambda *_: None],
)
def test_what_a_file_holds_comes_to_the_cpu(location: object) -> None:
    found = location_on_cpu(location)
    if callable(found):
        storage = torch.zeros(1).untyped_storage()
        assert found(storage, "cuda:0") is storage
    else:
        assert torch.device(found) == CPU


def test_only_calls_in_its_block_are_translated() -> None:
    with GpusAreCpu():
        made = torch.ones(2, device="cuda:1").to(0).to(device=1, dtype=torch.float64)
        named = torch.device(1)
        tensor = torch.zeros_like(made, device=named)
    assert (made.device, made.dtype, tensor.device) == (CPU, torch.float64, CPU)
    assert named == torch.device("cuda", 1)  # the program sees the GPU that it names
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
        torch.ones(2, device="cuda:1")
