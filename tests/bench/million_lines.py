"""A million log lines: what they take of memory, and how long a search through all of them takes.

    python -m tests.bench.million_lines [FILTER ...]

A process of its own, so that nothing else is in its memory. Times are CPU time: best and worst of five.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS, LineWish
from app.filters.terms import Filter
from app.tui.log_matches import LogMatches
from app.tui.log_store import LogStore

NUM_LINES = 1_000_000
LINE = (
    "step {0} epoch 3 loss 2.5{0:06} lr 2.93e-04 grad-norm 0.{0:04} throughput 48{0:03}.1 tokens/s mem 61.2 of 80.0 GiB"
)
FILTERS = ("/loss 2.5777777/", r"/grad-norm 0.99999\d/", "/out of memory|NCCL error/", "level=error")
ROUNDS = 5
MEBI = 2**20


def resident_bytes() -> int:
    """Return what this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def search(logs: LogStore, text: str) -> LogMatches:
    """Search all lines that are kept."""
    wanted = read_filter(text, LOG_KEYS)
    assert isinstance(wanted, Filter), wanted
    matches = LogMatches(LineWish(wanted), logs)
    began_s = time.process_time()
    while matches.search():
        now_s = time.process_time()
        matches.pace(now_s - began_s)
        began_s = now_s
    return matches


def main() -> None:
    """Keep, search, print."""
    logs = LogStore()
    logs.append("node", 0, "warm", is_stderr=False)
    search(logs, "/warm/")
    before, begun_s = resident_bytes(), time.process_time()
    for number in range(NUM_LINES):
        logs.append(f"node-{number % 2048:04}", number % 16384, LINE.format(number), is_stderr=number % 64 == 0)
    spent_us = (time.process_time() - begun_s) / NUM_LINES * 1e6
    held, counted = (resident_bytes() - before) / MEBI, logs.num_bytes / MEBI
    print(f"  {len(logs):,} lines of {len(LINE.format(500_000))} characters, {spent_us:.1f} us to make and keep one")
    print(f"  memory: {held:.0f} MiB resident, {counted:.0f} MiB by its own count   goal: 200 MB")
    for text in sys.argv[1:] or FILTERS:
        spent_ms, matches = [], search(logs, text)
        for _ in range(ROUNDS):
            begun_s = time.process_time()
            matches = search(logs, text)
            spent_ms.append(1e3 * (time.process_time() - begun_s))
        print(
            f"  all searched for {text}: {min(spent_ms):.0f} ms CPU at best, worst {max(spent_ms):.0f}; "
            f"{len(matches):,} found   goal: 100 ms"
        )


if __name__ == "__main__":
    main()
