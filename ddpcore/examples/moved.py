"""classic.py with ddpcore: torchrun --nproc-per-node 2 moved.py.

ddpcore/README.md goes through both.
"""

import sys

import torch
from torch import nn

import ddpcore
from ddpcore.examples.spirals import spirals  # your data

NUM_EPOCHS = 6
SHUFFLE = "--in-order" not in sys.argv


def main() -> None:
    """Train; every rank runs this."""
    with ddpcore.Engine(seed=0, log_dir="runs/moved", log_every="1 epoch") as engine:
        with ddpcore.local_master_first("data"):
            train_set = spirals(960, seed=1)

        torch.manual_seed(0)
        model = engine.wrap(nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_function = nn.CrossEntropyLoss()
        engine.schedule(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5), every="1 epoch")

        batches = engine.loader(train_set, global_batch_size=96, shuffle=SHUFFLE)

        if engine.checkpoint("runs/moved", every="25 steps", model=model, optimizer=optimizer) and engine.is_first:
            print(f"goes on from step {engine.step}")

        for batch in engine.steps(batches, until=f"{NUM_EPOCHS} epochs"):
            for points, arm in batch.micro_batches():
                loss = loss_function(model(points), arm)
                engine.backward(loss)
                engine.log(loss=loss)
            engine.update(optimizer, clip_norm=1.0)


if __name__ == "__main__":
    main()
