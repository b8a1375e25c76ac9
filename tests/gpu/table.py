"""Measures what rankdeck costs and saves on a GPU, and prints a table for tests/bench/RESULTS.md: two minutes.

    python -m tests.gpu.table

With and without the probe, and with NCCL's timing: three processes of one rank each stand ready on the GPU and measure
in turns of half a second, so that all meet the same clocks. A ratio is the median over the turns.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddpcore.checkpoint import Checkpointer
from tests.bench import bench_prefetch
from tests.bench.ratios import interval
from tests.support.ranks import RealRanks

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = Path(__file__).parent / "programs" / "steps.py"
SIZES_MB = (64, 256)
NUM_SAVES = 5
NUM_TENSORS = 32
TENSOR_BYTES = 64 * 2**20
NUM_TURNS = 20
START_S = 120.0
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"is_watched": False},
    "probe": {},
    "timing": {"is_watched": False, "env": {"TORCH_NCCL_ENABLE_TIMING": "1"}},
}


def main() -> None:
    """Print each row as soon as it is measured."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    print(
        f"\n### On a GPU: `tests/gpu/run`\n{time.strftime('%Y-%m-%d, %H:%M')}, {torch.cuda.get_device_name()}, driver "
        f"{driver}, torch {torch.__version__}, NCCL {nccl}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}.\n"
    )
    print("| measured | n | medians |\n|---|---|---|")
    for rows in (prefetch_rows(), checkpoint_rows(), step_rows()):
        for what, n, result in rows:
            print(f"| {what} | {n} | {result} |", flush=True)


def prefetch_rows() -> Iterator[tuple[str, str, str]]:
    cycles = bench_prefetch.cycles_of(bench_prefetch.STEP_MS)
    n = f"{bench_prefetch.REPEATS} x {bench_prefetch.NUM_STEPS}"
    for size in SIZES_MB:
        ms = bench_prefetch.medians_ms(size, cycles)
        one, two = (100 * bench_prefetch.hidden_frac(ms, name) for name in ("one", "two"))
        steps = f"{ms['computing']:.2f} ms a step, {ms['plain']:.2f} with `.to`, {ms['one']:.2f}, {ms['two']:.2f}"
        yield f"copies of {size} MB that the prefetcher hides, depth 1, 2", n, f"{one:.0f} %, {two:.0f} % ({steps})"


def checkpoint_rows() -> Iterator[tuple[str, str, str]]:
    state = {f"p{number}": torch.randn(TENSOR_BYTES // 4, device="cuda") for number in range(NUM_TENSORS)}
    gib = NUM_TENSORS * TENSOR_BYTES / 2**30
    blocked: list[float] = []
    totals: list[float] = []
    with tempfile.TemporaryDirectory() as directory, Checkpointer(directory, keep_last=1) as checkpointer:
        checkpointer.prepare(state)
        for step in range(NUM_SAVES + 1):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            checkpointer.save(step, state)
            blocked.append(time.perf_counter() - began_s)
            checkpointer.wait()
            totals.append(time.perf_counter() - began_s)
    what = f"checkpoint of {gib:g} GiB in GPU memory"
    # The first one waits for its memory.
    for part, seconds in (("training stands", blocked[1:]), ("whole on the disk after", totals[1:])):
        median_s = statistics.median(seconds)
        yield f"{what}: {part}", f"{NUM_SAVES}", f"{median_s:.3f} s ({gib / median_s:.1f} GiB/s)"


def step_rows() -> Iterator[tuple[str, str, str]]:
    with contextlib.ExitStack() as stack:
        jobs = {kind: stack.enter_context(RealRanks([STEPS], 1, **options)) for kind, options in KINDS.items()}
        graphs = {kind: turn(job, 0)["graph_of"] for kind, job in jobs.items()}  # and what is cold is over
        before = jobs["probe"].wait_until(lambda _: True, "a report")[0].probe_cpu_s
        began_s = time.monotonic()
        turns: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for number in range(1, NUM_TURNS + 1):
            first = number % len(KINDS)
            for kind in [*KINDS, *KINDS][first : first + len(KINDS)]:
                turns[kind].append(turn(jobs[kind], number))
        jobs["probe"].take_reports()
        share = (jobs["probe"].reports[0].probe_cpu_s - before) / (time.monotonic() - began_s)
    yield "the probe's thread, over all turns", "1", f"{100 * share:.3f} % of a core"
    for kind, with_what in (("probe", "the probe"), ("timing", "`TORCH_NCCL_ENABLE_TIMING=1`")):
        parts = {"reduction": "an all_reduce of 4 KB", "eager": "a DDP step"}
        if graphs[kind] == graphs["plain"]:
            parts["graph"] = f"a CUDA graph of {graphs[kind]}"
        for part, what in parts.items():
            plain_us, own_us = ([one[part] for one in turns[name]] for name in ("plain", kind))
            log_ratios = [math.log(own / plain) for own, plain in zip(own_us, plain_us, strict=True)]
            low, high = interval(log_ratios)
            us = f"{statistics.median(own_us):.1f} us, {statistics.median(plain_us):.1f} without"
            ratio = f"{math.exp(statistics.median(log_ratios)):.3f} (95 % {low:.3f} to {high:.3f})"
            yield f"{what} with {with_what}", f"{NUM_TURNS}", f"{us}: {ratio}"


def turn(job: RealRanks, number: int) -> dict[str, Any]:
    """Return what the rank has measured, once it has."""
    took, deadline_s = job.directory / f"took-{number}", time.monotonic() + START_S
    (job.directory / f"go-{number}").touch()
    while not took.exists():
        if time.monotonic() > deadline_s or job.launcher.poll() is not None:
            raise SystemExit(f"nothing is measured:\n{job.logs()}")
        job.take_reports(timeout_s=0.02)
    measured: dict[str, Any] = json.loads(took.read_text())
    return measured


if __name__ == "__main__":
    main()
