"""A million log lines: what they take of memory, and how long a search through all of them takes.

    python -m tests.bench.million_lines [FILTER ...]

A process of its own, so that nothing else is in its memory. Each filter is searched for by one thread and by several in
turn, and as the console does it: in 10 ms of each frame, threads going on between frames, until the last line has been
looked at. Times are the best of the rounds, ratios the median and the range of pairs.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from app.filters.language import read_filter
from app.filters.lines import LOG_KEYS, LineWish
from app.filters.terms import Filter
from app.tui.logs.matches import LogMatches
from app.tui.logs.search import LogSearch
from app.tui.logs.store import LogStore
from app.tui.ui_state import FRAME_S, SEARCH_S

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_LINES = 1_000_000
LINE = (
    "step {0} epoch 3 loss 2.5{0:06} lr 2.93e-04 grad-norm 0.{0:04} throughput 48{0:03}.1 tokens/s mem 61.2 of 80.0 GiB"
)
FILTERS = (
    "/loss 2.5777777/",
    "/CUDA error/",
    r"/grad-norm 0.99999\d/",
    "/[xyz]q/",
    "/^step 999999 /",
    "/[45] GiB$/",
    "/loss .* 0.99999/",
    "/out of memory|NCCL error/",
    "/nan|inf|overflow/",
    "/nan|inf|overflow|diverged|timeout|refused/",
    "/(?i)error|warning/",
    "/(timed out|aborted) after/",
    "level=error",
    r"/throughput 480\d\d\./",
    "/step/",
)
"""Words, classes, anchors, a gap, alternatives of two, three and six words; found in none, one, some and all lines."""
ROUNDS = 7
LONG_S = 1.0
"""A search that takes so long is done fewer times."""
MEBI = 2**20


class Spent(NamedTuple):
    """What a search has taken."""

    elapsed_ms: float
    cpu_ms: float
    num_frames: int
    held_ms: float
    """The longest frame's share."""
    matches: LogMatches


def resident_bytes() -> int:
    """Return what this process holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def search(logs: LogStore, text: str, kind: Callable[[LineWish, LogStore], LogMatches], frame_s: float = 0.0) -> Spent:
    """Search all lines that are kept, in the frames' share of time or in one go."""
    wanted = read_filter(text, LOG_KEYS)
    assert isinstance(wanted, Filter), wanted
    matches = kind(LineWish(wanted), logs)
    begun_s, cpu_s, held_s, num_frames = time.monotonic(), time.process_time(), 0.0, 0
    while True:
        frame_begun_s = time.monotonic()
        look_for(matches, SEARCH_S if frame_s else float("inf"))
        now_s = time.monotonic()
        held_s, num_frames = max(held_s, now_s - frame_begun_s), num_frames + 1
        if matches.has_all_old:
            break
        time.sleep(max(0.0, frame_begun_s + frame_s - now_s))
    cpu_s = time.process_time() - cpu_s
    return Spent(1e3 * (time.monotonic() - begun_s), 1e3 * cpu_s, num_frames, 1e3 * held_s, matches)


def look_for(matches: LogMatches, share_s: float) -> None:
    """Look for lines as long as a frame does."""
    now_s = time.monotonic()
    deadline_s = now_s + share_s
    while now_s < deadline_s and matches.search():
        began_s, now_s = now_s, time.monotonic()
        matches.pace(now_s - began_s)


def measure(logs: LogStore, text: str) -> None:
    """Search for a filter in all ways, and print."""
    search(logs, text, LogSearch)
    pairs: list[tuple[Spent, Spent]] = []
    framed: list[Spent] = []
    while len(pairs) < ROUNDS and not (pairs and pairs[0][0].elapsed_ms > 1e3 * LONG_S):
        pairs.append((search(logs, text, LogMatches), search(logs, text, LogSearch)))
        framed.append(search(logs, text, LogSearch, FRAME_S))
    found = {tuple(each.matches.numbers.tolist()) for each in (*pairs[-1], framed[-1])}
    assert len(found) == 1, f"threads find something else for {text}"
    alone, threads = (min(column) for column in zip(*pairs, strict=True))
    quickest = min(framed)
    ratios = [one.elapsed_ms / many.elapsed_ms for one, many in pairs]
    print(
        f"  {text:46} {len(alone.matches):9,} found; one thread {alone.elapsed_ms:5.0f} ms ({alone.cpu_ms:.0f} CPU),"
        f" threads {threads.elapsed_ms:5.0f} ({threads.cpu_ms:.0f} CPU), {statistics.median(ratios):.2f} times as quick"
        f" ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(pairs)}); in frames {quickest.elapsed_ms:.0f} ms,"
        f" {quickest.num_frames} frames, held {quickest.held_ms:.0f} ms at most",
        flush=True,
    )


def main() -> None:
    """Keep, search, print."""
    logs = LogStore()
    logs.append("node", 0, "warm", is_stderr=False)
    search(logs, "/warm/", LogMatches)
    before, begun_s = resident_bytes(), time.process_time()
    for number in range(NUM_LINES):
        logs.append(f"node-{number % 2048:04}", number % 16384, LINE.format(number), is_stderr=number % 64 == 0)
    spent_us = (time.process_time() - begun_s) / NUM_LINES * 1e6
    held, counted = (resident_bytes() - before) / MEBI, logs.num_bytes / MEBI
    print(f"  {len(logs):,} lines of {len(LINE.format(500_000))} characters, {spent_us:.1f} us to make and keep one")
    print(f"  memory: {held:.0f} MiB resident, {counted:.0f} MiB by its own count   goal: 200 MB")
    search(logs, "/nothing|such/", LogSearch)
    print(f"  memory once searched: {(resident_bytes() - before) / MEBI:.0f} MiB   goals: 200 MB, a search 100 ms")
    for text in sys.argv[1:] or FILTERS:
        measure(logs, text)


if __name__ == "__main__":
    main()
