"""What all ranks print, merged as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from app.tui.line_view import LineView
from app.tui.log_lines import log_line, prefix_width, shifted

if TYPE_CHECKING:
    from app.rows import RootCauseRow
    from app.tui.drawing import Line
    from app.tui.log_store import StoredLine
    from app.tui.stage import Stage

SIDE_STEP = 8
"""Cells that one key press moves the text."""


class LogsView(LineView):
    """Follows the newest line until one scrolls back, and again from the last line on.

    Once a rank has failed, the root cause stands above the lines, and its traceback can take their place.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "logs")
        self.is_following = True
        self.shows_traceback = False
        self.side = 0
        self._top_of_lines = 0
        self._first = 0
        self._prefix_width = 0
        self._seen = 0

    @property
    def cause(self) -> RootCauseRow | None:
        """Why the job failed; None while no rank has."""
        job = self.stage.view.job() if self.stage.view is not None else None
        return job.root_cause if job is not None else None

    @property
    def num_rows(self) -> int:
        """Every line that is kept."""
        return len(self.lines) if self.shows_traceback else len(self.stage.logs)

    def row(self, index: int) -> Line:
        """Return a log line, or one of the traceback."""
        if self.shows_traceback:
            return self.lines[index]
        stored = self.stage.logs.line(self.stage.logs.first + index)
        return log_line(self.look, stored, self._prefix_width, self.side)

    def show_traceback(self, *, is_wanted: bool) -> None:
        """Show the traceback of the root cause, or the lines again where they were."""
        if is_wanted == self.shows_traceback:
            return
        if is_wanted:
            self._top_of_lines, self.top = self.top, 0
        else:
            self.top = self._top_of_lines
        self.shows_traceback, self.side = is_wanted, 0
        self.redraw()

    def build(self) -> None:
        """Stay at the newest line, or on the line that is being read."""
        logs, cause = self.stage.logs, self.cause
        if cause is None and self.shows_traceback:
            self.shows_traceback, self.top = False, self._top_of_lines
        # When old lines are dropped, the rows below get lower numbers: the line that is read stays where it is.
        num_dropped, self._first = logs.first - self._first, logs.first
        self._top_of_lines = max(0, self._top_of_lines - num_dropped)
        self.head = [] if cause is None else self._cause_lines(cause)
        if cause is not None and self.shows_traceback:
            self.lines = self._traceback_lines(cause)
            return
        self.top = max(0, self.top - num_dropped)
        self.head.append(self._title())
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
        if self.shows_traceback:
            self.redraw()
            return
        self.is_following = self.top == self._last_top and (rows >= 0 or self._last_top == 0)
        self.redraw()

    def sideways(self, cells: int) -> None:
        """Move the text to the side, no further than the longest line in the window."""
        longest = max((cell_len(self._text(index)) for index in self._shown()), default=0)
        furthest = max(0, longest - (self.size.width - 8 - (0 if self.shows_traceback else self._prefix_width)))
        self.side = max(0, min(furthest if cells > 0 else self.side, self.side + cells * SIDE_STEP))
        self.redraw()

    def _shown(self) -> range:
        return range(self.top, min(self.num_rows, self.top + self.body_height))

    def _window(self) -> list[StoredLine]:
        logs = self.stage.logs
        return [logs.line(logs.first + index) for index in self._shown()]

    def _text(self, index: int) -> str:
        if self.shows_traceback:
            return self._traceback[index]
        return self.stage.logs.line(self.stage.logs.first + index).text

    @property
    def _traceback(self) -> list[str]:
        cause = self.cause
        return [] if cause is None else cause.traceback or ["it left no traceback"]

    def _traceback_lines(self, cause: RootCauseRow) -> list[Line]:
        palette, lines = self.look.palette, []
        for text in self._traceback:
            style = palette.critical if cause.exception and cause.exception in text else palette.ink
            lines.append(self.line().put(" ").put(shifted(text, self.side) if self.side else text, style))
        return lines

    def _cause_lines(self, cause: RootCauseRow) -> list[Line]:
        """Return who failed where, what the key does, and of what."""
        palette, width = self.look.palette, self.size.width
        hint = "r: log lines" if self.shows_traceback else "r: traceback"
        who = f"launcher on {cause.node}" if cause.rank is None else f"rank {cause.rank} on {cause.node}"
        heading = self.line().put(" ROOT CAUSE  ", palette.heading)
        about = f"{who}, {cause.where}" if cause.where else who
        if cause.is_consequence:
            about = f"not known; {who} was the first to lose another"
        room = max(0, width - heading.width - len(hint) - 3)
        heading.cell(about, min(room, cell_len(self.look.shown(about))), palette.heading)
        heading.pad(width - len(hint) - 1, palette.heading).put(hint, palette.heading)
        what = f"{cause.exception} (then {cause.outer})" if cause.outer else cause.exception or cause.end
        return [heading, self.line().put(" ").cell(what, width - 1, palette.critical)]

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
