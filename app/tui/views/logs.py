"""What all ranks print, merged as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from app.tui.line_view import LineView
from app.tui.log_lines import log_line, prefix_width

if TYPE_CHECKING:
    from app.tui.drawing import Line
    from app.tui.log_store import StoredLine
    from app.tui.stage import Stage

SIDE_STEP = 8
"""Cells that one key press moves the text."""


class LogsView(LineView):
    """Follows the newest line until one scrolls back, and again from the last line on."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "logs")
        self.is_following = True
        self.side = 0
        self._first = 0
        self._prefix_width = 0
        self._seen = 0

    @property
    def num_rows(self) -> int:
        """Every line that is kept."""
        return len(self.stage.logs)

    def row(self, index: int) -> Line:
        """Return a log line."""
        stored = self.stage.logs.line(self.stage.logs.first + index)
        return log_line(self.look, stored, self._prefix_width, self.side)

    def build(self) -> None:
        """Stay at the newest line, or on the line that is being read."""
        logs = self.stage.logs
        # When old lines are dropped, the rows below get lower numbers: the line that is read stays where it is.
        self.top = max(0, self.top - (logs.first - self._first))
        self._first = logs.first
        self.head = [self._title()]
        if self.is_following:
            self.top = self._last_top
            self._seen = logs.end
        self._prefix_width = max(self._prefix_width, prefix_width(self._window()))

    def move(self, rows: int) -> None:
        """Scroll; at the last line, follow again."""
        self.scroll_rows(rows)

    def scroll_rows(self, rows: int) -> None:
        """Scroll; at the last line, follow again."""
        self.top = max(0, min(self._last_top, self.top + rows))
        self.is_following = self.top == self._last_top and (rows >= 0 or self._last_top == 0)
        self.redraw()

    def sideways(self, cells: int) -> None:
        """Move the text to the side, no further than the longest line in the window."""
        longest = max((cell_len(self._text(index)) for index in self._shown()), default=0)
        furthest = max(0, longest - (self.size.width - self._prefix_width - 8))
        self.side = max(0, min(furthest if cells > 0 else self.side, self.side + cells * SIDE_STEP))
        self.redraw()

    def _shown(self) -> range:
        return range(self.top, min(self.num_rows, self.top + self.body_height))

    def _window(self) -> list[StoredLine]:
        logs = self.stage.logs
        return [logs.line(logs.first + index) for index in self._shown()]

    def _text(self, index: int) -> str:
        return self.stage.logs.line(self.stage.logs.first + index).text

    def _title(self) -> Line:
        palette, logs = self.look.palette, self.stage.logs
        line = self.line().put(f" LOGS  {len(logs):,} lines", palette.heading)
        if logs.first:
            line.put(f", {logs.first:,} older dropped", palette.heading)
        if self.side:
            line.put(f"  {self.look.glyphs.arrow} from column {self.side}", palette.heading)
        unseen = logs.end - self._seen
        state = "following" if self.is_following else f"{unseen:,} new below, End follows" if unseen else "End follows"
        line.pad(self.size.width - len(state) - 1, palette.heading).put(state, palette.heading)
        return line
