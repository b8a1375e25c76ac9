"""What happened, and when: the newest last, followed as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.drawing import wrapped
from app.tui.line_view import LineView
from app.words import seconds_cell

if TYPE_CHECKING:
    from app.event_log import Event, EventLog
    from app.tui.drawing import Line
    from app.tui.stage import Stage

TIME_WIDTH = 8
AGE_WIDTH = 6
KIND_WIDTH = 10
MAX_DETAIL_LINES = 4


class EventsView(LineView):
    """Follows the newest event until one moves up, and again from the last one on; the selected one stands in full."""

    has_selection = True

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "events")
        self.is_following = True
        self._num_dropped = 0

    @property
    def num_rows(self) -> int:
        """Every event that is kept."""
        return len(self._log)

    def row(self, index: int) -> Line:
        """Return the line of an event."""
        event, palette = self._log[index], self.look.palette
        style = self.look.severity_style(event.severity)
        is_selected = index == self.selected
        line = self.line().put(self.look.glyphs.pointer if is_selected else " ", palette.accent)
        line.cell(self.stage.source.time_text(event.at_s), TIME_WIDTH, palette.muted).put("  ")
        age = seconds_cell(max(0.0, self._log.now_s - event.at_s))
        line.cell(age, AGE_WIDTH, palette.faint, is_right=True).put("  ")
        line.cell(f"{self.look.glyphs.severities[event.severity]} {event.kind}", KIND_WIDTH + 2, style).put(" ")
        line.cell(event.text, max(0, self.size.width - line.width - 2))
        return line.pad(self.size.width).laid_over(palette.selected) if is_selected else line

    def build(self) -> None:
        """Stay at the newest event, or on the one that is selected; old ones that are dropped move it up."""
        log = self._log
        num_dropped, self._num_dropped = max(0, log.num_dropped - self._num_dropped), log.num_dropped
        self.selected = max(0, min(len(log) - 1, self.selected - num_dropped))
        self.top = max(0, self.top - num_dropped)
        if self.is_following:
            self.selected = max(0, len(log) - 1)
        self.head = [self._title(log)]
        self.foot = self._details(log[self.selected]) if len(log) else []
        if self.is_following:
            self.top = self._last_top

    def move(self, rows: int) -> None:
        """Move the selection; at the last event, follow again."""
        self.is_following = self.selected + rows >= self.num_rows - 1
        super().move(rows)

    def scroll_rows(self, rows: int) -> None:
        """Move the window; what is selected stays so."""
        self.is_following = False
        super().scroll_rows(rows)

    @property
    def _log(self) -> EventLog:
        return self.stage.source.events

    def _title(self, log: EventLog) -> Line:
        palette = self.look.palette
        title = self.line().put(f" EVENTS  {len(log):,}", palette.heading)
        if log.num_dropped:
            title.put(f", {log.num_dropped:,} older dropped", palette.heading)
        if not self.is_following:
            title.put("   End: follow the newest", palette.heading)
        if not len(log):
            title.put("   nothing has happened yet", palette.heading)
        title.fit(self.size.width, palette.heading)
        return title

    def _details(self, event: Event) -> list[Line]:
        """Return the whole sentence of the selected event, where its row does not hold it."""
        palette, width = self.look.palette, self.size.width
        text = self.look.shown(event.text)
        room = width - 1 - TIME_WIDTH - 2 - AGE_WIDTH - 2 - KIND_WIDTH - 3 - 2
        if len(text) <= room or self.size.height < 3 * MAX_DETAIL_LINES:
            return []
        lines = wrapped(text, width - 3, MAX_DETAIL_LINES, self.look.glyphs.ellipsis)
        heading = self.line().put(" IN FULL", palette.heading)
        heading.fit(width, palette.heading)
        return [heading, *(self.line().put("  ").put(line) for line in lines)]
