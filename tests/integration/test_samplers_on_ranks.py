"""Samplers on real gloo ranks: the same training whatever the ranks, workers and shares are, and exact evaluation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.evaluation import EvaluationSampler
from ddpcore.samplers.order import SequentialOrder, ShuffledOrder
from ddpcore.samplers.sampler_agreement import check_same_everywhere, make_same_everywhere
from ddpcore.samplers.shares import loss_factor
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SAMPLES, BATCH = 103, 24


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 8, generator=generator, dtype=torch.float64),
        torch.randn(NUM_SAMPLES, 1, generator=generator, dtype=torch.float64),
        torch.arange(NUM_SAMPLES),
    )


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@dataclass(frozen=True)
class Leg:
    """A part of a run: so many ranks, with these shares, for so many steps."""

    weights: list[int]
    num_steps: int
    num_workers: int = 0

    @property
    def world_size(self) -> int:
        return len(self.weights)


def train(leg: Leg, state: dict[str, Any] | None) -> dict[str, Any]:
    """Train from a state for the steps of a leg; return the new state, the samples seen and the gradients."""
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), 5e-3)
    sampler = ElasticBatchSampler(ShuffledOrder(NUM_SAMPLES, seed=3), BATCH, weights=leg.weights)
    if state is not None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(json.loads(state["sampler"]))
    check_same_everywhere(sampler)
    model: nn.Module = DistributedDataParallel(module) if leg.world_size > 1 else module
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=leg.num_workers)
    seen: list[list[int]] = []
    gradients = []
    while len(seen) < leg.num_steps:
        for x, y, index in loader:
            share = sampler.share
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            weighted_loss = loss * loss_factor(share.num_local, share.num_global, leg.world_size)
            weighted_loss.backward()  # type: ignore[no-untyped-call] # torch's
            gradients.append(flat([parameter.grad for parameter in module.parameters() if parameter.grad is not None]))
            optimizer.step()
            sampler.finish_step()
            seen.append(index.tolist() if share.num_local else [])
            if len(seen) == leg.num_steps:
                break
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sampler": json.dumps(sampler.state_dict()),
        "seen": seen,
        "gradients": torch.stack(gradients),
    }


def run(legs: Sequence[Leg]) -> dict[str, Any]:
    """Train leg by leg, each with ranks of its own; return the last state, with all global batches and gradients."""
    state: dict[str, Any] | None = None
    batches: list[list[int]] = []
    gradients: list[Tensor] = []
    for leg in legs:
        states = run_ranks(train, leg.world_size, leg, state)
        for other in states[1:]:
            assert other["sampler"] == states[0]["sampler"]
            assert torch.equal(other["gradients"], states[0]["gradients"])
        state = states[0]
        batches += [list(chain.from_iterable(shares)) for shares in zip(*(one["seen"] for one in states), strict=True)]
        gradients.append(state["gradients"])
    assert state is not None
    return {**state, "batches": batches, "gradients": torch.cat(gradients)}


def largest_difference(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max()).item())


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """The run that all others must equal: one process, 40 steps over eight epochs."""
    return run([Leg([1], 40)])


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([Leg([6, 6, 6, 6], 40)], id="even"),
        pytest.param([Leg([3, 5, 7, 9], 40)], id="uneven"),
        pytest.param([Leg([0, 8, 8, 8], 40)], id="one rank without a share"),
        pytest.param([Leg([1, 1, 1, 21], 40)], id="nearly all on one"),
        pytest.param([Leg([6, 6, 6, 6], 7), Leg([4, 8, 12], 11), Leg([20, 4], 22)], id="4, 3, 2 ranks"),
        pytest.param([Leg([1, 1], 3, num_workers=2), Leg([1] * 3, 37)], id="workers ahead when stopped"),
    ],
)
def test_gradients_and_weights_are_those_of_one_process(alone: dict[str, Any], legs: list[Leg]) -> None:
    together = run(legs)

    assert together["batches"] == alone["batches"]
    assert json.loads(together["sampler"]) == json.loads(alone["sampler"])
    assert largest_difference(together["gradients"], alone["gradients"]) < 1e-12
    model, of_one = (flat(list(result["model"].values())) for result in (together, alone))
    assert largest_difference(model, of_one) < 1e-12


def evaluate(num_samples: int) -> tuple[float, float, list[int]]:
    x, y, _ = dataset()[:num_samples]
    some = TensorDataset(x, y, torch.arange(num_samples))
    # A model with buffers, which DDP would broadcast in its next forward: the trap that exact evaluation must avoid.
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), network()).double())
    model(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
    module = model.module.eval()
    sums, seen = torch.zeros(2, dtype=torch.float64), []
    with torch.no_grad():
        for inputs, targets, index in DataLoader(some, batch_size=2, sampler=EvaluationSampler(some)):
            sums += torch.stack([((module(inputs) - targets) ** 2).sum(), torch.tensor(len(index))])
            seen += index.tolist()
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]), float(sums[1]), seen


@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_evaluation_counts_each_sample_once_also_with_fewer_samples_than_ranks(num_samples: int) -> None:
    of_four, of_one = run_ranks(evaluate, 4, num_samples), run_ranks(evaluate, 1, num_samples)

    assert [index for _, _, seen in of_four for index in seen] == list(range(num_samples))
    for mean, count, _ in of_four:
        assert count == num_samples
        assert mean == pytest.approx(of_one[0][0], rel=1e-12)


def check_lengths(lengths: list[int]) -> None:
    make_same_everywhere(lambda: ElasticBatchSampler(SequentialOrder(lengths[dist.get_rank()]), 8))


def check_seeds(seeds: list[int]) -> None:
    check_same_everywhere(ElasticBatchSampler(ShuffledOrder(100, seeds[dist.get_rank()]), 8))


def check_explicit_rank() -> None:
    check_same_everywhere(ElasticBatchSampler(SequentialOrder(100), 8, rank=0, num_replicas=2))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (check_lengths, ([1000, 1000, 999],), "num_samples is 1000 on ranks 0-1, 999 on rank 2"),
        (check_lengths, ([1000, 0, 1000],), "rank 1: the data set has 0 samples"),
        (check_lengths, ([0, 0, 0],), "the data set has 0 samples: there is nothing to iterate over"),
        (check_lengths, ([2, 2, 2],), "a data set of 2 samples leaves 1 of 3 ranks"),
        (check_seeds, ([5, 5, 6],), "seed is 5 on ranks 0-1, 6 on rank 2"),
        (check_explicit_rank, (), "nobody takes the samples of rank 1"),
    ],
)
def test_ranks_whose_data_does_not_fit_together_all_say_the_same(
    function: Any, args: tuple[Any, ...], message: str
) -> None:
    outcomes = try_ranks(function, 3, *args)

    assert all(message in outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    assert len({outcome.error for outcome in outcomes}) == 1
    assert all(outcome.error_type.startswith("ddpcore.errors.") for outcome in outcomes)
