"""Metrics go to whatever takes them: functions with the signatures of wandb's and MLflow's, as they are."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ddpcore
from ddpcore.engine.cadence import Cadence, Progress, Unit
from ddpcore.engine.metrics.lines import MetricLines, _kept
from ddpcore.engine.metrics.log import METRICS_FILE
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from pathlib import Path


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


def log_steps(directory: str | Path, until: str = "5 steps") -> None:
    with ddpcore.Engine(log_dir=directory, log_every="1 step") as engine:
        engine.log(before=1.0)
        for _ in engine.steps(engine.loader(TensorDataset(torch.ones(20, 2)), global_batch_size=4), until=until):
            engine.log(number=engine.step)
        engine.log(after=2.0)


def lines_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]


def test_a_home_directory_is_found_as_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    log_steps("~/logs")
    assert len(lines_in(tmp_path / "logs")) == 6

    with pytest.raises(EngineUseError, match="written to ~nobody-at-all/logs: Could not determine home"):
        log_steps("~nobody-at-all/logs")


def test_what_is_logged_before_the_first_step_counts_too(tmp_path: Path) -> None:
    for _ in range(2):
        # The second time there are no steps to do: what is measured after them counts all the same.
        log_steps(tmp_path)
    assert [line["before"] for line in lines_in(tmp_path) if "before" in line] == [1.0, 1.0]
    assert [line["after"] for line in lines_in(tmp_path) if "after" in line] == [2.0, 2.0]


@pytest.mark.parametrize("name", ["step", "epoch", "wall_time", "step_ms", "goodput_frac"])
def test_what_a_line_says_by_itself_is_not_replaced(name: str) -> None:
    with ddpcore.Engine() as engine, pytest.raises(EngineUseError, match=f"{name} stands in every line"):
        engine.log(**{name: 3.0})


def test_a_pipe_in_place_of_the_file_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / METRICS_FILE)
    with pytest.raises(EngineUseError, match="metrics cannot be written to"):
        log_steps(tmp_path)


def test_a_full_disk_costs_lines_of_metrics_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_steps(tmp_path)
    (tmp_path / METRICS_FILE).rename(tmp_path / "kept")
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    log_steps(tmp_path)

    (message,) = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert message == f"training goes on without metrics in {tmp_path}: No space left on device"


def test_the_loss_that_is_reported_is_of_the_step_beside_it() -> None:
    lines, seen = MetricLines(None, None, Cadence(2, Unit.STEP)), []
    lines.begin(Progress(0, 0))
    for step in range(1, 8):
        if step < 6:
            lines.take("loss", float(step), 1)
        lines.at_boundary(Progress(step - 1, 0), Progress(step, 0), lambda: 1.0)
        seen.append((lines.loss, lines.loss_step))

    own = [(float(step), step) for step in range(1, 6)]
    assert seen == [*own, own[-1], (5.0, 6)], "a line's mean counts where a step has none of its own"


@pytest.mark.parametrize(("dtype", "kept"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_a_value_on_an_accelerator_is_kept_in_a_type_that_holds_sums(dtype: torch.dtype, kept: torch.dtype) -> None:
    value = _kept("loss", torch.empty(1, dtype=dtype, device="meta"))

    assert isinstance(value, torch.Tensor)
    assert value.dtype == kept
