"""The view of waits: current waits, the last ones, and how waiting is distributed when no rank is stuck."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from app.diagnosis.causes import RankState, Severity
from app.recording.wait_history import MIN_WAIT_S
from app.text import attempt_text, seconds_cell
from app.tui.widgets.columns import Column, Table, paint_wait_frac, place_columns, state_column
from app.tui.widgets.drawing import wait_block, wait_line
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.recording.wait_history import PastWait
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.rows import RankRow
    from app.view.view import View

MIN_STRIP_WIDTH = 10
MAX_STRIP_WIDTH = 40
MAX_LAST = 5
MAX_LAST_SHORT = 2
TALL_FROM = 28
AGE_WIDTH = 6
MAX_SHARED_RANKS = 4096
"""Limit of bars; nobody scrolls through more, and the Ranks view has all ranks."""


class BarriersView(LineView):
    """Current waits in blocks, the last ones in a line each, then a row per rank.

    A row has a cell for each of the last waits, the latest at the right. It shows how long the rank waited beside the
    others, or that they waited for it. A rank that often holds them up stands out. A bar is its share of time waiting.
    """

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "barriers")
        self._table: Table[RankRow] | None = None
        self._num_ranks = 0
        self._rows: dict[int, RankRow] = {}
        self._past: Sequence[PastWait] = ()
        self._own_past: Sequence[PastWait] = ()
        """Those of the attempt that is shown."""
        self._attempt = 0

    @property
    def num_rows(self) -> int:
        return len(self.lines) + self._num_ranks

    def row(self, index: int) -> Line:
        if index < len(self.lines):
            return self.lines[index]
        row = self._rows.get(index - len(self.lines))
        return self._table.row(row) if row is not None and self._table is not None else self.line()

    @property
    def selected_rank(self) -> int | None:
        """Rank that the longest wait is about: a missing one, else one in another call, else a waiting one."""
        barriers = self.ui.view.barriers() if self.ui.view is not None else []
        if not barriers:
            return super().selected_rank
        others = [rank for other in barriers[0].other_calls for rank in other.ranks]
        return (barriers[0].missing or others or barriers[0].waiting)[0]

    def build(self) -> None:
        view = self.known
        self.lines, self.head, self._num_ranks = [], [], 0
        if view is None:
            self.head = self.nothing_yet("WAITS NOW", "Once a job runs: who waits for whom, where, and for how long.")
            return
        shown = self.ui.history.shown
        self._past = tuple(shown.waits.over) if shown is not None else ()
        job = view.job()
        self._attempt = 0 if job is None else job.attempt
        self._own_past = [past for past in self._past if past.key.attempt == self._attempt]
        self.head = [self._title("WAITS NOW")]
        self._put_waits(view)
        self._put_last(view)
        self._put_shares(view)

    def _put_waits(self, view: View) -> None:
        palette = self.look.palette
        barriers = view.barriers()
        if not barriers:
            calm = self.line().put(f" {self.look.glyphs.severities[Severity.OK]} ", palette.ok)
            self.lines += [calm.put("no long wait in a collective or barrier"), self.line()]
        for barrier in barriers:
            self.lines += [*wait_block(self.ui, barrier, self.size.width), self.line()]

    def _put_last(self, view: View) -> None:
        if not self._past:
            return
        width, palette = self.size.width, self.look.palette
        title = self._title(f"LAST WAITS, of {MIN_WAIT_S:g} s and longer")
        title.fit(width, palette.heading)
        self.lines.append(title)
        for past in islice(reversed(self._past), MAX_LAST if self.size.height >= TALL_FROM else MAX_LAST_SHORT):
            line = self.line().cell(seconds_cell(max(0.0, view.now_s - past.seen_s)), AGE_WIDTH, is_right=True)
            is_own = past.key.attempt == self._attempt
            line.put(" ago" if is_own else f" ago, before {attempt_text(self._attempt)}", palette.muted)
            self.lines.append(line.add(wait_line(self.ui, past.shown_row, width - line.width)))
        self.lines.append(self.line())

    def _paint_last(self, line: Line, row: RankRow, width: int) -> None:
        look = self.look
        for past in self._own_past[-width:]:
            waited_s = past.waited_by(row.rank)
            if past.is_missing(row.rank):
                is_verdict = past.row.severity is Severity.CRITICAL
                style = look.palette.critical if is_verdict else look.palette.warning
                line.put(look.glyphs.states[RankState.MISSING], style)
            elif waited_s:
                frac = waited_s / max(past.row.waited_s, waited_s)
                line.put(look.glyphs.levels[round(frac * (len(look.glyphs.levels) - 1))], look.palette.busy)
            else:
                line.put(look.glyphs.dot, look.palette.faint)

    def _put_shares(self, view: View) -> None:
        width = self.size.width
        self._num_ranks = min(view.num_ranks, MAX_SHARED_RANKS)
        strip_width = min(MAX_STRIP_WIDTH, max(MIN_STRIP_WIDTH, width - 90)) if self._own_past else 0
        frac_width = max(40, min(width - 66, 100) - strip_width)
        columns: list[Column[RankRow]] = [
            *place_columns(view),
            state_column(view),
            *([Column("LAST WAITS", strip_width, 2, self._paint_last, is_lasting=True)] if self._own_past else []),
            Column("SHARE OF THE LAST SECONDS SPENT WAITING", frac_width, 0, paint_wait_frac),
        ]
        self._table = Table(self.look, columns, width)
        heading = self._table.heading()
        note = "the straggler waits least"
        if heading.width + len(note) + 3 < width:
            heading.pad(width - len(note) - 1, self.look.palette.heading).put(note, self.look.palette.heading)
        heading.fit(width, self.look.palette.heading)
        self.lines.append(heading)
        first = max(0, self.top - len(self.lines))
        wanted = range(first, min(self._num_ranks, first + self.size.height))
        self._rows = {row.rank: row for row in view.ranks(wanted)}

    def _title(self, text: str) -> Line:
        return self.line().put(f" {text}", self.look.palette.heading)
