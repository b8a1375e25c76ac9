"""The curve of the loss over the steps, with its scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.charts import bounds, curve
from app.tui.drawing import Line
from app.words import loss_text

if TYPE_CHECKING:
    from app.tui.theme import Look
    from app.tui.trend import Trend

SCALE_WIDTH = 7


def loss_panel(look: Look, trend: Trend, width: int, height: int) -> list[Line]:
    """Return the panel: a title, `height` - 1 lines of curve, the highest and lowest value at the left."""
    palette = look.palette
    title = Line(look).put(" LOSS", palette.heading)
    lines = [title]
    points = trend.points
    if not points:
        lines.append(Line(look).put(" no loss reported yet", palette.faint))
    else:
        _, _, low, high = bounds(points)
        first, last = points[0], points[-1]
        title.put(f"  {loss_text(last[1])} at step {last[0]:,.0f}", palette.heading)
        title.put(f", {loss_text(first[1])} at {first[0]:,.0f}", palette.heading)
        drawn = curve(points, max(1, width - SCALE_WIDTH - 2), height - 1, ascii_only=look.is_ascii)
        for index, text in enumerate(drawn):
            scale = loss_text(high) if index == 0 else loss_text(low) if index == len(drawn) - 1 else ""
            line = Line(look).cell(scale, SCALE_WIDTH, palette.muted, is_right=True)
            lines.append(line.put(look.glyphs.scroll_track, palette.faint).put(text, palette.accent))
    title.fit(width, palette.heading)
    return lines
