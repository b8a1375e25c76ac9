"""Draws curves and bars with characters: eight dots a cell in braille, half a cell in a bar.

Source: the Unicode block Braille Patterns, U+2800: bit n of the offset is dot n + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_DOT_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of the dot in column 0 or 1, row 0 (top) to 3."""

THICK_FROM_ROWS = 16


def bounds(points: Sequence[tuple[float, float]]) -> tuple[float, float, float, float]:
    """Return (x_min, x_max, y_min, y_max), each pair apart even when the data are not."""
    xs = [x for x, _ in points]
    ys = [y for _, y in points]
    x_min, x_max, y_min, y_max = min(xs), max(xs), min(ys), max(ys)
    if x_max == x_min:
        x_max = x_min + 1.0
    if y_max == y_min:
        margin = abs(y_min) * 0.1 or 1.0
        y_min, y_max = y_min - margin, y_max + margin
    return x_min, x_max, y_min, y_max


def curve(points: Sequence[tuple[float, float]], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Draw points, joined, into `height` strings of `width` cells; blank without points."""
    if width < 1 or height < 1:
        return []
    if not points:
        return [" " * width] * height
    columns, rows = (width, height) if ascii_only else (width * 2, height * 4)
    dots = _dot_rows(points, columns, rows)
    if rows >= THICK_FROM_ROWS:
        # A line one dot thin is lost on a tall chart.
        dots = {column: (top, min(rows - 1, bottom + 1)) for column, (top, bottom) in dots.items()}
    if ascii_only:
        grid = [[" "] * width for _ in range(height)]
        for column, (top, bottom) in dots.items():
            for row in range(top, bottom + 1):
                grid[row][column] = "*"
        return ["".join(line) for line in grid]
    cells = [[0] * width for _ in range(height)]
    for column, (top, bottom) in dots.items():
        bits = _DOT_BITS[column % 2]
        for row in range(top, bottom + 1):
            cells[row // 4][column // 2] |= bits[row % 4]
    return ["".join(chr(0x2800 + cell) if cell else " " for cell in line) for line in cells]


def _dot_rows(points: Sequence[tuple[float, float]], columns: int, rows: int) -> dict[int, tuple[int, int]]:
    """Return {column: (top row, bottom row)}: the mean of each column's points, joined to the column before."""
    x_min, x_max, y_min, y_max = bounds(points)
    sums: dict[int, tuple[float, int]] = {}
    for x, y in points:
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
        # From just beyond the dot before to this one: a steep curve has no gaps and stays thin.
        spans[column] = _stretched(spans.get(column), row)
        if abs(row - previous) > 1:
            step = 1 if row > previous else -1
            spans[column] = _stretched(spans[column], previous + step)
        previous = row


def _stretched(span: tuple[int, int] | None, row: int) -> tuple[int, int]:
    return (row, row) if span is None else (min(span[0], row), max(span[1], row))


def bar_cells(frac: float, width: int) -> tuple[int, bool, int]:
    """Return (full cells, whether a half cell follows, empty cells) of a bar that is `frac` full.

    Anything above nothing shows at least the half cell: a bar never hides that there is something.
    """
    halves = round(min(1.0, max(0.0, frac)) * width * 2)
    if frac > 0 and halves == 0 and width > 0:
        halves = 1
    full, half = divmod(halves, 2)
    return full, bool(half), width - full - half
