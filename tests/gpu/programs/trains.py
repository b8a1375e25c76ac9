"""A DDP program whose ranks share GPU 0: python trains.py KIND, by torchrun. After twenty steps KIND happens.

train    nothing
hang     the GPU stands in a kernel that takes ten minutes, and NCCL's call is behind it
timeout  the kernel takes 45 s, and the group's time-out is ten seconds: NCCL's abort waits for the kernel
oom      each step keeps 256 MiB, of 4 GiB
freeze   rank 1 is stopped; over gloo, since NCCL wants a GPU for each rank
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

QUIET_STEPS = 20
CYCLES_HZ = 2_000_000_000
"""Of a GPU's clock, at most."""
kept: list[Tensor] = []


def happen(kind: str) -> None:
    if kind in {"hang", "timeout"}:
        torch.cuda._sleep((45 if kind == "timeout" else 600) * CYCLES_HZ)  # type: ignore[no-untyped-call]
    elif kind == "oom":
        kept.append(torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda"))
    elif kind == "freeze" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    kind = sys.argv[1]
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    # Other tests use this GPU too.
    torch.cuda.set_per_process_memory_fraction(4 * 2**30 / torch.cuda.get_device_properties(device).total_memory)
    timeout = timedelta(seconds=10 if kind == "timeout" else 600)
    if kind == "freeze":
        dist.init_process_group("cuda:gloo,cpu:gloo", timeout=timeout)
    else:
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    layers = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    model = DistributedDataParallel(layers.to(device), device_ids=[0])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(1_000_000):
        if step == QUIET_STEPS or (step > QUIET_STEPS and kind == "oom"):
            happen(kind)
        x = torch.randn(256, 1024, device=device)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss={loss.item():.4f}", flush=True)  # WAITS FOR THE GPU
        time.sleep(0.02)


if __name__ == "__main__":
    main()
