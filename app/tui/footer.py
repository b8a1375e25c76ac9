"""The last line of the screen: the keys that matter, and the newest thing the session did."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len

from app.tui.actions import VIEW_NAMES, available
from app.tui.line_view import LineView

if TYPE_CHECKING:
    from app.tui.stage import Stage

NOTICE_FRAMES = 150
"""Fifteen seconds: later it is no longer news."""
_CLAUSE_END = re.compile("[;:,] ")


class Footer(LineView):
    """As many keys as fit, the least important leaving first."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "footer")

    def build(self) -> None:
        """Make the line."""
        palette = self.look.palette
        width = self.size.width
        actions = [action for action in available(self.stage.source) if action.footer]
        hints = [(0, f"1-{len(VIEW_NAMES)}", "Views"), *((a.footer, a.shown_keys.split()[0], a.title) for a in actions)]
        while len(hints) > 1 and sum(len(key) + len(title) + 4 for _, key, title in hints) > width:
            hints.remove(max(hints))
        line = self.line()
        for _, key, title in sorted(hints, key=lambda hint: (hint[0] == 1, hint[0])):
            line.put(f" {key}", palette.key).put(f" {title} ", palette.bar_muted)
        stage, room = self.stage, width - line.width - 2
        is_new = bool(stage.notices) and stage.beat - stage.noticed_at_beat < NOTICE_FRAMES
        if is_new and (text := _fitting(self.look.shown(stage.notices[-1]), room)):
            line.pad(width - cell_len(text) - 1, palette.bar).put(text, palette.bar_muted)
        line.fit(width, palette.bar)
        self.lines = [line]


def _fitting(text: str, room: int) -> str:
    """Return a sentence, or its first clause, if that fits; half a word says nothing."""
    for part in (text, _CLAUSE_END.split(text)[0]):
        if cell_len(part) <= room:
            return part
    return ""
