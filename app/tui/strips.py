"""All that leans on how Textual is built inside, and one switch to do without it.

Textual 8 paints a widget's lines through a cache of decorated strips, and a strip caches its own cuts inside itself: a
live view pays for both on every line and leaves cyclic garbage behind, which the collector then stops the screen for.
Live views have no borders, padding or tint, so they hand their lines over directly, as strips that remember nothing.
`RANKDECK_STOCK_STRIPS=1` goes back to the stock way; the picture is the same.

Source: textual.strip.Strip, textual.widget.Widget.render_lines and textual._compositor of Textual 8.2.8.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from textual.cache import FIFOCache
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.segment import Segment
    from textual.geometry import Region

HAS_STOCK_STRIPS = os.environ.get("RANKDECK_STOCK_STRIPS", "") == "1"


class _NoCache(FIFOCache[Any, Any]):
    """Takes everything and remembers nothing; one serves all strips."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget."""

    set = __setitem__  # type: ignore[assignment]  # the parameters' names are the same

    def get(self, key: Any, default: Any = None) -> Any:  # noqa: ARG002 (the signature is FIFOCache's)
        """Return the default."""
        return default


_NO_CACHE = _NoCache(1)


class LiveStrip(Strip):
    """A strip that is painted once: no caches, so no reference to itself."""

    __slots__ = ()

    def __init__(self, segments: Sequence[Segment], cell_length: int) -> None:
        self._segments = list(segments)
        self._cell_length = cell_length
        self._divide_cache = _NO_CACHE
        self._crop_cache = _NO_CACHE
        self._style_cache = _NO_CACHE
        self._filter_cache = _NO_CACHE
        self._line_length_cache = _NO_CACHE
        self._crop_extend_cache = _NO_CACHE
        self._offsets_cache = _NO_CACHE
        self._render_cache = None
        self._link_ids = None
        self._cell_count = None


def make_strip(segments: Sequence[Segment], cell_length: int) -> Strip:
    """Return one painted line of `cell_length` cells."""
    return Strip(segments, cell_length) if HAS_STOCK_STRIPS else LiveStrip(segments, cell_length)


class DirectWidget(Widget):
    """A widget without borders, padding or tint that hands `render_line` straight to the compositor."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines of a region of the widget."""
        if HAS_STOCK_STRIPS:
            return super().render_lines(crop)
        strips = [self.render_line(y) for y in crop.line_range]
        if crop.x == 0 and crop.width == self.size.width:
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]
