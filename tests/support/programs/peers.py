"""Two ranks that exchange tensors for a while, in every way, and then wait for each other's for ever."""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist
from torch.distributed import batch_isend_irecv, irecv, isend, recv, send
from torch.distributed.distributed_c10d import P2POp

dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
mine, theirs = torch.ones(10), torch.zeros(10)

# The public functions are torch's own, wherever they were imported from.
assert (isend, irecv) == (dist.isend, dist.irecv)
assert pickle.loads(pickle.dumps(isend)) is dist.isend
assert (send.__module__, isend.__module__) == ("torch.distributed.distributed_c10d",) * 2

for _ in range(5):
    if rank == 0:
        send(mine, dst=1)
        recv(theirs, src=1)
    else:
        assert recv(theirs) == 0
        send(mine, dst=0)
    for work in batch_isend_irecv([P2POp(isend, mine, other, tag=3), P2POp(irecv, theirs, other, tag=3)]):
        work.wait()
assert theirs.sum() == 10

late = irecv(theirs, src=other, tag=rank)
assert late is not None
late.wait()  # WAITS FOR A PEER
