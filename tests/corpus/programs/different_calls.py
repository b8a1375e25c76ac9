"""All ranks but one reduce; rank 1 broadcasts."""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(4)
dist.all_reduce(value)
if dist.get_rank() == 1:
    dist.broadcast(value, src=0)
else:
    dist.all_reduce(value)
dist.barrier()
