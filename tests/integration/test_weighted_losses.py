"""Losses with weights on real gloo ranks: the gradient of the mean over all tokens, as one process computes it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.examples import lines
from ddpcore.parallel import PowerSGD
from ddpcore.samplers import ElasticBatchSampler, ShuffledOrder
from tests.support.token_language import (
    GLOBAL_BATCH,
    SEED,
    NextToken,
    Sentences,
    flat,
    mean_loss,
    summed_loss,
    train,
    train_plainly,
)
from tests.support.warm_ranks import run_ranks, try_ranks


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train_plainly()


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (1, {"num_parts": 5, "kind": Tensor}),
        (2, {"kind": float}),
        (4, {"num_parts": 3, "kind": Tensor}),
        (3, {"rank_weights": [1, 4, 7], "num_parts": 2}),
        (4, {"rank_weights": [0, 1, 1, 1]}),
        (3, {"rank_weights": [0, 1, 6], "num_parts": 3, "wrap": {"static_graph": True}}),
        (2, {"kind": Tensor, "factor": 10**9}),
        (3, {"num_parts": 2, "wrap": {"comm_hook": PowerSGD(start_iter=10**6, use_error_feedback=False)}}),
    ],
)
def test_any_ranks_and_micro_batches_give_one_processs_gradient_over_tokens(
    alone: dict[str, Any], world_size: int, options: dict[str, Any]
) -> None:
    for rank in run_ranks(train, world_size, options, has_group=False):
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-12)
        assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-12)
        assert len(rank["norms"]) == 15


@pytest.mark.parametrize(("comm_hook", "accuracy"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_on_the_way_is_not_spoilt_by_millions_of_tokens(
    alone: dict[str, Any], comm_hook: str, accuracy: float
) -> None:
    options = {"dtype": torch.float32, "kind": Tensor, "factor": 10**7, "wrap": {"comm_hook": comm_hook}}
    for rank in run_ranks(train, 2, options, has_group=False):
        assert rank["norms"][0] == pytest.approx(alone["norms"][0], rel=accuracy)
        assert all(map(math.isfinite, rank["norms"]))


def test_scaled_losses_are_unscaled_weighted_and_then_clipped(alone: dict[str, Any]) -> None:
    (rank,) = run_ranks(train, 1, {"precision": "fp16", "dtype": torch.float32, "num_parts": 2}, has_group=False)
    assert rank["norms"] == pytest.approx(alone["norms"], rel=1e-3)


def add_up_over_steps() -> tuple[Tensor, Tensor]:
    """Return the gradient of two steps before one update, and what it should be."""
    with ddpcore.Engine(seed=SEED) as engine:
        model = engine.wrap(NextToken().double())
        reference = copy.deepcopy(ddpcore.unwrap(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        before = flat(ddpcore.unwrap(model))
        data = Sentences(24)
        for batch in engine.steps(engine.loader(data, global_batch_size=GLOBAL_BATCH), until="1 epoch"):
            for tokens in batch.micro_batches(2):
                loss, num_tokens = mean_loss(model, tokens)
                engine.backward(loss, weight=int(num_tokens))
            if engine.is_due("2 steps"):
                engine.update(optimizer)
        total, num_tokens = summed_loss(reference, data.tokens)
        (total / num_tokens).backward()  # type: ignore[no-untyped-call]
        expected = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None])
        return before - flat(ddpcore.unwrap(model)), expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_without_an_update_add_up_to_one_mean(world_size: int) -> None:
    for moved, expected in run_ranks(add_up_over_steps, world_size, has_group=False):
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-14)


def two_models_in_turn() -> list[float]:
    """Train two models in one step, each with weights of its own, and one in later steps without any."""
    with ddpcore.Engine(seed=SEED) as engine:
        models = [engine.wrap(nn.Linear(1, 1, bias=False).double()) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        starts = [flat(model).item() for model in models]
        data = TensorDataset(torch.arange(1.0, 5.0, dtype=torch.float64).unsqueeze(1))
        moved = []
        for batch in engine.steps(engine.loader(data, global_batch_size=4), until="2 epochs"):
            for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                for (inputs,) in batch.micro_batches(2):
                    weights = (inputs if number else inputs.square()).sum()
                    loss = model(inputs).mean()
                    engine.backward(loss, weight=weights if engine.step == 0 else None)
                engine.update(optimizer)
                moved.append(starts[number] - flat(model).item())
                starts[number] = flat(model).item()
        return moved


def test_each_update_divides_by_its_own_weights_and_a_later_step_needs_none() -> None:
    (moved,) = run_ranks(two_models_in_turn, 1, has_group=False)
    # Two micro-batches of two samples each: means of inputs by squares and by sums, and then by samples.
    assert moved[2:] == pytest.approx([2.5, 2.5])
    assert moved[0] != pytest.approx(moved[1])
    assert all(1.5 <= one <= 3.5 for one in moved)


def all_weights_zero() -> float:
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(1, 1, bias=False))
        before = flat(ddpcore.unwrap(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = engine.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=4)
        for batch in engine.steps(batches, until="1 step"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean(), weight=0)
            engine.update(optimizer)
        return (flat(ddpcore.unwrap(model)) - before).item()


def test_a_batch_of_no_weight_has_gradient_zero() -> None:
    assert run_ranks(all_weights_zero, 2, has_group=False) == [0.0, 0.0]


def train_lines(num_parts: int) -> Tensor:
    with ddpcore.Engine(seed=0) as engine:
        return flat(ddpcore.unwrap(lines.train(engine, 4, num_parts, torch.float64)))


def train_lines_plainly() -> Tensor:
    """The example in one process without the engine's steps: each batch in one backward of the mean over its bytes."""
    with ddpcore.Engine(seed=0):
        model = lines.NextByte().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = lines.Lines()
    sampler = ElasticBatchSampler(ShuffledOrder(len(data), 0), lines.GLOBAL_BATCH, rank=0, num_replicas=1)
    for _, indices in zip(range(4), sampler, strict=False):
        batch = lines.padded([data[index] for index in indices])
        loss = cross_entropy(model(batch).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=lines.PADDING)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sampler.finish_step()
    return flat(model)


def test_the_example_with_lines_of_different_lengths_gives_one_processs_weights() -> None:
    expected = train_lines_plainly()
    for world_size, num_parts in [(1, 3), (3, 2)]:
        for weights in run_ranks(train_lines, world_size, num_parts, has_group=False):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)


# ---- wrong use: one clear error on every rank


def use_badly(how: str) -> None:
    with ddpcore.Engine(timeout_s=20.0) as engine:
        is_odd = engine.placement.rank == 1
        wrap_options: dict[str, Any] = {"comm_hook": "powersgd"} if how == "powersgd" else {}
        model = engine.wrap(nn.Linear(1, 1), **wrap_options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = engine.loader(TensorDataset(torch.ones(16, 1)), global_batch_size=8)
        for batch in engine.steps(batches, until="2 steps"):
            for number, (inputs,) in enumerate(batch.micro_batches(2)):
                weight: Any = {"negative": -1, "nan": math.nan, "vector": torch.ones(2)}.get(how, 2)
                if (how == "mixed micro-batches" and number) or "without weights" in how:
                    weight = None
                if how == "one rank without" and engine.step and is_odd:
                    weight = None
                if how == "one rank with, first" and is_odd:
                    weight = None
                engine.backward(model(inputs).mean(), weight=weight)
                if how == "twice":
                    engine.backward(model(inputs).mean(), weight=weight)
                if how.startswith("early update"):
                    engine.update(optimizer)
                if how.startswith("left early"):
                    break
            if how == "own step":
                optimizer.step()
            else:
                engine.update(optimizer)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("negative", "EngineUseError: weight=-1 makes no sense: give a finite number, 0 or more"),
        ("nan", "EngineUseError: weight=nan makes no sense"),
        ("vector", "EngineUseError: weight=tensor([1., 1.]) makes no sense"),
        ("mixed micro-batches", "EngineUseError: losses with and without weight before one update"),
        ("one rank without", "EngineUseError: rank 1: has called backward without a weight: give every backward"),
        ("twice", "EngineUseError: a second backward with a weight in one micro-batch"),
        ("early update", "EngineUseError: update before the last micro-batch"),
        ("early update without weights", "EngineUseError: update before the last micro-batch"),
        ("left early without weights", "EngineUseError: update before the last micro-batch"),
        ("own step", "EngineUseError: an optimizer has stepped without engine.update"),
        ("powersgd", "EngineUseError: backward with a weight does not go with PowerSGD's error feedback"),
    ],
)
def test_wrong_use_is_one_clear_error_on_every_rank(how: str, message: str) -> None:
    outcomes = try_ranks(use_badly, 2, how, has_group=False)
    assert [outcome.error[: len(message)] for outcome in outcomes] == [message] * 2


def test_a_rank_that_brings_no_weight_to_the_first_step_is_named() -> None:
    outcomes = try_ranks(use_badly, 2, "one rank with, first", has_group=False)
    expected = "BarrierDeadlockError: exchange 'weights of losses' can never be passed: rank 1 waits in all_reduce"
    assert outcomes[0].error[: len(expected)] == expected
    assert outcomes[1].error
