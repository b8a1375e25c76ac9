"""Where charts stand on the screen, what their scales and their axis of time say. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from app.words import seconds_text

MIN_CHART_WIDTH = 56
"""Two stand side by side from 115 cells on."""
MIN_CHART_HEIGHT = 7
"""A title and six lines: 24 dots."""
GAP = 2
MIN_TICK_CELLS = 15
"""Between two ticks: `1 h 15 min ago` and a blank."""
AGO = " ago"
"""Behind the oldest tick's age."""
DAY_S = 86_400
TICK_STEPS_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(DAY_S, 2 * DAY_S, 7 * DAY_S),
)
NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""What an axis may end at, times a power of ten."""


class Grid(NamedTuple):
    """Charts of one size in rows and columns.

    Attributes:
        columns: Side by side.
        rows: One upon the other, also those that are scrolled to.
        shown_rows: Those that are on the screen at once.
        width: Of a chart, in cells.
        heights: Of each row, in lines: of one height where there is something to scroll to.
    """

    columns: int
    rows: int
    shown_rows: int
    width: int
    heights: tuple[int, ...]


def arrange(num_charts: int, width: int, height: int) -> Grid:
    """Return how charts fill a part of the screen: all of them if they fit, as wide and as high as they can be."""
    most = max(1, min(num_charts, (width + GAP) // (MIN_CHART_WIDTH + GAP)))
    rows = max(1, -(-num_charts // most))
    columns = max(1, -(-num_charts // rows))
    shown = min(rows, max(1, height // MIN_CHART_HEIGHT))
    each, left = divmod(max(1, height), shown)
    is_scrolled = shown < rows
    heights = (each,) * rows if is_scrolled else tuple(each + (row < left) for row in range(rows))
    room = width - is_scrolled - GAP * (columns - 1)
    return Grid(columns, rows, shown, max(1, room // columns), heights)


class Axis(NamedTuple):
    """An axis of time that ends now.

    Attributes:
        ticks: Their columns.
        words: The line below it.
    """

    ticks: frozenset[int]
    words: str


def time_axis(span_s: float, width: int, newest: str = "now") -> Axis:
    """Return an axis of `width` cells over `span_s`, its right end named `newest`."""
    step_s = next((step for step in TICK_STEPS_S if step / span_s * width >= MIN_TICK_CELLS), TICK_STEPS_S[-1])
    ticks, placed = {width - 1}, [(width - len(newest), newest)]
    for number in range(1, min(width, int(span_s / step_s)) + 1):
        column = round((1.0 - number * step_s / span_s) * (width - 1))
        text = _age_text(number * step_s)
        start = max(0, column - len(text) // 2)
        if start + len(text) < placed[-1][0]:
            ticks.add(column)
            placed.append((start, text))
    start, oldest = placed[-1]
    start = max(0, start - len(AGO) // 2)
    if len(placed) > 2 and start + len(oldest + AGO) >= placed[-2][0]:
        del placed[-2]
    if len(placed) > 1 and start + len(oldest + AGO) < placed[-2][0]:
        placed[-1] = start, oldest + AGO
    words = ""
    for start, text in reversed(placed):
        words += " " * (start - len(words)) + text
    return Axis(frozenset(ticks), words[:width])


def _age_text(age_s: int) -> str:
    """Return `5 s`, `1 h 15 min`, `2 d` or `1 d 12 h`."""
    if age_s < 10:
        return f"{age_s} s"
    days, rest_s = divmod(age_s, DAY_S)
    return " ".join([f"{days} d"] * (days > 0) + [seconds_text(rest_s)] * (rest_s > 0))


def nice_above(value: float, base: float = 10.0) -> float:
    """Return a round number that is not below a positive value; `base` is that of its units: 1024 for bytes."""
    if not 0.0 < value < math.inf:
        return 1.0
    unit = base ** max(0, math.floor(math.log(value, base))) if base != 10.0 else 1.0
    power = 10.0 ** math.floor(math.log10(value / unit))
    return next((nice * power * unit for nice in NICE if nice * power * unit >= value), 10.0 * power * unit)
