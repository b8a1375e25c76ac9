"""Metrics go to whatever takes them: functions with the signatures of wandb's and MLflow's, as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.errors import EngineUseError


class WandbRun:
    """Like `wandb.Run`. Source: wandb, sdk/wandb_run.py, `Run.log`."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        assert commit is None
        self.lines.append((step, data))


class Mlflow:
    """Like the module `mlflow`. Source: MLflow 3, tracking/fluent.py, `log_metrics`."""

    def __init__(self) -> None:
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(  # noqa: PLR0917 - as MLflow has it
        self,
        metrics: dict[str, float],
        step: int | None = None,
        synchronous: bool | None = None,
        run_id: str | None = None,
        timestamp: int | None = None,
        model_id: str | None = None,
        dataset: object = None,
    ) -> None:
        assert (synchronous, run_id, timestamp, model_id, dataset) == (None,) * 5
        self.lines.append((step, metrics))


def test_both_get_every_line_with_its_step() -> None:
    run, mlflow = WandbRun(), Mlflow()
    with ddpcore.Engine(log_every="2 steps") as engine:
        engine.add_logger(run.log)
        engine.add_logger(mlflow.log_metrics)
        model = engine.wrap(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        batches = engine.loader(TensorDataset(torch.ones(20, 2)), global_batch_size=4)
        for batch in engine.steps(batches, until="5 steps"):
            for (inputs,) in batch.micro_batches():
                engine.backward(model(inputs).mean())
            engine.log(number=engine.step)
            engine.update(optimizer)

    assert run.lines == mlflow.lines
    assert [(step, line["number"]) for step, line in run.lines] == [(2, 0.5), (4, 2.5), (5, 4.0)]
    assert all({"goodput_frac", "step_ms"} <= set(line) for _, line in run.lines)
    run.lines[0][1]["number"] = 7.0
    assert mlflow.lines[0][1]["number"] == 0.5, "each has a dict of its own"


def test_what_takes_no_metrics_is_refused() -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match=r"logger=.*give a function"):
        engine.add_logger(WandbRun())  # type: ignore[arg-type] # that is the point
