"""A training program that says which samples it has used, and what is made of that."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

BATCH = 24
STEPS = 1000
COUNTING = f"""
import os, socket, sys, time
import torch
from torch import nn
from torch.utils.data import Dataset

import ddpcore

class Numbers(Dataset):
    def __len__(self):
        return {BATCH * STEPS}

    def __getitem__(self, index):
        return index, torch.ones(2)

assert sys.argv[1:] == ["--steps", "as many as it takes"]
print("begins on", socket.gethostname())
with ddpcore.Engine(seed=0, log_every="1 epoch") as engine:
    model = engine.wrap(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = engine.loader(Numbers(), global_batch_size=int(os.environ["BATCH"]))
    engine.checkpoint("checkpoints", every="1000 steps", model=model, optimizer=optimizer)
    with open(f"seen-{{socket.gethostname()}}-{{os.getpid()}}-{{time.time_ns()}}", "w", buffering=1) as seen:
        for batch in engine.steps(batches, until="1 epoch"):
            indices = []
            for share, inputs in batch.micro_batches(1):
                indices += share.tolist()
                engine.backward(model(inputs).mean())
            engine.update(optimizer)
            time.sleep(0 if os.path.exists("hurry") else 0.3)
            if batch.num_samples:
                print(engine.step, *indices, file=seen)
"""
"""Takes its time until it is told to hurry."""


def uses_of_samples(project: Path) -> Counter[int]:
    """Return how often each sample was used."""
    lines = [line.split() for path in project.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter(int(index) for line in lines for index in line[1:])
