"""The view of stragglers: which ranks cost the others time, and what they do in that time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from app.diagnosis.causes import Severity
from app.text import percent_text, seconds_cell
from app.tui.widgets.columns import PERCENT_WIDTH, Column, Table, cells, figure, place_columns
from app.tui.widgets.line_view import LineView
from app.view.because_text import signal_texts
from app.view.pace import window_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.pace import PaceRow, PaceSummary
    from app.view.rows import SignalRow
    from app.view.view import View

COST_BAR_WIDTH = 12
NARROW_COST_BAR_WIDTH = 8
FULL_COST_FRAC = 0.5
"""Cost at which the bar is full: a rank that costs half of everybody's time."""
WIDE_FROM = 110
"""Cells from which the names of phases are shown in full."""
PHASE_WIDTH = 6
"""Least cells of a phase: its share, and the mark of one that is more than the others'."""
MAX_PHASES = 7
WORSE = "!"
LABEL_WIDTH = 23
VALUE_WIDTH = 10
SINCE_WIDTH = 6
SIGNAL_WIDTH = 3 + LABEL_WIDTH + 2 * (1 + VALUE_WIDTH) + 1 + SINCE_WIDTH + 3
"""Cells of a signal: its mark, its name, both values, since when, and a gap."""
MIN_SIGNAL_LINES = 3
SHORT_NAMES = {
    "forward": "FWD",
    "backward": "BWD",
    "optimizer": "OPTIM",
    "barrier": "BARR",
    "checkpoint": "CKPT",
    "joining": "JOIN",
    "starting": "START",
}


class StragglersView(LineView):
    """A row per rank, the costliest first; what a rank does more than the others is marked.

    The first row is selected until the user moves the selection; from then on it stays with the rank.
    """

    has_selection = counts_free_lines = True

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "stragglers")
        self._table: Table[PaceRow] | None = None
        self._ranks: NDArray[np.int64] = np.zeros(0, np.int64)
        """Rank of each row."""
        self._rank = -1
        """Rank that the user has selected, -1 before; while it has no row, the rank at its place is selected."""
        self._rows: dict[int, PaceRow] = {}

    @property
    def num_rows(self) -> int:
        return len(self._ranks)

    def row(self, index: int) -> Line:
        row = self._rows.get(index)
        if row is None or self._table is None:
            return self.line()
        line = self._table.row(row)
        return self.pointed(line) if index == self.selected else line

    @property
    def selected_rank(self) -> int | None:
        return int(self._ranks[self.selected]) if self.selected < len(self._ranks) else super().selected_rank

    def move(self, rows: int) -> None:
        """Move the selection; from now on it stays with the rank."""
        if self.num_rows:
            self._rank = int(self._ranks[max(0, min(self.num_rows - 1, self.selected + rows))])
        super().move(rows)

    def build(self) -> None:
        view = self.known
        self.head, self.foot = [], []
        pace = view.pace if view is not None else None
        self._ranks = pace.ranks if pace is not None else np.zeros(0, np.int64)
        if view is None or pace is None:
            self.head = self.nothing_yet("TIME OF EACH RANK", "Once a job runs: which rank costs the others time.")
            return
        summary = pace.summary()
        self._find_selected()
        columns = _columns(summary, view, self.size.width)
        self._table = Table(self.look, columns, self.size.width)
        self.head = [self._title(summary), self._sentence(summary)]
        if self.num_rows:
            self.head.append(self.heading(self._table.heading()))
            window = range(self.top, min(self.num_rows, self.top + self.size.height))
            self._rows = dict(zip(window, pace.rows(window), strict=False))
            signals = [] if self.selected_rank is None else pace.signals(self.selected_rank)
            legend = self._legend(has_signals=bool(signals), has_where="WHERE" in self._table.titles)
            free = self.size.height - len(self.head) - len(legend)
            # The panel takes what the rows leave, and a part of their room where there are many.
            self.foot = [*self._signals(signals, max(free - self.num_rows, free // 2)), *legend]

    def _find_selected(self) -> None:
        """Find the row of the selected rank, and keep it where it is on the screen."""
        found, before = np.flatnonzero(self._ranks == self._rank), self.selected
        self.selected = int(found[0]) if len(found) else max(0, min(before, self.num_rows - 1))
        self.top = max(0, self.top + self.selected - before)

    def _title(self, summary: PaceSummary) -> Line:
        palette = self.look.palette
        title = self.line().put(" TIME OF EACH RANK", palette.heading)
        note = window_text(summary) if summary.num_rows else ""
        if note and title.width + len(note) + 3 < self.size.width:
            title.pad(self.size.width - len(note) - 1, palette.heading).put(note, palette.heading)
        return self.heading(title)

    def _sentence(self, summary: PaceSummary) -> Line:
        style = self.look.severity_style(summary.severity)
        line = self.line().put(f" {self.look.glyphs.severities[summary.severity]} ", style)
        line.cell(summary.text, self.size.width - line.width - 1)
        return line.pad(self.size.width)

    def _signals(self, signals: Sequence[SignalRow], max_lines: int) -> list[Line]:
        """Return the signals of the selected rank beside its peers', in as many columns as fit."""
        if not signals or max_lines < MIN_SIGNAL_LINES:
            return []
        num_columns = max(1, (self.size.width - 1) // SIGNAL_WIDTH)
        num_lines = min(max_lines - 1, -(-len(signals) // num_columns))
        titles = self.line()
        for column in range(min(num_columns, -(-len(signals) // num_lines))):
            titles.pad(column * SIGNAL_WIDTH, self.look.palette.heading)
            name = f" SIGNALS OF RANK {self.selected_rank}" if not column else ""
            titles.cell(name, LABEL_WIDTH + 3, self.look.palette.heading)
            for title, width in (("ITS", VALUE_WIDTH), ("PEERS", VALUE_WIDTH), ("SINCE", SINCE_WIDTH)):
                titles.put(" ", self.look.palette.heading).cell(title, width, self.look.palette.heading, is_right=True)
        lines = [self.heading(titles)]
        for place in range(num_lines):
            line = self.line()
            for column, row in enumerate(signals[place::num_lines][:num_columns]):
                self._put_signal(line.pad(column * SIGNAL_WIDTH), row)
            lines.append(line)
        return lines

    def _put_signal(self, line: Line, row: SignalRow) -> None:
        palette = self.look.palette
        label, value, peers = signal_texts(row)
        style = palette.warning if row.is_worse else palette.muted
        line.put(f" {WORSE if row.is_worse else ' '} ", palette.warning).cell(label, LABEL_WIDTH, style)
        line.put(" ").cell(value, VALUE_WIDTH, style, is_right=True)
        line.put(" ").cell(peers, VALUE_WIDTH, palette.muted, is_right=True)
        line.put(" ").cell(
            "" if row.since_s is None else seconds_cell(row.since_s), SINCE_WIDTH, palette.faint, is_right=True
        )

    def _legend(self, *, has_signals: bool, has_where: bool) -> list[Line]:
        palette, more = self.look.palette, self.look.glyphs.more
        line = self.line().put(f" {more}", palette.warning).put(" more than the others", palette.faint)
        lines = [line]
        notes = [f"{WORSE} differs enough from its peers", "what is 0 for all is left out"] if has_signals else []
        for note in (
            *notes,
            "COST how much less it waits than most",
            "LAST how often it comes last of the ranks on its node",
            *(["WHERE its line now; a verdict names its usual one"] if has_where else []),
        ):
            if lines[-1].width + len(note) + 3 > self.size.width:
                lines.append(self.line())
            lines[-1].put(f"   {note}", palette.faint)
        return lines


def _columns(summary: PaceSummary, view: View, width: int) -> list[Column[PaceRow]]:
    is_wide = width >= WIDE_FROM
    bar_width = COST_BAR_WIDTH if is_wide else NARROW_COST_BAR_WIDTH
    named = [(phase, phase.upper() if is_wide else SHORT_NAMES.get(phase, phase.upper())) for phase in summary.phases]
    phases: Sequence[Column[PaceRow]] = [
        Column(title, max(PHASE_WIDTH, len(title)), 3 + place, partial(_paint_phase, phase=phase), is_right=True)
        for place, (phase, title) in enumerate(named[:MAX_PHASES])
    ]
    return [
        *place_columns(view),
        Column("COST", bar_width + 1 + PERCENT_WIDTH, 0, _paint_cost),
        _percent("WAITS", 0, lambda row: row.wait_frac),
        _percent("LAST", 1, lambda row: row.last_frac),
        *phases,
        Column("WHERE", 20, 20, cells(lambda row: row.where, "muted"), is_flexible=True),
    ]


def _paint_cost(line: Line, row: PaceRow, width: int) -> None:
    palette = line.look.palette
    if row.cost_frac is None:
        line.cell("", width)
        return
    is_named = row.severity is Severity.WARNING
    style = palette.warning if is_named else palette.busy
    line.bar(row.cost_frac / FULL_COST_FRAC, width - PERCENT_WIDTH - 1, style).put(" ")
    line.cell(percent_text(row.cost_frac), PERCENT_WIDTH, style if is_named else palette.muted, is_right=True)


def _percent(title: str, importance: int, value_of: Callable[[PaceRow], float | None]) -> Column[PaceRow]:
    return figure(
        title, PERCENT_WIDTH, importance, lambda row: "" if (value := value_of(row)) is None else percent_text(value)
    )


def _paint_phase(line: Line, row: PaceRow, width: int, *, phase: str) -> None:
    is_more = phase in row.more_of
    mark = line.look.glyphs.more if is_more else " "
    style = line.look.palette.warning if is_more else line.look.palette.muted
    frac = percent_text(row.phases[phase])
    line.cell(f"{mark} {frac}" if len(frac) + 2 <= width else f"{mark}{frac}", width, style, is_right=True)
