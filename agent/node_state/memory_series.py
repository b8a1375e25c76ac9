"""How much memory one process held over time, and whether it grows steadily: no clock, `now_s` is given.

Kept are the lowest and highest figures of equal spans of time, fine for the last minutes and coarse for hours. Steady
growth is seen in the lowest figures: garbage collection, caching allocators and checkpoints move the highest ones.
"""

from __future__ import annotations

from collections import deque
from itertools import combinations, pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BIN_S = 1.0
FACTOR = 8
NUM_LEVELS = 3
NUM_BINS = 128
"""Bins of each level: 2 min of seconds, 17 min of 8 s, 2.3 h of 64 s."""
NUM_BLOCKS = 6
SIZES = (12, 18, 24, 36, 48, 72, 96, 126)
"""Bins of a window: multiples of the blocks that it is split into."""
MAX_GAP_S = 5.0
"""A longer time without figures (an evaluation, a checkpoint) does not count as time passed."""
MIN_INCREMENT = 0.25
"""Part of the mean increment between blocks that a block must add to count as growth."""
MAX_INCREMENT = 0.6
"""Part of the whole growth: more of it between two blocks is a jump."""
MAX_SETBACK = 0.25
"""Part of the mean increment that one block may lose."""
MIN_WINDOW_STEPS = 4
MIN_NEW_PART = 0.5
"""Part of a window's growth that must lead above earlier levels."""
MIN_SPIKE_PART = 0.5
"""Part of the usual rise and fall within a block: smaller growth is chance."""


class Bin(NamedTuple):
    """The figures of a span of time."""

    number: int
    low: float
    high: float
    step: int | None
    """Last step in it; None of a program that reports none."""


class Steady(NamedTuple):
    """A window of steady growth.

    `for_s` is its length, without the part in which only earlier levels were reached again. `growth_bytes` is from its
    first block to its last, `now_bytes` the level at the end without spikes, `spike_bytes` by how much the figures rise
    above it again and again. `further_bytes` is what is to come if the growth goes on to slow down as it does; infinite
    if it does not.
    """

    for_s: float
    rate_bytes_hz: float
    growth_bytes: float
    now_bytes: float
    spike_bytes: float
    further_bytes: float


class MemorySeries:
    """One figure over time."""

    def __init__(self) -> None:
        self._levels: list[deque[Bin]] = [deque(maxlen=NUM_BINS) for _ in range(NUM_LEVELS)]
        self._active_s = 0.0
        self._put_s: float | None = None
        self.last_bytes = 0

    def put(self, held_bytes: int, step: int | None, now_s: float) -> None:
        """Take a figure."""
        if self._put_s is not None:
            self._active_s += min(max(0.0, now_s - self._put_s), MAX_GAP_S)
        self._put_s, self.last_bytes = now_s, held_bytes
        for level, bins in enumerate(self._levels):
            number = int(self._active_s / (BIN_S * FACTOR**level))
            if bins and bins[-1].number == number:
                known = bins[-1]
                bins[-1] = Bin(number, min(known.low, held_bytes), max(known.high, held_bytes), step)
            else:
                bins.append(Bin(number, held_bytes, held_bytes, step))

    def steady(self, min_growth_bytes: float) -> Iterator[Steady]:
        """Yield the windows up to now in which it grew steadily by at least so much, the shortest first."""
        for level, bins in enumerate(self._levels):
            lows = [entry.low for entry in bins]
            for size in SIZES:
                if size > len(bins) or (level and size * FACTOR <= SIZES[-1]):
                    continue  # a finer level has this window
                span = size // NUM_BLOCKS
                if min(lows[-span:]) - min(lows[-size : span - size]) < min_growth_bytes:
                    continue
                if found := self._look(level, lows, size):
                    yield found

    def _look(self, level: int, lows: Sequence[float], size: int) -> Steady | None:
        window, span = list(self._levels[level])[-size:], size // NUM_BLOCKS
        first, last = window[0].step, window[-1].step
        if first is not None and last is not None and last - first < MIN_WINDOW_STEPS:
            return None
        floor = _block_lows(lows[-size:], span)
        if not _is_growth(floor):
            return None
        growth = floor[-1] - floor[0]
        new_part = min(1.0, (floor[-1] - self._high_water(level, lows[:-size], span)) / growth)
        if new_part < MIN_NEW_PART:
            return None
        block_s = span * BIN_S * FACTOR**level
        per_block = median((floor[j] - floor[i]) / (j - i) for i, j in combinations(range(NUM_BLOCKS), 2))
        tops = [max(entry.high for entry in window[at : at + span]) for at in range(0, size, span)]
        spike_bytes = max(0.0, median(top - low for top, low in zip(tops, floor, strict=True)) - per_block)
        if growth < MIN_SPIKE_PART * spike_bytes:
            return None
        return Steady(
            for_s=new_part * NUM_BLOCKS * block_s,
            rate_bytes_hz=per_block / block_s,
            growth_bytes=growth,
            now_bytes=min(floor[-1] + per_block, self.last_bytes),
            spike_bytes=spike_bytes,
            further_bytes=_further(floor),
        )

    def _high_water(self, level: int, earlier: Sequence[float], span: int) -> float:
        """Return the highest level before a window that lasted for about a block of it."""
        bins = self._levels[level]
        known = _block_lows(earlier[len(earlier) % span :], span)
        begin_s = bins[0].number * BIN_S * FACTOR**level
        for coarser in range(level + 1, NUM_LEVELS):
            width_s = BIN_S * FACTOR**coarser
            known += [entry.low for entry in self._levels[coarser] if (entry.number + 1) * width_s <= begin_s]
        return max(known, default=float("-inf"))


def _block_lows(lows: Sequence[float], span: int) -> list[float]:
    return [min(lows[at : at + span]) for at in range(0, len(lows), span)]


def _is_growth(lows: Sequence[float]) -> bool:
    """Return whether the lowest figures of blocks rise all along, from the first one, and not by one jump."""
    increments = [after - before for before, after in pairwise(lows)]
    total = lows[-1] - lows[0]
    mean = total / len(increments)
    if total <= 0:
        return False
    has_grown = [increment >= MIN_INCREMENT * mean for increment in increments]
    return (
        # Growth that begins within the window has not lasted so long, and may slow down all the while.
        has_grown[0]
        and sum(has_grown) >= len(increments) - 1
        and min(increments) >= -MAX_SETBACK * mean
        and max(increments) <= MAX_INCREMENT * total
    )


def _further(lows: Sequence[float]) -> float:
    """Return how much is to come where the increments shrink as those of a filling cache do: a geometric series."""
    first, last = lows[2] - lows[0], lows[-1] - lows[-3]
    if last <= 0.0:
        return 0.0
    if first <= 0.0 or last >= first:
        return float("inf")
    per_block = float((last / first) ** (1 / 3))
    return last / 2 * per_block / (1.0 - per_block)
