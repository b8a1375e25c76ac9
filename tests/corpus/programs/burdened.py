"""Two ranks that train: a step is a read of a file, some 12 ms of work, and 25 ms asleep; then something slows rank 1.

python burdened.py DIRECTORY

Each rank keeps to a CPU of its own, unless `unbound` or `threads` is in DIRECTORY at the start. With `threads` it works
in two threads, and rank 0 sleeps while rank 1 works. A file `gc`, `gil`, `log`, `work` or `sleep` in DIRECTORY slows
rank 1 from inside; else it is slowed from outside. DIRECTORY/data is read past the page cache, 256 KiB a step.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

import ddpcore

WORK_S, PAUSE_S = 0.012, 0.025
READ_BYTES = 256 * 1024
directory = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
cpus = sorted(os.sched_getaffinity(0))
num_threads = 2 if (directory / "threads").exists() else 1
if num_threads == 1 and not (directory / "unbound").exists():
    os.sched_setaffinity(0, {cpus[rank % len(cpus)]})
is_second = rank == 0 and num_threads > 1
torch.set_num_threads(1)
matrix = torch.randn(160, 160)


def work(cpu_s: float) -> None:
    """Compute for some time of a CPU, however long that takes."""
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        torch.mm(matrix, matrix)


def work_together() -> None:
    """Compute in all threads, each for the same time of a CPU."""
    others = [threads.submit(work, WORK_S) for _ in range(num_threads - 1)]
    work(WORK_S)
    for other in others:
        other.result()


def hold_interpreter() -> None:
    """Call C code that keeps the interpreter lock for tens of milliseconds, again and again."""
    while True:
        sum(range(3_000_000))


def slow_down(step: int) -> None:
    """Do what a file in the directory asks for."""
    if "gc" in asked:
        ring: list[object] = []
        ring.append([ring for _ in range(1000)])
        gc.collect()
    if "gil" in asked and not helpers:
        helpers.append(threading.Thread(target=hold_interpreter, daemon=True))
        helpers[0].start()
    if "log" in asked:
        for line in range(20_000):
            sys.stdout.write(f"step {step}: sample {line} has been seen and is of no use to anybody who reads this\n")
    if "work" in asked:
        work(2 * WORK_S)
    if "sleep" in asked:
        time.sleep(2 * WORK_S)


asked: set[str] = set()
helpers: list[threading.Thread] = []
threads = ThreadPoolExecutor(num_threads)
kept = [{"number": number, "of": [number]} for number in range(200_000)]
buffer = mmap.mmap(-1, READ_BYTES)
file = os.open(directory / "data", os.O_RDONLY | getattr(os, "O_DIRECT", 0))
gc.disable()
for step in range(1, 1_000_000):
    if rank == 1 and step % 10 == 0:
        asked = {entry.name for entry in os.scandir(directory)}
    with ddpcore.phase("data"):
        os.preadv(file, [buffer], 0)
    if is_second:
        time.sleep(PAUSE_S)
    work_together()
    if rank == 1:
        slow_down(step)
    if not is_second:
        time.sleep(PAUSE_S)
    dist.all_reduce(torch.ones(1000))
    ddpcore.report_step(step, loss=1.0 / step)
