"""What a named gate costs beside torch's barriers, and what goes with it.

    python -m tests.bench.bench_barrier [RANKS ...]

Every kind takes its turn in each round, in one run over the same ranks; figures are medians over all calls and ranks.
Each rank's two connections and thread are open all the while. On 2 cores 4 and 8 ranks are oversubscribed.
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddpcore import barriers
from ddpcore.barriers import open_session
from tests.support.warm_ranks import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 5
CALLS = 100
SLOW_CALLS = 20
IDLE_S = 20.0
NUM_OPS = 2000
TIMEOUT = timedelta(seconds=60)


def kinds() -> dict[str, tuple[Callable[[], object], int]]:
    return {
        "ddpcore.barrier": (lambda: barriers.barrier("bench"), CALLS),
        "ddpcore.exchange": (lambda: barriers.exchange("bench", "a text"), CALLS),
        "ddpcore.master_first": (go_first, CALLS),
        "monitored_barrier": (lambda: dist.monitored_barrier(timeout=TIMEOUT), CALLS),
        "monitored_barrier(wait_all_ranks)": (
            lambda: dist.monitored_barrier(timeout=TIMEOUT, wait_all_ranks=True),
            CALLS,
        ),
        "dist.barrier": (dist.barrier, SLOW_CALLS),
    }


def go_first() -> None:
    with barriers.master_first("bench"):
        pass


def measure() -> dict[str, list[float]]:
    durations_us: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, (call, num_calls) in kinds().items():
            dist.barrier()
            for _ in range(num_calls):
                began_s = time.perf_counter()
                call()
                durations_us.setdefault(name, []).append(1e6 * (time.perf_counter() - began_s))
    return {name: statistics.quantiles(values, n=100) for name, values in durations_us.items()}


def idle() -> tuple[float, float]:
    """Return the CPU time that the heart takes while the main thread computes, and waits, as parts of a core."""
    barriers.barrier("both")
    heartbeat_thread = open_session._heartbeat
    assert heartbeat_thread is not None
    began_s, cpu_s = time.monotonic(), heartbeat_thread.cpu_s
    matrix = torch.ones(200, 200)
    while time.monotonic() < began_s + IDLE_S:
        matrix @ matrix
    working = (heartbeat_thread.cpu_s - cpu_s) / IDLE_S
    barriers.barrier("begin")
    cpu_s = heartbeat_thread.cpu_s
    if dist.get_rank() == 0:
        time.sleep(IDLE_S)
    barriers.barrier("end")
    return working, (heartbeat_thread.cpu_s - cpu_s) / IDLE_S


def guarded() -> float:
    """Return what an operation of torch costs more in a block that only one rank runs, in microseconds."""
    tensor = torch.ones(64, 64)

    def loop() -> float:
        began_s = time.perf_counter()
        for _ in range(NUM_OPS):
            tensor.add(1)
        return 1e6 * (time.perf_counter() - began_s) / NUM_OPS

    loop()
    plain_us = loop()
    with barriers.only_on_master():
        return loop() - plain_us


def main() -> None:
    for num_ranks in [int(number) for number in sys.argv[1:]] or [2, 4, 8]:
        of_ranks = run_ranks(measure, num_ranks, timeout_s=300.0)
        medians = {name: statistics.median(one[name][49] for one in of_ranks) for name in of_ranks[0]}
        tails = {name: max(one[name][94] for one in of_ranks) for name in of_ranks[0]}
        print(f"\n{num_ranks} ranks{'':32} median us   p95 us   of monitored_barrier")
        for name, median_us in medians.items():
            print(f"{name:38} {median_us:9.0f} {tails[name]:9.0f} {median_us / medians['monitored_barrier']:9.2f}")
    working, waiting = zip(*run_ranks(idle, 2), strict=True)
    print(f"\nthe heart takes {100 * max(working):.4f} % of a core beside work, {100 * max(waiting):.4f} % in a wait")
    print(f"an operation of torch costs {run_ranks(guarded, 2)[0]:.1f} us more in a one-rank block")


if __name__ == "__main__":
    main()
