"""The engine on GPUs: a rank for each, NCCL for gradients, gloo for agreement."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ddpcore
from tests.support.gpus import NUM_GPUS, needs_gpu
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.ranks, needs_gpu]

NUM_SAMPLES = 256


def squared_errors(model: nn.Module, batch: list[Tensor]) -> dict[str, Tensor]:
    inputs, targets = batch
    return {"error": (model(inputs) - targets).square().mean(1)}


def train_on_gpu(directory: str, precision: str, until: str) -> tuple[str, int, float]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 16, generator=generator)
    data = TensorDataset(inputs, inputs.flip(1))
    with ddpcore.Engine(seed=0, precision=precision, log_dir=f"{directory}/log", log_every="4 steps") as engine:
        model = engine.wrap(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        average = engine.ema(model, decay=0.5)
        batches = engine.loader(data, global_batch_size=32, num_workers=1)
        engine.checkpoint(
            f"{directory}/checkpoints", every="1 epoch", model=model, optimizer=optimizer, average=average
        )
        for batch in engine.steps(batches, until=until):
            for inputs, targets in batch.micro_batches(2):
                with engine.autocast():
                    loss = nn.functional.mse_loss(model(inputs), targets)
                engine.backward(loss)
                engine.log(loss=loss)
            engine.update(optimizer, clip_norm=1.0)
        error = engine.evaluate(average, data, squared_errors, batch_size=64)["error"]
        return engine.device.type, engine.step, error


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_saves_and_goes_on(tmp_path: Path, precision: str) -> None:
    world_size = min(2, NUM_GPUS)

    first = run_ranks(train_on_gpu, world_size, str(tmp_path), precision, "2 epochs", has_group=False, timeout_s=120)
    second = run_ranks(train_on_gpu, world_size, str(tmp_path), precision, "6 epochs", has_group=False, timeout_s=120)

    assert {(device, step) for device, step, _ in first} == {("cuda", 16)}
    assert {(device, step) for device, step, _ in second} == {("cuda", 48)}
    assert second[0][2] < first[0][2]
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(4, 52, 4))
