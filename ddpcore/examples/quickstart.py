"""A whole training program: torchrun --nproc-per-node 4 quickstart.py. Started again, it goes on where it was."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import ddpcore
from ddpcore.examples.spirals import is_right, spirals  # your data, and what you measure

with ddpcore.Engine(seed=0, precision="bf16", log_dir="runs/spirals", log_every="1 epoch") as engine:
    model = engine.wrap(nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = engine.ema(model, decay=0.98)
    batches = engine.loader(spirals(6000, seed=1), global_batch_size=96)
    engine.checkpoint("runs/spirals", every="100 steps", model=model, optimizer=optimizer, average=average)
    for batch in engine.steps(batches, until="8 epochs"):
        for points, arm in batch.micro_batches(2):
            with engine.autocast():
                loss = cross_entropy(model(points), arm)
            engine.backward(loss)
            engine.log(loss=loss)
        engine.update(optimizer, clip_norm=1.0)
        if engine.is_due("1 epoch"):
            engine.log(**engine.evaluate(average, spirals(999, seed=2), is_right, batch_size=256))
    if engine.is_first:
        print(f"trained for {engine.step} steps, see runs/spirals/metrics.jsonl")
