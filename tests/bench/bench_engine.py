"""What the engine's loop costs beside a hand-written DDP loop: same model, same batches, same ranks, in turns.

    python -m tests.bench.bench_engine [--ranks 2] [--launches 10] [--pairs 40] [--steps 10] [--batch 32] [--tiny]

Both loops train ByteGPT in the same processes, a few steps each in turn: the shorter the turns, the less a passing load
of the machine falls on one of them alone. Which goes first changes from pair to pair. Of two equal loops in one
process one may be some percent faster for as long as they live, and the other one in the next process: so there are
several launches, and the interval is over them. The engine's loop agrees on stops, keeps its cursor, logs, and reports
steps as in any program; checkpoints are apart, in bench_checkpoint. With `--tiny` the model computes next to nothing:
the difference is what the engine adds to a step of any model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddpcore.engine.engine import Engine
from ddpcore.examples.bytegpt import ByteGPT, T, Windows
from tests.bench.ratios import interval
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_WINDOWS = 100_000
WARM_UP_STEPS = 50
RUN_S = 900.0


class Tiny(nn.Module):
    """A model whose step costs what torch's own machinery costs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, windows_BS: Tensor) -> Tensor:  # noqa: N803 - shape suffixes
        return windows_BS.float().mean(1) * self.scale


def time_blocks(
    is_tiny: bool, global_batch: int, first: int, num_pairs: int, num_steps: int, log_dir: str
) -> list[tuple[float, float]]:
    """Return for each pair the seconds a step of the engine's and of the hand-written loop, on this rank.

    Args:
        is_tiny: Train `Tiny` instead of ByteGPT.
        global_batch: Windows in a step, over all ranks.
        first: Which loop begins to train first.
        num_pairs: Turns of both.
        num_steps: Of a turn.
        log_dir: For the engine's metrics.
    """
    torch.set_num_threads(1)
    with Engine(log_dir=log_dir) as engine:
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(256, (NUM_WINDOWS * T + 1,), dtype=torch.uint8, generator=generator)
        windows = Windows(text.numpy().tobytes())
        model = Tiny if is_tiny else ByteGPT
        loops = [
            engine_loop(engine, model(), windows, global_batch),
            hand_written_loop(model(), windows, global_batch),
        ]
        for which in (first, 1 - first):
            _run(loops[which], WARM_UP_STEPS)  # buckets, allocators, caches
        pairs = []
        for pair in range(num_pairs):
            seconds = [0.0, 0.0]
            for which in (0, 1) if pair % 2 else (1, 0):
                began_s = time.perf_counter()
                _run(loops[which], num_steps)
                seconds[which] = (time.perf_counter() - began_s) / num_steps
            pairs.append((seconds[0], seconds[1]))
        engine.stop()
        for _ in loops[0]:
            pass
    return pairs


def engine_loop(engine: Engine, model: nn.Module, windows: Windows, global_batch: int) -> Iterator[None]:
    """Train with the engine; yield after every step."""
    model = engine.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    batches = engine.loader(windows, global_batch_size=global_batch)
    for batch in engine.steps(batches, until="100 epochs"):
        for windows_BS in batch.micro_batches():  # noqa: N806 - shape suffixes
            loss = model(windows_BS).mean()
            engine.backward(loss)
            engine.log(loss=loss)
        engine.update(optimizer)
        yield


def hand_written_loop(model: nn.Module, windows: Windows, global_batch: int) -> Iterator[None]:
    """Train as torch's tutorial does; yield after every step."""
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(windows)
    loader = DataLoader(windows, global_batch // dist.get_world_size(), sampler=sampler)
    for windows_BS in loader:  # noqa: N806 - shape suffixes
        loss = model(windows_BS).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _run(loop: Iterator[None], num_steps: int) -> None:
    for _ in range(num_steps):
        next(loop)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    medians = []
    for launch in range(args.launches):
        with tempfile.TemporaryDirectory() as log_dir:
            blocks = (args.tiny, args.batch, launch % 2, args.pairs, args.steps, log_dir)
            pairs = run_ranks(time_blocks, args.ranks, *blocks, has_group=False, timeout_s=RUN_S)[0]
        medians.append([statistics.median(times) for times in zip(*pairs, strict=True)])
    engine_ms, hand_ms = (1000 * statistics.median(times) for times in zip(*medians, strict=True))
    ratios = [math.log(engine / hand) for engine, hand in medians]
    low, high = interval(ratios)
    print(f"{args.ranks} ranks, {args.launches} launches, {args.pairs} pairs of {args.steps} steps in each")
    print(f"a step of the engine's loop {engine_ms:.3f} ms, of a hand-written one {hand_ms:.3f} ms")
    print(f"ratio {math.exp(statistics.median(ratios)):.4f}, 95 % interval over launches {low:.4f} to {high:.4f}")
    print("of each launch:", *(f"{math.exp(ratio):.4f}" for ratio in ratios))


if __name__ == "__main__":
    main()
