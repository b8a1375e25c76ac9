"""Data parallel in one process: results and gradients are the single device's, however the batch is split.

Torch copies modules and runs threads only on accelerators; here "devices" are the CPU several times over, replicas are
the module itself and run one after the other. On a machine with GPUs the same runs on them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddpcore.errors import UnsplittableBatchError, WrapError
from ddpcore.parallel.balanced import BalancedDataParallel, Scalars, balanced_sizes, gathered, in_same_autocast

if TYPE_CHECKING:
    from collections.abc import Sequence


class Output(NamedTuple):
    scores: Tensor
    loss: Tensor
    num_positive: Tensor
    note: str


class Model(nn.Module):
    """Takes nested and keyword inputs, and returns per-sample scores, a mean, a count and a text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2).double()
        self.seen: list[int] = []

    def forward(self, batch: dict[str, Any], *, scale: Tensor, size: tuple[int, int]) -> dict[str, Output]:
        assert size == (480, 640)
        x, (target,) = batch["x"], batch["targets"]
        self.seen.append(len(x))
        scores = self.linear(x) * scale
        loss = (scores.sum(1) - target).square()
        mean = loss.mean() if len(loss) else loss.sum()
        return {"out": Output(scores, mean, (scores > 0).sum(), "fine")}


class OverCpu(BalancedDataParallel):
    """Several "devices" on the CPU."""

    def __init__(self, module: nn.Module, num_devices: int, **options: Any) -> None:
        super().__init__(module, **options)
        self.devices = [torch.device("cpu")] * num_devices

    def replicate(self, module: nn.Module, device_ids: Sequence[int | torch.device]) -> list[nn.Module]:
        return [module] * len(device_ids)

    def apply_replicas(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[dict[str, Any]], devices: Any
    ) -> list[Any]:
        assert len(replicas) == len(inputs) == len(kwargs) == len(devices)
        return [replica(*args, **keywords) for replica, args, keywords in zip(replicas, inputs, kwargs, strict=True)]


def arguments(num_samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    generator = torch.Generator().manual_seed(num_samples)
    x = torch.randn(num_samples, 3, generator=generator, dtype=torch.float64)
    batch = {"x": x, "targets": [torch.arange(num_samples).double()], "names": ["a", "b"]}
    return batch, {"scale": torch.tensor(0.5, dtype=torch.float64), "size": (480, 640)}


def run(model: nn.Module, module: Model, num_samples: int) -> tuple[Output, list[Tensor]]:
    batch, keywords = arguments(num_samples)
    module.zero_grad()
    output: Output = model(batch, **keywords)["out"]
    (output.loss + output.scores.square().sum()).backward()  # type: ignore[no-untyped-call]
    return output, [cast("Tensor", parameter.grad).clone() for parameter in module.parameters()]


def assert_same(found: tuple[Output, list[Tensor]], expected: tuple[Output, list[Tensor]]) -> None:
    assert (found[0].note, found[0].num_positive) == (expected[0].note, expected[0].num_positive)
    torch.testing.assert_close(found[0].scores, expected[0].scores, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0].loss, expected[0].loss, rtol=1e-12, atol=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@given(st.integers(0, 20), st.integers(1, 5), st.none() | st.integers(0, 8), st.integers(1, 3))
def test_results_and_gradients_are_the_single_device_s(
    num_samples: int, num_devices: int, first: int | None, steps: int
) -> None:
    module, alone = Model(), Model()
    parallel = OverCpu(module, num_devices, first_device_batch=first, accumulation_steps=steps)

    assert_same(run(parallel, module, num_samples), run(alone, alone, num_samples))
    sizes = [size for size in balanced_sizes(num_samples, num_devices, first, steps) if size]
    assert module.seen == (sizes or [0])


def test_each_share_arrives_on_its_own_device_whole_things_on_every_one() -> None:
    arrived: list[tuple[Any, dict[str, Any], torch.device]] = []

    class Elsewhere(OverCpu):
        def apply_replicas(self, replicas: Any, inputs: Any, kwargs: Any, devices: Any) -> list[Any]:
            arrived.extend(zip(inputs, kwargs, devices, strict=True))
            assert len(replicas) == 2
            return [torch.ones(len(args[0])) for args in inputs]

    parallel = Elsewhere(nn.Identity(), 3, first_device_batch=0)
    parallel.devices = [torch.device("cpu"), torch.device("meta"), torch.device("cpu")]

    output = parallel(torch.arange(5), {"y": torch.ones(5, 2)}, scale=torch.tensor(2.0), mode="train")

    assert output.shape == (5,)
    (meta_args, meta_keywords, meta), (args, keywords, cpu) = arrived
    assert (meta.type, cpu.type) == ("meta", "cpu")
    assert (meta_args[0].device.type, meta_args[0].shape, meta_args[1]["y"].shape) == ("meta", (3,), (3, 2))
    assert meta_keywords["scale"].device.type == "meta"
    assert args[0].tolist() == [3, 4]
    assert keywords["mode"] == "train"


def test_a_sum_over_samples_is_added_up_where_said_so() -> None:
    module = nn.Linear(3, 1).double()
    parallel = OverCpu(_SumLoss(module), 3, first_device_batch=1, scalars="sum")
    x = arguments(8)[0]["x"]

    torch.testing.assert_close(parallel(x), _SumLoss(module)(x))


class _SumLoss(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.module(x)).square().sum()


@pytest.mark.parametrize(("scalars", "expected"), [("mean", 2.5), ("sum", 5.0)])
def test_one_figure_a_device_becomes_one_figure(scalars: Scalars, expected: float) -> None:
    outputs = [torch.tensor(1.0), torch.tensor(4.0)]

    assert gathered(outputs, [2, 2], torch.device("cpu"), scalars).item() == expected
    assert gathered([torch.tensor(3), torch.tensor(4)], [1, 9], torch.device("cpu"), scalars).item() == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("sizes", [[257, 257], [171, 171, 170], [70_000, 70_001]])
def test_the_mean_of_equal_figures_is_that_figure_in_every_dtype(dtype: torch.dtype, sizes: list[int]) -> None:
    figures = [torch.tensor(1.0, dtype=dtype, requires_grad=True) for _ in sizes]

    mean = gathered(figures, sizes, torch.device("cpu"), "mean")
    mean.backward()

    assert (mean.dtype, mean.item()) == (dtype, 1.0)
    grads = [cast("Tensor", figure.grad).item() for figure in figures]
    assert grads == pytest.approx([size / sum(sizes) for size in sizes], rel=0.01)


def test_arguments_that_disagree_are_named() -> None:
    parallel = OverCpu(nn.Identity(), 2)

    with pytest.raises(UnsplittableBatchError, match=r"arguments\[1\]\['mask'\] has 3 samples and arguments\[0\]\[0\]"):
        parallel(torch.ones(4), mask=torch.ones(3))
    with pytest.raises(UnsplittableBatchError, match="arguments has no samples to count"):
        parallel(size=(4, 4))


def test_outputs_of_different_shapes_are_refused() -> None:
    with pytest.raises(UnsplittableBatchError, match="one part has"):
        gathered([{"a": torch.ones(1)}, {"b": torch.ones(1)}], [1, 1], torch.device("cpu"), "mean")


def test_a_module_elsewhere_is_named() -> None:
    parallel = OverCpu(nn.Linear(2, 2), 2)
    parallel.devices = [torch.device("meta"), torch.device("meta")]

    with pytest.raises(WrapError, match=r"'weight' is on cpu: .* module.to\('meta'\)"):
        parallel(torch.ones(4, 2))


def test_nonsense_is_refused_when_it_is_made() -> None:
    with pytest.raises(ValueError, match="first_device_batch=-1"):
        BalancedDataParallel(nn.Identity(), first_device_batch=-1)
    with pytest.raises(ValueError, match="accumulation_steps=0"):
        BalancedDataParallel(nn.Identity(), accumulation_steps=0)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_the_module_simply_runs() -> None:
    module = nn.Linear(3, 1)
    x = torch.ones(2, 3)

    assert torch.equal(BalancedDataParallel(module, first_device_batch=1)(x), module(x))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("first", [None, 0, 2])
def test_on_gpus_results_and_gradients_are_the_single_gpu_s(first: int | None) -> None:
    module, alone = Model().cuda(0), Model().cuda(0)
    parallel = BalancedDataParallel(module, first_device_batch=first)
    alone_on_gpu = BalancedDataParallel(alone, device_ids=[0])

    assert_same(run(parallel, module, 9), run(alone_on_gpu, alone, 9))


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.linear(x))


def test_a_thread_computes_in_the_caller_s_autocast_dtype() -> None:
    module = _Autocast()
    x = torch.ones(4, 3)
    with ThreadPoolExecutor(1) as thread:
        with torch.autocast("cpu", torch.float16):
            replica = in_same_autocast(module, "cpu")
        # As torch's threads do: on, but with the thread's own dtype.
        inside = thread.submit(lambda: _with_autocast(replica, x)).result()
        assert thread.submit(lambda: _with_autocast(module, x)).result().dtype == torch.bfloat16

    assert inside.dtype == torch.float16
    assert in_same_autocast(module, "cpu") is module


def _with_autocast(module: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return cast("Tensor", module(x))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_threads_compute_in_the_caller_s_autocast_dtype() -> None:
    parallel = BalancedDataParallel(_Autocast().cuda(0))

    with torch.autocast("cuda", torch.bfloat16):
        assert parallel(torch.ones(4, 3)).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
def test_on_one_gpu_inputs_are_moved_there() -> None:
    module = nn.Linear(3, 1).cuda(0)

    assert BalancedDataParallel(module, first_device_batch=0)(torch.ones(4, 3)).device == torch.device("cuda", 0)


class Tokens(nn.Module):
    """Returns the sum of some tokens' losses and their number."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        kept = tokens > 0
        return tokens[kept].square().sum(), kept.sum()


def test_a_mean_over_tokens_is_the_quotient_of_two_sums() -> None:
    tokens = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [5.0, 6.0, 0.0]])

    total, count = OverCpu(Tokens(), 3, scalars="sum", first_device_batch=1)(tokens)

    assert (total / count).item() == pytest.approx(sum(n * n for n in range(1, 7)) / 6)
