"""The last line of the screen, and the screen of a terminal too small for the views.

`Footer` shows the most important keys and the latest notice. `TooSmall` replaces the views.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from app.tui.actions import available
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from textual.events import Click
    from textual.geometry import Size

    from app.tui.ui_state import UiState

LESS_NEEDFUL = 7
"""Place in the footer from which a key gives way to a notice that fits then."""
NEEDFUL = 4
"""Place from which a key gives way to the beginning of a notice that would not fit otherwise."""
MIN_NOTICE_CELLS = 16
"""Cells from which the beginning of a notice is shown."""
_CLAUSE_END = re.compile("[;,] ")
"""End of a first clause that stands alone; what comes before a colon does not: `gpu2: the connection broke`."""


class Footer(LineView):
    """As many keys as fit; the least important are left out first."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "footer")
        self._spans: list[tuple[int, int, str]] = []

    def build(self) -> None:
        palette, ui = self.look.palette, self.ui
        notice = self.look.shown(ui.new_notice)
        line = self.line()
        self._spans = []
        for key, title, call in self._hints(notice):
            start = line.width
            line.put(f" {key}", palette.key).put(f" {title} ", palette.bar_muted)
            self._spans.append((start, line.width, call))
        if text := _fitting(notice, self.size.width - line.width - 2, self.look.glyphs.ellipsis):
            line.pad(self.size.width - cell_len(text) - 1, palette.bar).put(text, palette.bar_muted)
        line.fit(self.size.width, palette.bar)
        self.lines = [line]

    def on_click(self, event: Click) -> None:
        for start, stop, call in self._spans:
            if start <= event.x < stop and call:
                self.app.call_later(self.app.run_action, call)

    def _all_hints(self) -> list[tuple[int, str, str, str]]:
        """Return (place, key, title, action), the most important first."""
        keymap = self.ui.keymap
        actions = [action for action in available(self.ui.source) if action.footer]
        hints = [(action.footer, keymap.first(action.name), action.title, action.call) for action in actions]
        return sorted(hint for hint in [(0, keymap.views(), "Views", ""), *hints] if hint[1])

    def _hints(self, notice: str) -> list[tuple[str, str, str]]:
        """Return (key, title, action) of the keys that fit; less important keys give way to a notice."""
        hints = self._all_hints()
        rooms = [cell_len(part) + 2 for part in (notice, _clause(notice)) if part]
        first_to_go, left = LESS_NEEDFUL, self.size.width - _width(hints, LESS_NEEDFUL)
        if rooms and rooms[-1] > left:
            first_to_go, left = NEEDFUL, self.size.width - _width(hints, NEEDFUL)
        notice_width = next((room for room in rooms if room <= left), left if rooms else 0)
        if notice_width < MIN_NOTICE_CELLS and notice_width not in rooms:
            notice_width = 0
        while len(hints) > 1:
            room = self.size.width - (notice_width if hints[-1][0] >= first_to_go else 0)
            if _width(hints) <= room:
                break
            hints.pop()
        return [hint[1:] for hint in sorted(hints, key=lambda hint: (hint[0] == 1, hint[0]))]


def _width(hints: list[tuple[int, str, str, str]], before: int | None = None) -> int:
    """Return the cells that hints need: all of them, or those before a place in the footer."""
    return sum(len(key) + len(title) + 4 for place, key, title, _ in hints if before is None or place < before)


def _clause(sentence: str) -> str:
    return _CLAUSE_END.split(sentence)[0]


def _fitting(text: str, room: int, ellipsis: str) -> str:
    """Return a sentence, its first clause, or its beginning; empty when there is room for none."""
    for part in (text, _clause(text)):
        if cell_len(part) <= room:
            return part
    if room < MIN_NOTICE_CELLS:
        return ""
    return set_cell_size(text, room - cell_len(ellipsis)).rstrip(" ;:,") + ellipsis


MIN_WIDTH = 60
MIN_HEIGHT = 15


def is_too_small(size: Size) -> bool:
    """Return whether a terminal is too small for the views."""
    return size.width < MIN_WIDTH or size.height < MIN_HEIGHT


class TooSmall(LineView):
    """The terminal's size, the size needed, and how to leave."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "too-small")

    def build(self) -> None:
        size = self.app.size
        lines = [
            self.line().put(f"{MIN_WIDTH}x{MIN_HEIGHT} needed, this is {size.width}x{size.height}"),
            self.line().put(f"({self.ui.keymap.first('quit')} quits)", self.look.palette.muted),
        ]
        self.lines = lines[: size.height]
