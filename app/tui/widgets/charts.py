"""Draws curves and bars with characters, and lays charts out on the screen.

Pure. `drawing` and `bar_cells` draw: eight dots a cell in braille, half a cell in a bar.

Source: the Unicode block Braille Patterns, U+2800: bit n of the offset is dot n + 1.

`arrange` places charts on the screen; `time_axis` and `nice_above` label their time axis and their scales.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from app.text import seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column 0 or 1, row 0 (top) to 3."""

THICK_FROM_ROWS = 16


class Box(NamedTuple):
    """The range of a drawing; points left and right of it are omitted, those above and below are put on its edge."""

    x_min: float
    x_max: float
    y_min: float
    y_max: float


class Curve(NamedTuple):
    """Points in the order of x; neighbours are joined, except over a y that is NaN."""

    points: Sequence[tuple[float, float]]
    is_dotted: bool = False


class DrawnLine(NamedTuple):
    """A line of a drawing: its cells, and the number of the curve that each shows; -1 for none."""

    text: str
    owners: Sequence[int]


def bounds(points: Sequence[tuple[float, float]]) -> Box:
    """Return the range of points, never empty in x or y, even when the data are."""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    x_min, x_max, y_min, y_max = min(xs), max(xs), min(ys), max(ys)
    if x_max == x_min:
        x_max = x_min + 1.0
    if y_max == y_min:
        margin = abs(y_min) * 0.1 or 1.0
        y_min, y_max = y_min - margin, y_max + margin
    return Box(x_min, x_max, y_min, y_max)


def drawing(curves: Sequence[Curve], box: Box, width: int, height: int, *, ascii_only: bool = False) -> list[DrawnLine]:
    """Draw curves into `height` lines of `width` cells; a cell shows the first curve that reaches it."""
    if width < 1 or height < 1:
        return []
    across, down = (1, 1) if ascii_only else (2, 4)
    cells = [[0] * width for _ in range(height)]
    owners = [[-1] * width for _ in range(height)]
    for number, curve in enumerate(curves):
        for column, row in _dots(curve, box, (width * across, height * down), pitch=across):
            y, x = row // down, column // across
            if owners[y][x] in {-1, number}:
                owners[y][x] = number
                cells[y][x] |= _DOT_BITS[column % 2][row % 4]
    if ascii_only:
        marks = [".*"[not curve.is_dotted] for curve in curves] + [" "]
        return [DrawnLine("".join(marks[owner] for owner in line), line) for line in owners]
    texts = ("".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells)
    return [DrawnLine(text, line) for text, line in zip(texts, owners, strict=True)]


def _dots(curve: Curve, box: Box, size: tuple[int, int], pitch: int) -> Iterator[tuple[int, int]]:
    """Yield (column, row) of every dot; of a dotted curve those that are `pitch` apart."""
    columns, rows = size
    for piece in _pieces(curve.points):
        spans = _dot_rows(piece, box, columns, rows)
        for column, (top, bottom) in spans.items():
            if curve.is_dotted:
                if column % pitch == 0 or len(spans) == 1:
                    yield from ((column, row) for row in range(top, bottom + 1, pitch))
                continue
            # A line one dot wide is hard to see on a tall chart.
            for row in range(top, min(rows - 1, bottom + (rows >= THICK_FROM_ROWS)) + 1):
                yield column, row


def _pieces(points: Sequence[tuple[float, float]]) -> Iterator[Sequence[tuple[float, float]]]:
    """Yield the runs of points between unknown values."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if math.isnan(point[1]):
            yield piece
            piece = []
        else:
            piece.append(point)
    yield piece


def _dot_rows(points: Sequence[tuple[float, float]], box: Box, columns: int, rows: int) -> dict[int, tuple[int, int]]:
    """Return {column: (top row, bottom row)}: the mean of each column's points, joined to the column before."""
    x_min, x_max, y_min, y_max = box
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
        if x_min <= x <= x_max:
            column = min(columns - 1, int((x - x_min) / (x_max - x_min) * columns))
            total, count = sums.get(column, (0.0, 0))
            sums[column] = (total + y, count + 1)
    placed = {
        column: min(rows - 1, max(0, round((y_max - total / count) / (y_max - y_min) * (rows - 1))))
        for column, (total, count) in sorted(sums.items())
    }
    spans: dict[int, tuple[int, int]] = {}
    before: tuple[int, int] | None = None
    for column, row in placed.items():
        if before is not None:
            _join(spans, before, (column, row))
        spans[column] = _stretched(spans.get(column), row)
        before = (column, row)
    return spans


def _join(spans: dict[int, tuple[int, int]], start: tuple[int, int], stop: tuple[int, int]) -> None:
    (x0, y0), (x1, y1) = start, stop
    previous = y0
    for column in range(x0 + 1, x1 + 1):
        row = round(y0 + (y1 - y0) * (column - x0) / (x1 - x0))
        # From the dot after the last one to this one: a steep curve has no gaps and stays thin.
        spans[column] = _stretched(spans.get(column), row)
        if abs(row - previous) > 1:
            step = 1 if row > previous else -1
            spans[column] = _stretched(spans[column], previous + step)
        previous = row


def _stretched(span: tuple[int, int] | None, row: int) -> tuple[int, int]:
    return (row, row) if span is None else (min(span[0], row), max(span[1], row))


def bar_cells(frac: float, width: int) -> tuple[int, bool, int]:
    """Return (full cells, whether a half cell follows, empty cells) of a bar that is `frac` full.

    Every value above zero shows at least the half cell: a bar never hides that there is something.
    """
    halves = round(min(1.0, max(0.0, frac)) * width * 2)
    if frac > 0 and halves == 0 and width > 0:
        halves = 1
    full, half = divmod(halves, 2)
    return full, bool(half), width - full - half


MIN_CHART_WIDTH = 56
"""Smallest width in cells; two charts are side by side from 115 cells on."""
MIN_CHART_HEIGHT = 7
"""Smallest height: a title and six lines, which are 24 dots."""
GAP = 2
MIN_TICK_CELLS = 15
"""Cells between two ticks: `1 h 15 min ago` and a blank."""
AGO = " ago"
"""Suffix of the oldest tick's age."""
DAY_S = 86_400
TICK_STEPS_S = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(DAY_S, 2 * DAY_S, 7 * DAY_S),
)
NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Ends of a scale, times a power of ten."""


class Grid(NamedTuple):
    """Charts of one size in rows and columns.

    Attributes:
        columns: Number of charts side by side.
        rows: Number of rows, including those to scroll to.
        shown_rows: Number of rows on the screen at the same time.
        width: Width of a chart, in cells.
        heights: Lines of each row; all equal when there are rows to scroll to.
    """

    columns: int
    rows: int
    shown_rows: int
    width: int
    heights: tuple[int, ...]


def arrange(num_charts: int, width: int, height: int) -> Grid:
    """Return how charts fill a part of the screen: all of them if they fit, as wide and high as possible."""
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
        ticks: Columns of the ticks.
        labels: The line of labels below the axis.
    """

    ticks: frozenset[int]
    labels: str


def time_axis(span_s: float, width: int, latest: str = "now") -> Axis:
    """Return an axis of `width` cells over `span_s`, its right end labelled `latest`."""
    step_s = next((step for step in TICK_STEPS_S if step / span_s * width >= MIN_TICK_CELLS), TICK_STEPS_S[-1])
    ticks, placed = {width - 1}, [(width - len(latest), latest)]
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
    labels = ""
    for start, text in reversed(placed):
        labels += " " * (start - len(labels)) + text
    return Axis(frozenset(ticks), labels[:width])


def _age_text(age_s: int) -> str:
    """Return `5 s`, `1 h 15 min`, `2 d` or `1 d 12 h`."""
    if age_s < 10:
        return f"{age_s} s"
    days, rest_s = divmod(age_s, DAY_S)
    return " ".join([f"{days} d"] * (days > 0) + [seconds_text(rest_s)] * (rest_s > 0))


def nice_above(value: float, base: float = 10.0) -> float:
    """Return a round number not below a positive value; `base` is that of its units: 1024 for bytes."""
    if not 0.0 < value < math.inf:
        return 1.0
    unit = base ** max(0, math.floor(math.log(value, base))) if base != 10.0 else 1.0
    power = 10.0 ** math.floor(math.log10(value / unit))
    return next((nice * power * unit for nice in NICE if nice * power * unit >= value), 10.0 * power * unit)
