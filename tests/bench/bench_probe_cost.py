"""What the probe costs the training it watches: CPU of its thread, throughput beside an unwatched job, one barrier.

    python -m tests.bench.bench_probe_cost [--pairs 6] [--ranks 4] [--steps 300]

Trains `ddpcore/examples/bytegpt.py` with and without the probe; which goes first changes from pair to pair, so that a
machine that warms up or fills up favours neither. The interval is a bootstrap over pairs.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from pathlib import Path

from tests.bench.ratios import interval
from tests.support.ranks import EXAMPLES, RealRanks

BYTEGPT = EXAMPLES / "bytegpt.py"
NAMED_BARRIERS = Path(__file__).parents[1] / "support" / "programs" / "named_barriers.py"

WARM_STEP = 20
"""Measured from here: before it allocators and DDP's buckets settle."""

RUN_S = 240.0
POLL_S = 0.01


def rank_0_log(job: RealRanks) -> str:
    """Return what rank 0 has printed so far; torchrun's own log files lie three directories deep."""
    paths = [*job.directory.glob("rank-0.stdout.log"), *job.directory.glob("logs/*/attempt_0/0/stdout.log")]
    return paths[0].read_text() if paths else ""


def await_step(job: RealRanks, step: int) -> float:
    """Return the time at which rank 0 says that it has done this step."""
    deadline_s = time.monotonic() + RUN_S
    while not re.search(rf"^step {step} ", rank_0_log(job), re.MULTILINE):
        if time.monotonic() > deadline_s or job.launcher.poll() is not None:
            raise SystemExit(f"bytegpt has not come to step {step}:\n{job.logs()}")
        job.take_reports()
        time.sleep(POLL_S)
    return time.monotonic()


def steps_per_s(num_ranks: int, num_steps: int, *, is_watched: bool) -> tuple[float, list[float]]:
    """Return the throughput of one job, and for each rank the share of a core that its probe took meanwhile."""
    with RealRanks([BYTEGPT, "--steps", str(num_steps)], num_ranks, is_watched=is_watched) as job:
        began_s = await_step(job, WARM_STEP)
        first = dict(job.reports)
        ended_s = await_step(job, num_steps)
        job.take_reports()
        shares = [
            (last.probe_cpu_s - first[rank].probe_cpu_s) / (ended_s - began_s) for rank, last in job.reports.items()
        ]
    return (num_steps - WARM_STEP) / (ended_s - began_s), shares


def barrier_us(num_ranks: int) -> str:
    """Return the median time of `ddpcore.barrier`, as rank 0 measured it."""
    with RealRanks([NAMED_BARRIERS], num_ranks) as job:
        (job.directory / "arrive").touch()
        job.wait_until(lambda reports: all(report.step == 7 for report in reports.values()), "200 barriers")
        found = re.search(r"barrier (\d+) us", job.log(0))
    return found[1] if found else "?"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    log_ratios, all_shares = [], []
    for pair in range(args.pairs):
        rates = {}
        for is_watched in (pair % 2 == 0, pair % 2 == 1):
            rates[is_watched], shares = steps_per_s(args.ranks, args.steps, is_watched=is_watched)
            all_shares += shares
        log_ratios.append(math.log(rates[True] / rates[False]))
        print(
            f"pair {pair + 1}: {rates[True]:.2f} steps/s watched, {rates[False]:.2f} not, "
            f"ratio {rates[True] / rates[False]:.4f}",
            flush=True,
        )
    low, high = interval(log_ratios)
    print(
        f"throughput, watched / not: {math.exp(statistics.median(log_ratios)):.4f} "
        f"(median; 95 % {low:.4f} to {high:.4f})"
    )
    print(
        f"probe's thread: {statistics.fmean(all_shares):.3%} of a core (mean over {len(all_shares)} ranks, "
        f"highest {max(all_shares):.3%})"
    )
    print(f"ddpcore.barrier with {args.ranks} ranks: {barrier_us(args.ranks)} us (median of 200, rank 0)")


if __name__ == "__main__":
    main()
