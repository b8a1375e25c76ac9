"""A training of the engine that takes a step every 20 ms and hardly any CPU: paced_engine.py CHECKPOINT_DIR [STEPS]."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import ddpcore

STEP_S = 0.02


def main() -> None:
    """Train; every rank runs this."""
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    with ddpcore.Engine(seed=0) as engine:
        model = engine.wrap(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        batches = engine.loader(torch.utils.data.TensorDataset(torch.ones(64, 4)), global_batch_size=8)
        engine.checkpoint(sys.argv[1], every="1000000 steps", model=model, optimizer=optimizer)
        if engine.step:
            print(f"goes on from step {engine.step}", flush=True)
        for batch in engine.steps(batches, until=f"{num_steps} steps"):
            for (points,) in batch.micro_batches(1):
                loss = model(points).square().mean()
                engine.backward(loss)
                engine.log(loss=loss)
            engine.update(optimizer)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
