"""A filter for a terminal's own colours: what a stock widget paints in any that may not be readable becomes default."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.filter import LineFilter

if TYPE_CHECKING:
    from textual.color import Color as TextualColor

DEFAULT = Color.default()
READABLE = frozenset({1, 5})
"""Red and magenta: see `app.tui.palette`."""


class OwnColours(LineFilter):
    """Works on every painted line."""

    def apply(self, segments: list[Segment], background: TextualColor) -> list[Segment]:  # noqa: ARG002 (Textual's)
        """Return the segments in colours that are readable whatever the terminal's ground is."""
        return [Segment(text, style and _in_own_colours(style), control) for text, style, control in segments]


@lru_cache(1024)
def _in_own_colours(style: Style) -> Style:
    colour, ground = (
        one if one is None or one.is_default or one.number in READABLE else DEFAULT
        for one in (style.color, style.bgcolor)
    )
    return style if (colour, ground) == (style.color, style.bgcolor) else style + Style.from_color(colour, ground)
