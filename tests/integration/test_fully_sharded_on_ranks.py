"""Models that `fully_shard` has sharded, in the engine on gloo ranks: they train as one process does, and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine.engine import Engine
from ddpcore.errors import EngineUseError, ModelMismatchError, WrapError
from ddpcore.parallel.wrapping import accumulate, wrap
from tests.support.warm_ranks import run_ranks, try_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_SAMPLES = 46
"""Batches of 8 leave 6 for the last one of an epoch: uneven shares, of three ranks too."""


def new_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def sharded(model: nn.Sequential, num: int) -> nn.Module:
    if num > 1:
        fully_shard(model[0])
        fully_shard(model)
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(NUM_SAMPLES, size, generator=generator, dtype=torch.float64) for size in (5, 1)))


def error_of(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"error": (model(inputs) - targets).square().mean(dim=1)}


def train(root: str, until: str, has_weights: bool) -> dict[str, Any]:
    """Train and return what has come of it, the same on every rank."""
    norms = []
    with Engine(seed=4) as engine:
        model = engine.wrap(sharded(new_model(), engine.placement.world_size))
        optimizer = torch.optim.AdamW(model.parameters(), 0.02)
        batches = engine.loader(data(), global_batch_size=8)
        is_resumed = engine.checkpoint(root, every="100 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(batches, until=until):
            for inputs, targets in batch.micro_batches(2):
                loss = (model(inputs) - targets).square().mean()
                engine.backward(loss, weight=len(inputs) if has_weights else None)
            norm = engine.update(optimizer, clip_norm=0.5)
            assert type(norm) is Tensor
            norms.append(norm.item())
        figures = engine.evaluate(model, TensorDataset(*data()[:7]), error_of, batch_size=1)
        weights = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).tolist()
            for name, value in model.state_dict().items()
        }
    return {"weights": weights, "figures": figures, "norms": norms, "is_resumed": is_resumed}


def largest_difference(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    differences: list[float] = [abs(found["figures"]["error"] - wanted["figures"]["error"])]
    differences += [abs(one - other) for one, other in zip(found["norms"], wanted["norms"], strict=True)]
    for name, value in wanted["weights"].items():
        differences.append((torch.tensor(found["weights"][name]) - torch.tensor(value)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("has_weights", [False, True])
def test_training_of_a_sharded_model_is_that_of_one_process_and_goes_on_at_another_world_size(
    tmp_path: Path, *, has_weights: bool
) -> None:
    first = train(str(tmp_path / "alone"), "9 steps", has_weights)
    second = train(str(tmp_path / "alone"), "3 epochs", has_weights)

    for two in run_ranks(train, 2, str(tmp_path / "ranks"), "9 steps", has_weights, has_group=False):
        assert largest_difference(two, first) < 1e-12
    for three in run_ranks(train, 3, str(tmp_path / "ranks"), "3 epochs", has_weights, has_group=False):
        assert three["is_resumed"]
        assert largest_difference(three, second) < 1e-12
    whole = new_model()
    assert ddpcore.load_checkpoint(tmp_path / "ranks", model=whole).fit.is_whole
    loaded = {name: value.tolist() for name, value in whole.state_dict().items()}
    assert largest_difference({**second, "weights": loaded}, second) < 1e-12


def accumulate_gradients() -> float:
    model = wrap(sharded(new_model(), 2))
    whole = new_model()
    parts: Sequence[Tensor] = data().tensors[0].chunk(4)
    for number, part in enumerate(parts):
        if number % 2 == dist.get_rank():
            with accumulate(model, is_last=number >= 2):
                model(part).sum().backward()
                if number < 2:
                    assert all(parameter.grad is None for parameter in model.parameters()), "reduced too early"
        whole(part).sum().backward()
    errors: list[float] = []
    for own, wanted in zip(model.parameters(), whole.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        errors.append((own.grad.full_tensor() * 2 - wanted.grad).abs().max().item())  # type: ignore[attr-defined] # DTensor's
    return max(errors)


def test_gradients_of_micro_batches_are_reduced_once() -> None:
    assert max(run_ranks(accumulate_gradients, 2)) < 1e-12


def wrap_wrongly(kind: str) -> None:
    model = new_model()
    match kind:
        case "a part":
            fully_shard(model[0])
            wrap(model)
        case "with options of DDP":
            wrap(sharded(model, 2), static_graph=True, comm_hook="fp16")
        case "on one rank":
            wrap(sharded(model, 2) if dist.get_rank() else model)
        case "the older wrapper":
            wrap(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
        case _:
            dist.destroy_process_group()
            with Engine() as engine:
                engine.ema(engine.wrap(sharded(model, 2)))


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("a part", WrapError, "its part '0' is fully sharded and the whole is not"),
        ("with options of DDP", WrapError, "comm_hook, static_graph: these are DistributedDataParallel's"),
        ("on one rank", ModelMismatchError, "fully sharded"),
        ("the older wrapper", WrapError, "it is wrapped in FullyShardedDataParallel"),
        ("an average", EngineUseError, "a fully sharded model cannot be copied"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(kind: str, error: type[Exception], text: str) -> None:
    for outcome in try_ranks(wrap_wrongly, 2, kind):
        assert outcome.error_type.endswith(error.__name__), outcome.trace
        assert text in outcome.error
