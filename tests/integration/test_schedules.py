"""Learning rates' schedules that the engine steps: resumed where they were, and not stepped where no weight moved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.errors import EngineUseError
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer

DATA = TensorDataset(torch.ones(24, 1))
STEPS_PER_EPOCH = 3

SCHEDULES: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 7]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.8)], [4]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, 0.5, 3), lr_scheduler.ExponentialLR(optimizer, 0.9)], optimizer
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
}


def train(directory: Path, kind: str, until: str, every: str | None = None, *, is_last: bool = False) -> list[float]:
    """Return the learning rate of each step; with `is_last` the schedule is made after the checkpoint."""
    rates = []
    with ddpcore.Engine() as engine:
        model = engine.wrap(nn.Linear(1, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if is_last:
            engine.checkpoint(directory, every="100 steps", model=model, optimizer=optimizer)
        engine.schedule(SCHEDULES[kind](optimizer), every=every, metric="val" if kind == "plateau" else None)
        if not is_last:
            engine.checkpoint(directory, every="100 steps", model=model, optimizer=optimizer)
        for batch in engine.steps(engine.loader(DATA, global_batch_size=8), until=until):
            rates.append(optimizer.param_groups[0]["lr"])
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            engine.log(val=1.0 + (engine.placement.rank if engine.step % 3 else 0.0))
    return rates


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_resumed_schedule_goes_on_where_it_was(tmp_path: Path, kind: str, *, is_last: bool) -> None:
    through = train(tmp_path / "through", kind, "9 steps")
    parts = [
        *train(tmp_path / "parts", kind, "4 steps", is_last=is_last),
        *train(tmp_path / "parts", kind, "9 steps", is_last=is_last),
    ]

    assert parts == through
    assert len(set(through)) > 2


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_in_torchs_own_loop_has_the_same_rates(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = SCHEDULES["one cycle"](optimizer)
    expected = []
    for _ in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    assert train(tmp_path, "one cycle", "9 steps") == expected


def test_a_schedule_may_count_epochs(tmp_path: Path) -> None:
    rates = train(tmp_path, "lambda", "3 epochs", every="1 epoch")
    assert rates == pytest.approx([0.1 * 0.9 ** (step // STEPS_PER_EPOCH) for step in range(9)])


def rates_on_ranks(directory: str) -> list[float]:
    from pathlib import Path  # noqa: PLC0415 - in the ranks

    return train(Path(directory), "plateau", "9 steps")


def test_a_plateau_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    """The ranks' own values differ: on rank 1 every third is better than those before."""
    first, second = run_ranks(rates_on_ranks, 2, str(tmp_path), has_group=False)
    assert first == second
    assert first[-1] < first[0]


def overflow(optimizer_options: dict[str, Any]) -> list[tuple[float, bool]]:
    """Return the learning rate of each step, and whether the weight has moved in it."""
    seen = []
    with ddpcore.Engine(precision="fp16") as engine:
        linear = nn.Linear(1, 1, bias=False)
        model = engine.wrap(linear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer_options)
        engine.schedule(lr_scheduler.ExponentialLR(optimizer, 0.5))
        for batch in engine.steps(engine.loader(DATA, global_batch_size=8), until="5 steps"):
            rate, before = optimizer.param_groups[0]["lr"], linear.weight.item()
            for (inputs,) in batch.micro_batches():
                loss = model(inputs).mean()
                engine.backward(loss * (math.inf if engine.step in (1, 2) else 1.0))
            engine.update(optimizer, clip_norm=1.0 if engine.step == 2 else None)
            seen.append((rate, linear.weight.item() != before))
    return seen


@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_a_step_that_overflow_leaves_out_steps_no_schedule(options: dict[str, Any]) -> None:
    rates, moved = zip(*overflow(options), strict=True)
    assert moved == (True, False, False, True, True)
    assert rates == pytest.approx((0.1, 0.05, 0.05, 0.05, 0.025))


def test_two_optimizers_have_schedules_of_their_own() -> None:
    with ddpcore.Engine() as engine:
        models = [engine.wrap(nn.Linear(1, 1)) for _ in range(2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        for number, optimizer in enumerate(optimizers):
            engine.schedule(lr_scheduler.ExponentialLR(optimizer, 0.5), name=f"schedule {number}")
        for batch in engine.steps(engine.loader(DATA, global_batch_size=8), until="4 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(models[0](inputs).mean() + models[1](inputs).mean())
            engine.update(optimizers[0])
            if engine.is_due("2 steps"):
                engine.update(optimizers[1])
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.5**4, 0.5**2]


def test_what_makes_no_sense_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    plateau, plain = lr_scheduler.ReduceLROnPlateau(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)
    with ddpcore.Engine() as engine:
        with pytest.raises(EngineUseError, match="is for ReduceLROnPlateau alone"):
            engine.schedule(plateau)
        with pytest.raises(EngineUseError, match="is for ReduceLROnPlateau alone"):
            engine.schedule(plain, metric="val")
        with pytest.raises(EngineUseError, match="is for ReduceLROnPlateau alone"):
            engine.schedule(plateau, metric="val", every="1 epoch")
        engine.schedule(plain)
        with pytest.raises(EngineUseError, match="there is a part called 'schedule schedule' already"):
            engine.schedule(plain)
