"""An ordinary DDP program that never heard of rankdeck: three gloo ranks which wait for each other in every way.

Each `linger` lasts until the test creates a file of that name in the working directory.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

GATES = Path.cwd()


def linger(name: str) -> None:
    """Stay away from the meeting until the test has seen enough."""
    while not (GATES / name).exists():
        time.sleep(0.02)  # LINGERS HERE


def train(rank: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(torch.ones(2, 8)).sum()
    if rank == 1:
        linger("backward")
    loss.backward()  # WAITS IN BACKWARD
    optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    for _ in range(3):
        dist.all_reduce(torch.ones(3, 2))
    train(rank)

    if rank == 1:
        linger("barrier")
    dist.barrier()  # WAITS IN BARRIER

    if rank == 2:
        linger("subgroup")
    if rank in (0, 2):
        dist.all_reduce(torch.ones(5), group=pair)  # WAITS IN SUBGROUP

    if rank == 0:
        dist.recv(torch.ones(1), src=1)  # WAITS IN RECEIVE
    elif rank == 1:
        linger("send")
        dist.send(torch.ones(1), dst=0)
    dist.barrier()

    if rank == 1:
        raise ValueError("boom")
    linger("never")


if __name__ == "__main__":
    main()
