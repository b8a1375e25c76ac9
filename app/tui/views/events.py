"""The view of events with their times, the latest last."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from app.filters.lines import EVENT_KEYS, is_event_shown
from app.text import seconds_cell
from app.tui.widgets.drawing import wrapped
from app.tui.widgets.line_view import FilteredView

if TYPE_CHECKING:
    from app.recording.events import Event, EventLog
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line

TIME_WIDTH = 8
AGE_WIDTH = 6
KIND_WIDTH = 10
MAX_DETAIL_LINES = 4


class EventsView(FilteredView):
    """Follows the latest event until the user moves up; the selected event is shown in full."""

    has_selection = True
    filter_keys = EVENT_KEYS
    filter_example = "kind=verdict,job severity=critical rank=2 word /regex/ !not"

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "events")
        self.is_following = True
        self._shown: list[tuple[int, Event]] = []
        """The shown events, each with its number, counted from the first event ever."""
        self._num_looked_at = self._num_late = 0
        self._log = ui.events
        """Events that `_shown` counts; a replay that goes back replaces them immediately, before it is painted."""
        self._is_wish_new = False

    @property
    def num_rows(self) -> int:
        return len(self._shown)

    @property
    def event(self) -> Event | None:
        return self._shown[self.selected][1] if self._shown else None

    @property
    def selected_rank(self) -> int | None:
        return None if self.event is None else next(iter(self.event.ranks), None)

    @property
    def copied(self) -> tuple[str, str] | None:
        event = self.event
        if event is None:
            return super().copied
        return "an event", f"{self.ui.source.time_text(event)}  {event.kind}  {event.text}"

    def row(self, index: int) -> Line:
        (_, event), palette = self._shown[index], self.look.palette
        style = self.look.severity_style(event.severity)
        at = self.ui.source.time_text(event)
        line = self.line().put(" ").cell(at, self._time_width, palette.muted).put("  ")
        age = seconds_cell(max(0.0, self._log.now_s - event.at_s))
        line.cell(age, AGE_WIDTH, palette.faint, is_right=True).put("  ")
        line.cell(f"{self.look.glyphs.severities[event.severity]} {event.kind}", KIND_WIDTH + 2, style).put(" ")
        line.cell(event.text, max(0, self.size.width - line.width - 2))
        return self.pointed(line) if index == self.selected else line

    def build(self) -> None:
        """Stay at the latest event, or at the selected one, whose row moves up when old events are dropped."""
        self._look_at_new()
        self.selected = max(0, min(self.num_rows - 1, self.selected))
        if self.is_following:
            self.selected = max(0, self.num_rows - 1)
        self.head = [self._title(self._log)]
        self.foot = self._details(self._shown[self.selected][1]) if self._shown else []
        if self.is_following:
            self.top = self._last_top

    def wish_changed(self) -> None:
        """Match all events again."""
        self._is_wish_new = True

    def move(self, rows: int) -> None:
        """Move the selection; at the last event, follow again."""
        self.is_following = self.selected + rows >= self.num_rows - 1
        super().move(rows)

    def scroll_rows(self, rows: int) -> None:
        """Move the window; the selection stays."""
        self.is_following = False
        super().scroll_rows(rows)

    @property
    def _time_width(self) -> int:
        """Width of the longest time: that of the first event, which has its day once it is old."""
        return max(TIME_WIDTH, len(self.ui.source.time_text(self._shown[0][1])))

    def _look_at_new(self) -> None:
        """Add new events that match, and remove dropped ones; match all again when events have other numbers."""
        log = self.ui.events
        end = log.num_dropped + len(log)
        kept: list[int] = []
        if self._is_wish_new or self._log is not log or self._num_late != log.num_late:
            kept = [self._number_in(log, row) for row in (self.selected, self.top)]
            self._is_wish_new, self._log, self._shown, self._num_looked_at = False, log, [], log.num_dropped
            self._num_late = log.num_late
        num_gone = bisect_left(self._shown, log.num_dropped, key=_number)
        del self._shown[:num_gone]
        self.selected, self.top = max(0, self.selected - num_gone), max(0, self.top - num_gone)
        for number in range(max(self._num_looked_at, log.num_dropped), end):
            event = log[number - log.num_dropped]
            if is_event_shown(event, self.filter, is_problems_only=self.is_problems_only):
                self._shown.append((number, event))
        self._num_looked_at = end
        if kept:
            self.selected, self.top = (bisect_left(self._shown, number, key=_number) for number in kept)

    def _number_in(self, log: EventLog, row: int) -> int:
        """Return the number of a row's event in a log, which may have older events added in front."""
        if row >= len(self._shown):
            return 0
        number, event = self._shown[row]
        return next((log.num_dropped + place for place in range(len(log)) if log[place] is event), number)

    def _title(self, log: EventLog) -> Line:
        palette = self.look.palette
        shown = f"{self.num_rows:,} of " if self.num_rows < len(log) else ""
        title = self.line().put(f" EVENTS  {shown}{len(log):,}", palette.heading)
        self.put_wish(title)
        if log.num_dropped:
            title.put(f", {log.num_dropped:,} older dropped", palette.heading)
        if not self.is_following:
            title.put("   End: follow the latest", palette.heading)
        if self.ui.source.reading:
            title.put(f"   {self.ui.source.reading}", palette.heading)
        elif not len(log):
            title.put("   nothing has happened yet", palette.heading)
        return title.fit(self.size.width, palette.heading)

    def _details(self, event: Event) -> list[Line]:
        """Return the whole sentence of the selected event when it does not fit its row."""
        palette, width = self.look.palette, self.size.width
        text = self.look.shown(event.text)
        room = width - 1 - self._time_width - 2 - AGE_WIDTH - 2 - KIND_WIDTH - 3 - 2
        if len(text) <= room or self.size.height < 3 * MAX_DETAIL_LINES:
            return []
        lines = wrapped(text, width - 3, MAX_DETAIL_LINES, self.look.glyphs.ellipsis)
        heading = self.line().put(" IN FULL", palette.heading)
        heading.fit(width, palette.heading)
        return [heading, *(self.line().put("  ").put(line) for line in lines)]


def _number(shown: tuple[int, Event]) -> int:
    return shown[0]
