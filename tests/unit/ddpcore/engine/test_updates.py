from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine.updates import moving_average
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("index", torch.arange(5000))
        self.register_buffer("mean", torch.zeros(2))


@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_numbers_are_averaged_and_whole_ones_copied(decay: float) -> None:
    model = Indexed()
    average = moving_average(model, decay)
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.add_(1.0)
        model.get_buffer("mean").add_(2.0)
    average.update_parameters(model)

    state = average.module.state_dict()
    assert state["weight"].tolist() == pytest.approx([1 - decay] * 3, rel=1e-3)
    assert state["mean"].tolist() == pytest.approx([2 * (1 - decay)] * 2, rel=1e-3)
    assert torch.equal(state["index"], model.get_buffer("index"))


def train(precision: str, how: str, make: Callable[..., Any] = torch.optim.SGD) -> torch.Tensor:
    """Return the weight after two steps, in which the program does something unusual."""
    with ddpcore.Engine(precision=precision) as engine:
        model = engine.wrap(nn.Linear(1, 1))
        optimizer, other = make(model.parameters(), lr=0.1), make(nn.Linear(1, 1).parameters(), lr=0.1)
        for batch in engine.steps(engine.loader(TensorDataset(torch.ones(8, 1)), global_batch_size=4), until="2 steps"):
            for _ in range(2 if how == "two rounds" else 1):
                for (inputs,) in batch.micro_batches(2):
                    loss = model(inputs).mean()
                    if how == "own backward":
                        loss.backward()
                    elif how != "nothing":
                        engine.backward(loss)
                clip_norm = 1.0 if how == "clipped" else None
                if how == "another one":
                    engine.update(other, clip_norm=1.0)
                engine.update(optimizer, clip_norm=clip_norm)
            if how == "twice":
                engine.update(optimizer, clip_norm=1.0)
        return next(model.parameters()).detach().clone()


@pytest.mark.parametrize("how", ["twice", "nothing", "another one", "clipped"])
def test_an_update_without_gradients_does_nothing_in_any_precision(how: str) -> None:
    assert torch.allclose(train("fp16", how), train("fp32", how))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("two rounds", "a second update of one optimizer in a step"),
        ("own backward", r"call engine\.backward\(loss\) in place of"),
    ],
)
def test_what_a_scaled_loss_forbids_is_said(how: str, words: str) -> None:
    train("fp32", how)
    with pytest.raises(EngineUseError, match=words):
        train("fp16", how)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_optimizer_that_runs_forward_itself_is_refused(precision: str) -> None:
    with pytest.raises(EngineUseError, match="LBFGS calls forward and backward itself"):
        train(precision, "as usual", torch.optim.LBFGS)


@pytest.mark.parametrize(("makes", "num_parts"), [(nn.SyncBatchNorm, 4), (nn.BatchNorm1d, 2)])
def test_a_model_whose_forward_meets_other_ranks_runs_it_equally_often_on_each(
    makes: Callable[..., nn.Module], num_parts: int
) -> None:
    parts: list[Any] = []
    with ddpcore.Engine() as engine:
        engine.wrap(nn.Sequential(makes(1)))
        for batch in engine.steps(engine.loader(TensorDataset(torch.ones(2, 1)), global_batch_size=2), until="1 step"):
            parts = list(batch.micro_batches(4))

    assert len(parts) == num_parts


def test_a_program_that_ends_by_sys_exit_after_its_steps_has_its_last_line_of_metrics(tmp_path: Path) -> None:
    def program() -> None:
        with ddpcore.Engine(log_dir=tmp_path, log_every="1000 steps") as engine:
            model = engine.wrap(nn.Linear(1, 1))
            for batch in engine.steps(
                engine.loader(TensorDataset(torch.ones(4, 1)), global_batch_size=4), until="1 step"
            ):
                for (inputs,) in batch.micro_batches():
                    engine.backward(model(inputs).mean())
            engine.log(accuracy=0.5)
            sys.exit(0)

    with pytest.raises(SystemExit):
        program()
    assert '"accuracy":0.5' in (tmp_path / "metrics.jsonl").read_text().replace(" ", "")
