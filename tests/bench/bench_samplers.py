"""What a sampler costs before the first index, for each index, and in memory, beside torch's and torchdata's.

    python -m tests.bench.bench_samplers [--largest 10000000] [--ranks 8] [--rounds 3]

Each figure comes from a process of its own, so that memory is that of one sampler. torch's is linear in the length:
`--largest 100000000` takes 15 s and 5 GB.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DistributedSampler

from ddpcore.samplers.batch_sampler import ElasticBatchSampler
from ddpcore.samplers.distributed_sampler import ElasticDistributedSampler
from ddpcore.samplers.length_order import LengthGroupedOrder
from ddpcore.samplers.order import BLOCK, Order, ShuffledOrder
from ddpcore.samplers.weighted_order import WeightedOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

GLOBAL_BATCH = 256
NUM_INDICES = 200_000
RANK = 3
TRILLION = 10**12


class Length:
    """A data set that is nothing but long."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def of_torch(num: int, num_ranks: int) -> Iterator[int]:
    return iter(DistributedSampler(Length(num), num_ranks, RANK))  # type: ignore[arg-type]


def of_torchdata(num: int, num_ranks: int) -> Iterator[int]:
    module: Any = importlib.import_module("torchdata.stateful_dataloader.sampler")
    iterator: Iterator[int] = iter(module.StatefulDistributedSampler(Length(num), num_ranks, RANK))
    return iterator


def of_drop_in(num: int, num_ranks: int) -> Iterator[int]:
    return iter(ElasticDistributedSampler(Length(num), num_ranks, RANK))


def of_batches(num: int, num_ranks: int) -> Iterator[int]:
    sampler = ElasticBatchSampler(ShuffledOrder(num), GLOBAL_BATCH, rank=RANK, num_replicas=num_ranks)
    return itertools.chain.from_iterable(sampler)


KINDS: dict[str, Callable[[int, int], Iterator[int]]] = {
    "torch": of_torch,
    "torchdata": of_torchdata,
    "drop-in": of_drop_in,
    "batches": of_batches,
}


def peak_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(kind: str, num: int, num_ranks: int) -> dict[str, float]:
    """Measure one sampler in this process, warmed up with a small one, so that imports are not its cost."""
    make = KINDS[kind]
    for _ in itertools.islice(make(1000, num_ranks), 100):
        pass
    before_bytes, began_s = peak_bytes(), time.perf_counter()
    iterator = make(num, num_ranks)
    next(iterator)
    first_s = time.perf_counter()
    count = sum(1 for _ in itertools.islice(iterator, min(NUM_INDICES, num // num_ranks // 2)))
    ended_s = time.perf_counter()
    start_s, each_ns = first_s - began_s, (ended_s - first_s) / count * 1e9
    return {
        "start_ms": start_s * 1e3,
        "each_ns": each_ns,
        "epoch_ns": each_ns + start_s * 1e9 / (num / num_ranks),
        "peak_mb": (peak_bytes() - before_bytes) / 1e6,
    }


def measured(kind: str, num: int, num_ranks: int, num_rounds: int) -> dict[str, float]:
    """Return the medians of several processes."""
    command = [sys.executable, "-m", "tests.bench.bench_samplers", "--ranks", str(num_ranks), "--one", kind, str(num)]
    results: list[dict[str, float]] = []
    for _ in range(num_rounds):
        done = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
        results.append(json.loads(done.stdout))
    return {name: statistics.median(result[name] for result in results) for name in results[0]}


def show(kind: str, num: int, result: dict[str, float]) -> None:
    print(
        f"{kind:>10} {num:>17,}   start {result['start_ms']:>9.3f} ms   +{result['peak_mb']:>7.1f} MB   "
        f"next {result['each_ns']:>6.1f} ns   whole epoch {result['epoch_ns']:>6.1f} ns an index",
        flush=True,
    )


def order_ns(order: Order, size: int) -> float:
    """Return the cost of one sample of a block, the best of many: the rest is other programs."""
    best_s = float("inf")
    for number in range(30):
        began_s = time.perf_counter()
        order.indices(0, number * size, (number + 1) * size)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s / size * 1e9


def show_orders() -> None:
    print("\nsamples of an order by block size, ns each")
    for num in (TRILLION, 2**39 + 1):
        sizes = (1024, 4096, 16_384, 65_536, 262_144)
        row = "  ".join(f"{size:,}: {order_ns(ShuffledOrder(num), size):.1f}" for size in sizes)
        print(f"  shuffled, {num:,}: {row}   (in blocks of {BLOCK:,} at most)")
    lengths = np.random.default_rng(0).integers(1, 1000, 1_000_000)
    others: dict[str, Order] = {
        "weighted": WeightedOrder(lengths),
        "by length": LengthGroupedOrder(lengths, GLOBAL_BATCH),
    }
    for name, order in others.items():
        print(f"  {name}, {len(lengths):,}: {order_ns(order, BLOCK):.1f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--largest", type=int, default=10**7)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("KIND", "NUM"))
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.ranks)))
        return
    theirs = ["torch"] + ["torchdata"] * (importlib.util.find_spec("torchdata") is not None)
    lengths = [10**exponent for exponent in range(6, 20) if 10**exponent <= args.largest]
    results: dict[tuple[str, int], dict[str, float]] = {}
    for kind in (*theirs, "drop-in", "batches"):
        for num in lengths if kind in theirs else [*lengths, 10**9, TRILLION]:
            results[kind, num] = measured(kind, num, args.ranks, args.rounds)
            show(kind, num, results[kind, num])
    torch_million = results["torch", 10**6]
    for kind in ("drop-in", "batches"):
        ratios = {name: value / torch_million[name] for name, value in results[kind, TRILLION].items()}
        print(
            f"{kind} at a trillion / torch at a million: start {ratios['start_ms']:.4f}, "
            f"whole epoch an index {ratios['epoch_ns']:.3f}, next {ratios['each_ns']:.2f}, "
            f"memory {ratios['peak_mb']:.3f}"
        )
    show_orders()


if __name__ == "__main__":
    main()
