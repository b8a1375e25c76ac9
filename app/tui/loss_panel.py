"""The curve of the loss over the steps, with its scale."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.chart_panel import PLOT_INDENT, plot_lines
from app.tui.charts import Curve, bounds
from app.tui.drawing import Line
from app.words import loss_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.tui.theme import Look


def loss_panel(look: Look, points: Sequence[tuple[float, float]], width: int, height: int) -> list[Line]:
    """Return the panel of (step, loss) points: a title, and `height` - 1 lines of curve with their scale."""
    palette = look.palette
    title = Line(look).put(" LOSS", palette.heading)
    lines = [title]
    if not points:
        lines.append(Line(look).put(" no loss reported yet", palette.faint))
    else:
        first, last = points[0], points[-1]
        title.put(f"  {loss_text(last[1])} at step {last[0]:,.0f}", palette.heading)
        title.put(f", {loss_text(first[1])} at {first[0]:,.0f}", palette.heading)
        size = (max(1, width - PLOT_INDENT - 1), height - 1)
        lines += plot_lines(look, [Curve(points)], bounds(points), size, loss_text)
    title.fit(width, palette.heading)
    return lines
