"""How much of the copy to the device a prefetcher hides: python -m tests.bench.bench_prefetch

Steps of a fixed amount of computing, fed with pinned batches of several sizes: without any copy, with the usual
`batch.to(device, non_blocking=True)` at the top of the loop, and through the Prefetcher. "Hidden" is the share of the
copy's cost that has gone. Without a GPU there is nothing to hide; then it prints what passing through costs.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from ddpcore.nested import map_tensors
from ddpcore.prefetch import Prefetcher

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_STEPS = 60
REPEATS = 5
SIZES_MB = (4, 16, 64, 256)
STEP_MS = 12.0
"""Computing of a step: longer than the copy of 256 MB over PCIe 5, shorter than over PCIe 3."""


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing is copied, so nothing can be hidden")
        passing_through()
        return
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, {STEP_MS:g} ms of computing a step")
    print("   batch  computing  plain .to prefetch 1 prefetch 2  hidden 1  hidden 2")
    cycles = cycles_of(STEP_MS)
    for size in SIZES_MB:
        row(size, cycles)


def passing_through() -> None:
    """Print what the pass-through costs a batch on the CPU."""
    batches = [{"x": torch.ones(8), "y": [torch.ones(8)]}] * 100_000
    plain = min(timed_loop(batches) for _ in range(REPEATS))
    through = min(timed_loop(Prefetcher(batches, "cpu")) for _ in range(REPEATS))
    print(f"passing through on the CPU: {(through - plain) / len(batches) * 1e9:.0f} ns a batch")


def timed_loop(batches: Iterable[Any]) -> float:
    """Return the seconds that iterating takes."""
    began_s = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began_s


def row(size_mb: int, cycles: int) -> None:
    """Print one line."""
    ms = medians_ms(size_mb, cycles)
    columns = " ".join(f"{ms[name]:>7.2f} ms" for name in ("computing", "plain", "one", "two"))
    print(f"{size_mb:>5} MB {columns} {hidden_frac(ms, 'one'):>8.0%} {hidden_frac(ms, 'two'):>8.0%}")


def hidden_frac(ms: dict[str, float], name: str) -> float:
    """Return the share of the plain copy's cost that a prefetcher saves."""
    cost = ms["plain"] - ms["computing"]
    return (ms["plain"] - ms[name]) / cost if cost > 0 else 0.0


def medians_ms(size_mb: int, cycles: int) -> dict[str, float]:
    """Return the milliseconds of a step by each way, of repeats that alternate: all meet the same clocks."""
    parts = 4
    pinned = [
        {"x": [torch.ones(size_mb * (1 << 20) // 4 // parts).pin_memory() for _ in range(parts)]} for _ in range(8)
    ]
    batches = [pinned[index % len(pinned)] for index in range(NUM_STEPS)]
    resident = [map_tensors(lambda tensor: tensor.cuda(), pinned[0])] * NUM_STEPS
    times: dict[str, list[float]] = {}
    for _ in range(REPEATS):
        for name, source in (
            ("computing", resident),
            ("plain", moved(batches)),
            ("one", Prefetcher(batches, "cuda", 1)),
            ("two", Prefetcher(batches, "cuda", 2)),
        ):
            times.setdefault(name, []).append(step_ms(source, cycles))
    return {name: statistics.median(found) for name, found in times.items()}


def moved(batches: Iterable[Any]) -> Iterable[Any]:
    """Move each batch where it is needed, in the computing stream."""
    return (map_tensors(lambda tensor: tensor.to("cuda", non_blocking=True), batch) for batch in batches)


def step_ms(batches: Iterable[Any], cycles: int) -> float:
    """Return the milliseconds of a step, all of the loop included."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for batch in batches:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        batch["x"][0].add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) * 1000 / NUM_STEPS


def cycles_of(wanted_ms: float) -> int:
    """Return how many cycles a kernel must sleep for."""
    cycles = 10_000_000
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return int(cycles * wanted_ms / ((time.perf_counter() - began_s) * 1000))


if __name__ == "__main__":
    main()
