"""A line of text under construction, and the few shapes that all views draw: bars, section heads, wrapped sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment

from app.tui.charts import bar_cells

if TYPE_CHECKING:
    from rich.style import Style

    from app.tui.theme import Look


class Line:
    """Segments from left to right, with the number of cells they take."""

    __slots__ = ("look", "segments", "width")

    def __init__(self, look: Look) -> None:
        self.look = look
        self.segments: list[Segment] = []
        self.width = 0

    def put(self, text: str, style: Style | None = None) -> Line:
        """Add clean text."""
        if text:
            text = self.look.shown(text)
            self.segments.append(Segment(text, style or self.look.palette.ink))
            self.width += len(text) if text.isascii() else cell_len(text)
        return self

    def cell(self, text: str, width: int, style: Style | None = None, *, is_right: bool = False) -> Line:
        """Add text in exactly `width` cells: cut with an ellipsis or padded."""
        text = fitted(self.look.shown(text), width, self.look.glyphs.ellipsis, is_right=is_right)
        if text:
            self.segments.append(Segment(text, style or self.look.palette.ink))
            self.width += width
        return self

    def pad(self, column: int, style: Style | None = None) -> Line:
        """Add blanks up to a column; nothing when the line is there already."""
        if self.width < column:
            self.segments.append(Segment(" " * (column - self.width), style or self.look.palette.ink))
            self.width = column
        return self

    def add(self, other: Line) -> Line:
        """Add another line's segments."""
        self.segments += other.segments
        self.width += other.width
        return self

    def bar(self, frac: float, width: int, style: Style, *, mark_frac: float | None = None) -> Line:
        """Add a bar that is `frac` full; `mark_frac` sets a mark on it."""
        glyphs, palette = self.look.glyphs, self.look.palette
        full, has_half, empty = bar_cells(frac, width)
        text = glyphs.bar_full * full + glyphs.bar_half * has_half
        if mark_frac is None:
            return self.put(text, style).put(glyphs.bar_empty * empty, palette.faint)
        at = min(width - 1, max(0, round(mark_frac * width)))
        whole = text + glyphs.bar_empty * empty
        for start, stop, part in ((0, min(at, len(text)), style), (len(text), at, palette.faint)):
            self.put(whole[start:stop], part)
        self.put(glyphs.mark, palette.ink)
        for start, stop, part in ((at + 1, len(text), style), (max(at + 1, len(text)), width, palette.faint)):
            self.put(whole[start:stop], part)
        return self

    def fit(self, width: int, fill: Style | None = None) -> list[Segment]:
        """Return the segments cut or padded to exactly `width` cells."""
        if self.width < width:
            self.pad(width, fill)
        elif self.width > width:
            self._cut(width)
        return self.segments

    def laid_over(self, style: Style) -> Line:
        """Put a style on top of every segment's own."""
        self.segments = [Segment(text, own + style if own else style) for text, own, _ in self.segments]
        return self

    def fade(self, start: int) -> None:
        """Paint the segments from the given one on as what is old."""
        faint = self.look.palette.faint
        self.segments[start:] = [Segment(text, faint) for text, _, _ in self.segments[start:]]

    def _cut(self, width: int) -> None:
        kept: list[Segment] = []
        left = width
        for segment in self.segments:
            size = segment.cell_length
            if size >= left:
                if left:
                    kept.append(Segment(set_cell_size(segment.text, left), segment.style))
                break
            kept.append(segment)
            left -= size
        self.segments, self.width = kept, width


def fitted(text: str, width: int, ellipsis: str, *, is_right: bool = False) -> str:
    """Return text in exactly `width` cells."""
    size = len(text) if text.isascii() else cell_len(text)
    if size == width:
        return text
    if size < width:
        return " " * (width - size) + text if is_right else text + " " * (width - size)
    return set_cell_size(text, width - 1) + ellipsis if width > 0 else ""


def wrapped(text: str, width: int, max_lines: int, ellipsis: str) -> list[str]:
    """Return text broken at blanks into at most `max_lines` lines of at most `width` cells; the last one may be cut."""
    lines: list[str] = []
    current = ""
    for word in text.split():
        longer = f"{current} {word}" if current else word
        if cell_len(longer) <= width or not current:
            current = longer
        else:
            lines.append(current)
            current = word
    lines.append(current)
    kept = lines[:max_lines]
    if len(lines) > max_lines:
        kept[-1] = f"{kept[-1]} {lines[max_lines]}"
    return [line if cell_len(line) <= width else fitted(line, width, ellipsis) for line in kept]
