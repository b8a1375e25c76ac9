"""Rows S2 (a) to (c): two ranks, and barriers that are met when both have come, wherever they stand.

python two_barriers.py first|slow|once
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

how = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
if how == "first":
    if rank == 0:
        time.sleep(4.0)
    dist.barrier()
elif how == "slow":
    if rank == 1:
        time.sleep(5.0)
    dist.barrier()
    dist.barrier()
else:
    dist.barrier()
    if rank == 0:
        dist.barrier()
dist.destroy_process_group()
