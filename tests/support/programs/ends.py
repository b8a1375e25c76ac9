"""A rank that ends in one way or another: python ends.py HOW PORT RANK.

A DDP model stands in the module, as in most scripts: it holds the process group until the interpreter ends.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpcore.process_group.open_group import open_process_group

how, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
group = open_process_group(f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, join_timeout_s=60)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
total = torch.ones(1)
dist.all_reduce(total)
print(f"total {total.item():g}", flush=True)
if how == "close":
    group.close()
elif how == "raise":
    with group:
        if rank == 0:
            # Joins nothing, and is killed by the test.
            time.sleep(600)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        raise ValueError("no such luck")
