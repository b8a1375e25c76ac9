"""Trains until a file says how to go on: spawns its own ranks, or is one that a launcher has started.

Arguments: `spawn` or `env`, a directory, a port. The file `end` there ends it, `boom` is raised by rank 1.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def train(rank: int, how: str, directory: Path, port: int) -> None:
    if how == "spawn":
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    has_ended = torch.zeros(1)
    while not has_ended.item():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if (directory / "boom").exists() and dist.get_rank() == 1:
            raise ValueError("boom")
        has_ended.fill_(float((directory / "end").exists()))
        dist.all_reduce(has_ended)
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = (sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[1] == "spawn":
        mp.spawn(train, arguments, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    else:
        train(-1, *arguments)
