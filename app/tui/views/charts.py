"""The job's figures over time: small charts over one time axis, with events marked on it."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from app.diagnosis.causes import Severity
from app.recording.events import EventKind
from app.tui.widgets.chart_panel import PLOT_INDENT, Frame, chart_lines, no_loss_text
from app.tui.widgets.charts import GAP, Axis, Grid, arrange, time_axis
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from rich.style import Style

    from app.recording.history import JobHistory
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line

SPANS_S = {"1 min": 60.0, "5 min": 300.0, "30 min": 1800.0, "all": float("inf")}
"""Times to choose from; a younger job fills the charts all the same."""
DEFAULT_SPAN = 1
MIN_SPAN_S = 30.0
AXIS_LINES = 2


class ChartsView(LineView):
    """Follows the latest figures; redrawn when there are new ones, once a second."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "charts")
        self._span = DEFAULT_SPAN
        self._drawn: Hashable = None
        self._grid: Grid | None = None

    def zoom(self, steps: int) -> None:
        """Show a longer time, by so many places of `SPANS_S`, or a shorter one."""
        self._span = max(0, min(len(SPANS_S) - 1, self._span + steps))
        self.redraw()

    def build(self) -> None:
        history, events = self.ui.history.shown, self.ui.events
        is_unknown = self.ui.view is not None and bool(self.ui.view.why_unknown)
        if is_unknown or history is None or history.begun_s is None:
            self._drawn, self.lines, self.foot = None, [], []
            why = self.ui.source.reading or "nothing to draw yet"
            self.head = [self.heading(self.line().put(f" CHARTS   {why}", self.look.palette.heading))]
            if is_unknown:
                self.head = self.nothing_yet("CHARTS", "")
            return
        drawn_of = (history, history.num_looks, len(events), events.num_dropped, self.ui.source.reading)
        no_loss = "" if history.loss_curve else self.ui.source.reading or no_loss_text(self.ui)
        wanted = (*drawn_of, no_loss, self._span, self.top, self.size, self.look.theme)
        if wanted == self._drawn:
            return
        self._drawn = wanted
        span_s = max(MIN_SPAN_S, min(list(SPANS_S.values())[self._span], history.now_s - history.begun_s))
        grid = arrange(len(history.figures), self.size.width, self.size.height - 1 - AXIS_LINES)
        frame = Frame(history.now_s - span_s, history.now_s, grid.width, frozenset())
        marks = self._marks(history, frame)
        frame = frame._replace(guides=frozenset(marks))
        axis = time_axis(span_s, frame.plot_width, "end" if history.is_over else "now")
        self.head = [self._heading(marks)]
        self._place(grid)
        self.lines = self._rows(history, grid, frame, no_loss)
        padding = self.size.height - 1 - AXIS_LINES - sum(grid.heights[: grid.shown_rows])
        num_below = len(history.figures) - (self.top // grid.heights[0] + grid.shown_rows) * grid.columns
        self.foot = [*self._axis_lines(axis, marks, grid, num_below), *(self.line() for _ in range(padding))]

    def scroll_rows(self, rows: int) -> None:
        height = self._grid.heights[0] if self._grid is not None else 1
        super().scroll_rows(-(-abs(rows) // height) * height * (1 if rows > 0 else -1))

    def _place(self, grid: Grid) -> None:
        """Keep the first chart in place when charts change their size."""
        first_row = self.top // self._grid.heights[0] if self._grid is not None else 0
        self.top = min(first_row, grid.rows - grid.shown_rows) * grid.heights[0]
        self._grid = grid

    def _rows(self, history: JobHistory, grid: Grid, frame: Frame, no_loss: str) -> list[Line]:
        """Return all charts, row by row."""
        lines: list[Line] = []
        for row, height in enumerate(grid.heights):
            figures = history.figures[row * grid.columns : (row + 1) * grid.columns]
            charts = [
                chart_lines(self.look, figure, history.window(figure.key, frame.begin_s), frame, height, no_loss)
                for figure in figures
            ]
            for index, parts in enumerate(zip_longest(*charts)):
                lines.append(self._side_by_side(parts, is_title=index == 0))
        return lines

    def _side_by_side(self, parts: tuple[Line, ...], *, is_title: bool) -> Line:
        line = self.line()
        for part in parts:
            if line.width:
                line.pad(line.width + GAP, self.look.palette.heading if is_title else None)
            line.add(part)
        return line.fit(self.size.width, self.look.palette.heading if is_title else None)

    def _heading(self, marks: Mapping[int, tuple[str, Style]]) -> Line:
        palette, glyphs = self.look.palette, self.look.glyphs
        line = self.line().put(" CHARTS ", palette.heading)
        for number, name in enumerate(SPANS_S):
            if number == self._span:
                line.put(f" [{name}]", palette.brand)
            else:
                line.put(f"  {name} ", palette.heading)
        keymap = self.ui.keymap
        if reading := self.ui.source.reading:
            return self.heading(line.put("  ").cell(reading, self.size.width - line.width - 1, palette.heading))
        if keys := " ".join(filter(None, (keymap.first("zoom_in"), keymap.first("zoom_out")))):
            line.put(f"  {keys} zoom", palette.heading)
        legend = [f"{glyphs.thick} mean  {glyphs.dotted} lowest, highest"]
        shown = {glyph for glyph, _ in marks.values()}
        if verdicts := "".join(sorted(shown - {glyphs.attempt})):
            key = keymap.first("events")
            legend.append(f"{verdicts} verdict{': see ' if key else ''}{key}")
        if glyphs.attempt in shown:
            legend.append(f"{glyphs.attempt} restart")
        for labels in legend:
            if line.width + len(labels) + 4 <= self.size.width:
                line.put(f"    {labels}", palette.heading)
        return self.heading(line)

    def _marks(self, history: JobHistory, frame: Frame) -> dict[int, tuple[str, Style]]:
        """Return the mark of each column: the worst of its new verdicts, or the start of an attempt."""
        marks: dict[int, tuple[str, Style]] = {}
        for at_s, _ in history.attempts:
            if frame.begin_s <= at_s <= frame.end_s:
                marks[frame.column(at_s)] = (self.look.glyphs.attempt, self.look.palette.strong)
        worst: dict[int, Severity] = {}
        for event in self.ui.events.latest_first():
            if event.at_s < frame.begin_s:
                break
            if event.kind is EventKind.VERDICT and event.at_s <= frame.end_s:
                column = frame.column(event.at_s)
                if worst.get(column) is not Severity.CRITICAL:
                    worst[column] = event.severity
        for column, severity in worst.items():
            marks[column] = (self.look.glyphs.severities[severity], self.look.severity_style(severity))
        return marks

    def _axis_lines(self, axis: Axis, marks: Mapping[int, tuple[str, Style]], grid: Grid, num_below: int) -> list[Line]:
        """Return the axis below each column of charts, and its labels; left of it how many charts are further down."""
        palette, glyphs = self.look.palette, self.look.glyphs
        rule, labels = self.line().put(f"{num_below} more" if num_below > 0 else "", palette.accent), self.line()
        for column in range(grid.columns):
            start = column * (grid.width + GAP)
            rule.pad(start + PLOT_INDENT - 1).put(glyphs.corner, palette.faint)
            labels.pad(start + PLOT_INDENT).put(axis.labels, palette.muted)
            run = ""
            for place in range(len(axis.labels)):
                if place in marks:
                    rule.put(run, palette.faint).put(*marks[place])
                    run = ""
                else:
                    run += glyphs.tick if place in axis.ticks else glyphs.line
            rule.put(run, palette.faint)
        return [rule, labels]
