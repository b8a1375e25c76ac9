"""A DDP program without ddpcore: torchrun --nproc-per-node 2 classic.py.

moved.py is the same program with ddpcore; ddpcore/README.md goes through both.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddpcore.examples.spirals import spirals  # your data

NUM_EPOCHS = 6
SHUFFLE = "--in-order" not in sys.argv
SAVED = Path("classic.pt")


@contextmanager
def torch_distributed_zero_first(local_rank: int) -> Iterator[None]:
    """Let the first rank of each node do what stands in the block before its other ranks."""
    if local_rank != 0:
        dist.barrier()
    yield
    if local_rank == 0:
        dist.barrier()


def main() -> None:
    """Train; every rank runs this."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    with torch_distributed_zero_first(local_rank):
        train_set = spirals(960, seed=1)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 3)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loss_function = nn.CrossEntropyLoss()

    sampler: DistributedSampler[int] = DistributedSampler(train_set, shuffle=SHUFFLE, seed=0)
    loader = DataLoader(train_set, batch_size=48, sampler=sampler)

    first_epoch = 0
    if SAVED.exists():
        saved = torch.load(SAVED, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        first_epoch = saved["epoch"]

    for epoch in range(first_epoch, NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for points, arm in loader:
            loss = loss_function(model(points.to(device)), arm.to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()

        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "schedule": schedule.state_dict(), "epoch": epoch + 1}, SAVED)
            print(f"epoch {epoch + 1} is saved")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
