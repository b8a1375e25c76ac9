"""What the engine's loop costs beside a hand-written DDP loop: same model, same batches, same ranks, in turns.

    python -m tests.bench.bench_engine [--ranks 2] [--pairs 12] [--steps 50]

Both loops train ByteGPT in the same processes, a block of steps each; which goes first changes from pair to pair. The
engine's agrees on stops, keeps its cursor, logs, and reports steps as in any program; checkpoints are apart, in
bench_checkpoint.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddpcore.engine.engine import Engine
from ddpcore.examples.bytegpt import ByteGPT, T, Windows
from tests.bench.ratios import interval
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

GLOBAL_BATCH = 32
NUM_WINDOWS = 100_000
RUN_S = 900.0


def time_blocks(num_pairs: int, num_steps: int, log_dir: str) -> list[tuple[float, float]]:
    """Return for each pair the seconds a step of the engine's and of the hand-written loop, on this rank."""
    torch.set_num_threads(1)
    with Engine(log_dir=log_dir) as engine:
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(256, (NUM_WINDOWS * T + 1,), dtype=torch.uint8, generator=generator)
        windows = Windows(text.numpy().tobytes())
        loops = [engine_loop(engine, windows), hand_written_loop(windows)]
        for run in loops:
            run(num_steps)  # buckets, allocators, caches
        pairs = []
        for pair in range(num_pairs):
            seconds = [0.0, 0.0]
            for which in (0, 1) if pair % 2 else (1, 0):
                dist.barrier()
                began_s = time.perf_counter()
                loops[which](num_steps)
                dist.barrier()
                seconds[which] = (time.perf_counter() - began_s) / num_steps
            pairs.append((seconds[0], seconds[1]))
    return pairs


def engine_loop(engine: Engine, windows: Windows) -> Callable[[int], None]:
    """Return a function that runs so many more steps with the engine."""
    model = engine.wrap(ByteGPT())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batches = engine.loader(windows, global_batch_size=GLOBAL_BATCH)

    def run(num_steps: int) -> None:
        for batch in engine.steps(batches, until=f"{engine.step + num_steps} steps"):
            for windows_BS in batch.micro_batches():  # noqa: N806 - shape suffixes
                loss = model(windows_BS).mean()
                engine.backward(loss)
                engine.log(loss=loss)
            engine.update(optimizer)

    return run


def hand_written_loop(windows: Windows) -> Callable[[int], None]:
    """Return a function that runs so many more steps of what torch's tutorial does."""
    model = DistributedDataParallel(ByteGPT(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(windows)
    loader = DataLoader(windows, GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)

    def run(num_steps: int) -> None:
        for windows_BS in islice(loader, num_steps):  # noqa: N806 - shape suffixes
            loss = model(windows_BS).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as log_dir:
        pairs = run_ranks(time_blocks, args.ranks, args.pairs, args.steps, log_dir, has_group=False, timeout_s=RUN_S)[0]
    engine_ms, hand_ms = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = [math.log(engine / hand) for engine, hand in pairs]
    low, high = interval(ratios)
    print(f"{args.ranks} ranks, {args.pairs} pairs of {args.steps} steps")
    print(f"a step of the engine's loop {engine_ms:.2f} ms, of a hand-written one {hand_ms:.2f} ms")
    print(f"ratio {math.exp(statistics.median(ratios)):.4f}, 95 % interval {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
