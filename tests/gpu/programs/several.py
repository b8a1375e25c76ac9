"""A DDP program of several ranks under NCCL: python several.py KIND, by torchrun. At step 20 KIND happens to rank 2.

train    nothing
sleep    it sleeps
spin     it computes in Python, for ever
stop     it is stopped
kernel   its GPU stands in a kernel that takes ten minutes, and NCCL's call is behind it
skip     it leaves out an all_reduce of another process group, which the others call
slow     it sleeps 0.3 s in each step from then on
leave    it ends by os._exit(3)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEP, RANK = 20, 2
CYCLES_HZ = 2_000_000_000
"""Of a GPU's clock, at most."""


def happen(kind: str) -> None:
    match kind:
        case "sleep":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kernel":
            torch.cuda._sleep(600 * CYCLES_HZ)  # type: ignore[no-untyped-call]
        case "leave":
            os._exit(3)


def main() -> None:
    kind = sys.argv[1]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=600), device_id=device)
    others = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(nn.Linear(256, 256).to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(1_000_000):
        is_now, is_it = step == STEP, dist.get_rank() == RANK
        if is_it and is_now:
            happen(kind)
        if is_it and kind == "slow" and step > STEP:
            time.sleep(0.3)
        if kind == "skip" and is_now and not is_it:
            dist.all_reduce(torch.ones(1, device=device), group=others)
            torch.cuda.synchronize()
        x = torch.randn(64, 256, device=device)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss={loss.item():.4f}", flush=True)
        time.sleep(0.01)


if __name__ == "__main__":
    main()
