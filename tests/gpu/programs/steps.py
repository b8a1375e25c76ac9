"""One rank that times reductions, steps of a DDP model and replays of a CUDA graph of a step, when it is told to.

A file `go-N` in the working directory starts the measurement N; `took-N` holds its microseconds, by what was done.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_STEPS = 11
"""DDP's first ten steps record events that cannot be captured. Source: torch's notes on CUDA graphs."""
TIMES = {"reduction": 3000, "eager": 200, "graph": 500}


def new_step(x: Tensor, *, is_ddp: bool = True) -> Callable[[], None]:
    layers = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(x.device)
    model = DistributedDataParallel(layers, device_ids=[0]) if is_ddp else layers
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, capturable=True)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    return step


def captured(x: Tensor, *, is_ddp: bool) -> Callable[[], None]:
    """Return what replays a step."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step = new_step(x, is_ddp=is_ddp)
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks events of its own thread meanwhile.
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()

    def replay(kept: object = step) -> None:  # the graph has but addresses of the step's tensors
        graph.replay()

    return replay


def microseconds(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) / times * 1e6


def main() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ones, x = torch.ones(1024, device=device), torch.randn(256, 1024, device=device)
    try:
        replay, graph_of = captured(x, is_ddp=True), "DDP's step"
    except RuntimeError as error:
        print(f"DDP's step is not captured: {error}", flush=True)
        replay, graph_of = captured(x, is_ddp=False), "a step without DDP"
    calls = {"reduction": lambda: dist.all_reduce(ones), "eager": new_step(x), "graph": replay}
    for number in itertools.count():
        while not Path(f"go-{number}").exists():
            time.sleep(0.002)
        took = {name: microseconds(calls[name], times) for name, times in TIMES.items()}
        part = Path(f"part-{number}")
        part.write_text(json.dumps({**took, "graph_of": graph_of}))
        part.rename(f"took-{number}")


if __name__ == "__main__":
    main()
