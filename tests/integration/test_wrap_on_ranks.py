"""The wrapped model on real gloo ranks: gradients are a single process's, and mistakes are named before DDP starts."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpcore.errors import ModelMismatchError, WrapError
from ddpcore.nested import split_samples
from ddpcore.parallel.comm_hooks import CommHook, PowerSGD
from ddpcore.parallel.ddp_arguments import construct, supported
from ddpcore.parallel.wrapping import accumulate, joined, unwrap, wrap
from ddpcore.probe.flight_recorder import FlightRecorder
from tests.support.warm_ranks import run_ranks, try_ranks

SAMPLES = 24


def build(width: int = 5, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1)).double()


def samples(num: int = SAMPLES) -> Tensor:
    return torch.randn(num, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def gradients(model: nn.Module) -> list[Tensor]:
    return [cast("Tensor", parameter.grad).clone() for parameter in model.parameters()]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return cast("Tensor", model(x)).square().mean()


def expected_gradients(x: Tensor) -> list[Tensor]:
    model = build()
    backward(loss_of(model, x))
    return gradients(model)


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(found, expected, strict=True))


def own_share(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def take_one_step(arguments: dict[str, Any]) -> float:
    # Other weights than rank 0's: the wrap must begin with rank 0's everywhere.
    model = wrap(build(seed=dist.get_rank()), device="cpu", **arguments)
    backward(loss_of(model, own_share(samples())))
    return largest_error(gradients(model), expected_gradients(samples()))


@pytest.mark.parametrize(
    "arguments", [{}, {"static_graph": True}, {"find_unused_parameters": True, "bucket_cap_mb": 1}]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_a_single_process(world_size: int, arguments: dict[str, Any]) -> None:
    assert max(run_ranks(take_one_step, world_size, arguments)) < 1e-12


def accumulate_three_steps(is_static: bool) -> list[tuple[float, int]]:
    model = wrap(build(), static_graph=is_static)
    recorder = FlightRecorder()
    steps = []
    for _ in range(3):
        model.zero_grad()
        before = sum(enqueued for enqueued, _ in recorder.counters().values())
        parts = split_samples(own_share(samples()), 3)
        for index, part in enumerate(parts):
            with accumulate(model, is_last=index == len(parts) - 1):
                backward(loss_of(model, part) / len(parts))
        num_collectives = sum(enqueued for enqueued, _ in recorder.counters().values()) - before
        steps.append((largest_error(gradients(model), expected_gradients(samples())), num_collectives))
    return steps


@pytest.mark.parametrize("is_static", [False, True])
def test_accumulated_micro_batches_are_one_big_batch_and_travel_once(is_static: bool) -> None:
    for steps in run_ranks(accumulate_three_steps, 2, is_static):
        assert max(error for error, _ in steps) < 1e-12
        # In the first steps DDP also agrees on its buckets; in the last only the one bucket travels.
        assert steps[-1][1] == 1


def train_unevenly(divide_by_initial_world_size: bool) -> list[Tensor]:
    model = wrap(build())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with joined(model, divide_by_initial_world_size=divide_by_initial_world_size):
        for x in uneven_batches(dist.get_rank()):
            optimizer.zero_grad()
            backward(loss_of(model, x))
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def uneven_batches(rank: int) -> list[Tensor]:
    return list(samples(40).chunk(10))[: 2 + 2 * rank]


@pytest.mark.parametrize("divide_by_initial_world_size", [True, False])
def test_ranks_with_uneven_inputs_end_with_the_same_weights(divide_by_initial_world_size: bool) -> None:
    world_size = 3
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(6):
        active = [uneven_batches(rank)[step] for rank in range(world_size) if step < len(uneven_batches(rank))]
        optimizer.zero_grad()
        for x in active:
            backward(loss_of(model, x) / (world_size if divide_by_initial_world_size else len(active)))
        optimizer.step()

    for weights in run_ranks(train_unevenly, world_size, divide_by_initial_world_size):
        assert largest_error(weights, [parameter.detach() for parameter in model.parameters()]) < 1e-12


def compress(comm_hook: CommHook | PowerSGD) -> tuple[float, list[Tensor]]:
    model = wrap(build(width=64).float(), comm_hook=comm_hook)
    for _ in range(4):
        model.zero_grad()
        backward(loss_of(model, own_share(samples()).float()))
    expected = build(width=64).float()
    backward(loss_of(expected, samples().float()))
    scale = max(gradient.abs().max().item() for gradient in gradients(expected))
    return largest_error(gradients(model), gradients(expected)) / scale, gradients(model)


@pytest.mark.parametrize(
    ("comm_hook", "least", "most"),
    [
        ("none", 0.0, 1e-6),
        ("fp16", 1e-6, 2e-3),
        ("bf16", 1e-5, 2e-2),
        ("powersgd", 0.0, 1e-6),  # plain averaging for its first 1,000 steps
        (PowerSGD(start_iter=2), 1e-5, 1.0),
        (PowerSGD(start_iter=2, matrix_approximation_rank=3, min_compression_rate=1), 0.0, 1e-4),  # three inputs
    ],
    ids=["none", "fp16", "bf16", "powersgd by name", "powersgd of rank 1", "powersgd of full rank"],
)
def test_a_comm_hook_costs_the_accuracy_it_says_and_keeps_ranks_equal(
    comm_hook: CommHook | PowerSGD, least: float, most: float
) -> None:
    outcomes = run_ranks(compress, 2, comm_hook)

    for error, found in outcomes:
        assert least <= error < most
        assert largest_error(found, outcomes[0][1]) == 0.0


class Tower(nn.Module):
    """A model with a buffer and a frozen parameter."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.last(self.norm(self.first(x))))


def odd_tower(change: str) -> Tower:
    model = Tower(6 if change == "shape" else 4)
    if change == "number":
        model.extra = nn.Linear(1, 1)
    elif change == "dtype":
        model.last.double()
    elif change == "order":
        model.first._parameters = dict(reversed(model.first._parameters.items()))
    elif change == "buffer":
        model.norm.register_buffer("mask", torch.ones(2))
    elif change == "frozen":
        model.last.bias.requires_grad_(False)
    elif change == "strides":
        model.first.weight = nn.Parameter(model.first.weight.detach().t().contiguous().t())
    return model


def wrap_unlike(change: str, odd_ranks: list[int]) -> None:
    is_odd = dist.get_rank() in odd_ranks
    wrap(odd_tower(change if is_odd else ""), static_graph=is_odd and change == "setting")


@pytest.mark.parametrize(
    ("change", "odd_ranks", "world_size", "lines"),
    [
        (
            "shape",
            [1],
            2,
            "parameter 0 is 'first.weight' float32 [4, 3] on rank 0, 'first.weight' float32 [6, 3] on rank 1",
        ),
        ("number", [2], 3, "parameter 6 is 'extra.weight' float32 [1, 1] on rank 2, absent on ranks 0-1"),
        ("dtype", [0, 2], 4, "parameter 4 is 'last.weight' float64 [1, 4] on ranks 0, 2, "),
        (
            "order",
            [0],
            3,
            "parameter 0 is 'first.bias' float32 [4] on rank 0, 'first.weight' float32 [4, 3] on ranks 1-2",
        ),
        ("buffer", [1], 3, "buffer 3 is 'norm.mask' float32 [2] on rank 1, absent on ranks 0, 2"),
        (
            "frozen",
            [3],
            4,
            "parameter 5 is 'last.bias' float32 [1] frozen on rank 3, 'last.bias' float32 [1] on ranks 0-2",
        ),
        ("strides", [1], 3, "parameter 0 is 'first.weight' float32 [4, 3] strides [1, 4] on rank 1, "),
        ("setting", [1], 3, "setting static_graph is True on rank 1, False on ranks 0, 2"),
    ],
)
def test_models_that_differ_are_named_on_every_rank(
    change: str, odd_ranks: list[int], world_size: int, lines: str
) -> None:
    outcomes = try_ranks(wrap_unlike, world_size, change, odd_ranks)

    assert {outcome.error_type for outcome in outcomes} == {"ddpcore.errors.ModelMismatchError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert lines in outcomes[0].error


def wrap_badly_on_one_rank(mistake: str) -> None:
    model: nn.Module = Tower()
    arguments: dict[str, Any] = {}
    if dist.get_rank() == 1:
        if mistake == "frozen":
            model.requires_grad_(False)
        elif mistake == "elsewhere":
            model.last.to("meta")
        elif mistake == "lazy":
            model = nn.Sequential(nn.LazyLinear(3))
        elif mistake == "wrapped":
            model = nn.Sequential(construct(Tower(), supported({"init_sync": False})))
        elif mistake == "argument":
            arguments["static_grph"] = True
        elif mistake == "hook":
            arguments["comm_hook"] = "fp8"
        elif mistake == "batchnorm":
            arguments["sync_batchnorm"] = True
    wrap(model, device="cpu", **arguments)


@pytest.mark.parametrize(
    ("mistake", "lines"),
    [
        ("frozen", "rank 1: no parameter of it requires a gradient"),
        ("elsewhere", "rank 1: 'last.weight' is on the meta device"),
        ("lazy", "rank 1: '0.weight' has no shape yet: run one forward before wrap"),
        ("wrapped", "rank 1: its part '0' is already wrapped in DistributedDataParallel"),
        ("argument", "rank 1: DistributedDataParallel has no argument 'static_grph'; 'static_graph' is one"),
        ("hook", "rank 1: there is no comm_hook 'fp8': 'none', 'fp16', 'bf16', 'powersgd' are known"),
        ("batchnorm", "rank 1: sync_batchnorm: 'norm' is on the CPU"),
    ],
)
def test_a_mistake_on_one_rank_is_told_to_all(mistake: str, lines: str) -> None:
    outcomes = try_ranks(wrap_badly_on_one_rank, 3, mistake)

    assert {outcome.error_type for outcome in outcomes} == {"ddpcore.errors.WrapError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert lines in outcomes[0].error


def wrap_in_halves() -> list[float]:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    model = wrap(build(), process_group=mine)
    x = samples().chunk(2)[dist.get_rank() % 2]
    backward(loss_of(model, x))
    errors = [largest_error(gradients(model), expected_gradients(samples()))]
    try:
        wrap(build(width=3 + dist.get_rank() % 2), process_group=mine)
    except ModelMismatchError:
        errors.append(0.0)
    try:
        wrap(build(), process_group=halves[1 - dist.get_rank() // 2])
    except WrapError:
        errors.append(0.0)
    return errors


def test_a_part_of_the_ranks_can_have_a_model_of_its_own() -> None:
    for errors in run_ranks(wrap_in_halves, 4):
        assert len(errors) == 3
        assert max(errors) < 1e-12


class Lazybones(nn.Module):
    """Uses only one of its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.idle = nn.Linear(3, 3)
        self.busy = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.busy(self.frozen(x)))


def leave_parameters_unused() -> None:
    model = wrap(Lazybones())
    for _ in range(2):
        backward(model(torch.ones(2, 3)).sum())


def test_unused_parameters_are_named() -> None:
    for outcome in try_ranks(leave_parameters_unused, 2):
        assert "Expected to have finished reduction" in outcome.error
        assert "2 of 4 trained parameters took no part in the last loss: idle.weight, idle.bias. Use" in outcome.trace


def keep_own_buffers(arguments: dict[str, Any], known: list[str] | None) -> list[list[float]]:
    """Return the running means after the wrap, and after two training forwards on different samples."""
    model = Tower()
    model.norm.running_mean = torch.full((4,), float(dist.get_rank() + 7))
    ddp = wrap(model, **arguments) if known is None else construct(model, supported(arguments, known), known)
    means = [model.norm.running_mean.tolist()]
    for _ in range(2):
        backward(ddp(own_share(samples()).float()).sum())
    means.append(model.norm.running_mean.tolist())
    return means


OLDER_TORCH = ["broadcast_buffers", "gradient_as_bucket_view"]


@pytest.mark.parametrize("known", [None, OLDER_TORCH])
def test_without_synchronised_buffers_each_rank_keeps_its_own_after_a_common_start(known: list[str] | None) -> None:
    (start, end), (other_start, other_end) = run_ranks(keep_own_buffers, 2, {"forward_sync_buffers": False}, known)

    assert start == other_start == [7.0] * 4
    assert end != other_end


def forget_to_synchronise() -> str:
    model = wrap(Tower())
    backward(model(torch.ones(2, 3)).sum())
    x = torch.ones(2, 3)
    if dist.get_rank() == 0:
        with torch.no_grad():
            # Only rank 0 has anything to evaluate: DDP's own forward would wait for the others here.
            unwrap(model).eval()(x)
    dist.barrier()
    return type(unwrap(cast("nn.Module", torch.compile(model, backend="eager")))).__name__


def test_the_unwrapped_model_can_be_evaluated_by_one_rank_alone() -> None:
    assert run_ranks(forget_to_synchronise, 2) == ["Tower"] * 2


def use_a_compiled_model() -> float:
    model = cast("nn.Module", torch.compile(wrap(build()), backend="eager"))
    for index, part in enumerate(split_samples(own_share(samples()), 2)):
        with accumulate(model, is_last=index == 1):
            backward(loss_of(model, part) / 2)
    return largest_error(gradients(model), expected_gradients(samples()))


def test_a_compiled_model_accumulates_as_well() -> None:
    assert max(run_ranks(use_a_compiled_model, 2)) < 1e-12


def stay_alone() -> bool:
    model = build()
    same = wrap(model, device="cpu", static_graph=True, comm_hook="fp16") is model
    with joined(model), accumulate(model, is_last=False):
        backward(loss_of(model, samples()))
    return same and unwrap(model) is model


@pytest.mark.parametrize("has_group", [True, False])
def test_alone_the_model_is_itself(has_group: bool) -> None:
    assert run_ranks(stay_alone, 1, has_group=has_group) == [True]


def wrap_for_a_device_without_a_backend() -> None:
    dist.init_process_group("cuda:gloo")
    wrap(build())


def test_a_group_that_does_not_serve_the_model_s_device_is_named() -> None:
    for outcome in try_ranks(wrap_for_a_device_without_a_backend, 2, has_group=False):
        assert "'0.weight' is on cpu, but the process group serves only cuda" in outcome.error
