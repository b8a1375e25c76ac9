"""The view of ranks, one row each, with all facts of the selected rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.filters.ranks import RANK_KEYS, RankOrder, RankSelection, RankWish
from app.tui.widgets.columns import Table, rank_columns
from app.tui.widgets.drawing import GRID_FROM, RankGrid, fact_lines
from app.tui.widgets.line_view import FilteredView
from app.view.ranks import rank_text

if TYPE_CHECKING:
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.rows import RankRow
    from app.view.view import View

MIN_ROWS = 4
"""Rows of the table that the details of the selected rank always leave."""
ORDERS = tuple(RankOrder)
GRID_HINT = "v: table"


class RanksView(FilteredView):
    """A table or a grid whose ranks keep their places while the user reads; the selection follows its rank."""

    has_selection = counts_free_lines = True
    filter_keys = RANK_KEYS
    filter_example = "state=waiting node=gpu* rank=0,3-5 wait>5s /regex/ !not"

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "ranks")
        self._rows: dict[int, RankRow] = {}
        self._table: Table[RankRow] | None = None
        self._grid: RankGrid | None = None
        self._wants_grid: bool | None = None
        """Shape that the user has chosen; None decides by the number of ranks."""
        self._selection = RankSelection()
        self._order = RankOrder.RANK
        self._wanted = RankWish()
        self._place = 0
        """Place of the selected rank among the shown ones."""
        self._rank = 0
        """Rank that was selected; while it is left out, another rank is selected in its place."""
        self._is_chosen = False

    @property
    def num_rows(self) -> int:
        return len(self._selection.ranks) if self._grid is None else self._grid.num_lines

    @property
    def selected_rank(self) -> int | None:
        ranks = self._selection.ranks
        return int(ranks[self._place]) if self._place < len(ranks) else None

    @property
    def copied(self) -> tuple[str, str] | None:
        rank = self.selected_rank
        row = None if rank is None else self._rows.get(rank)
        return super().copied if row is None else (f"rank {row.rank}", rank_text(row))

    def row(self, index: int) -> Line:
        if self._grid is not None:
            return self._grid.line(index, self._place)
        row = self._rows.get(int(self._selection.ranks[index]))
        if row is None or self._table is None:
            return self.line()
        line = self._table.row(row)
        return self.pointed(line) if index == self._place else line

    def build(self) -> None:
        view = self.ui.view
        self.head, self.foot, self._grid = [], [], None
        table = view.rank_table if view is not None else None
        if view is not None:
            self._selection.update(view, self._wanted)
        if view is None or table is None:
            self.head = self.nothing_yet(
                "RANKS", "Once a job runs, each rank has a row here: its state, step and line."
            )
            return
        ranks = self._selection.ranks
        if self._wants_grid or (self._wants_grid is None and view.num_ranks >= GRID_FROM):
            self._grid = RankGrid(self.look, self.size.width, ranks, table.states)
        self.follow_culprit(view)
        self._find_selected()
        self.head = self._headings(view)
        shown = [] if self._grid is not None else ranks[self.top : self.top + self.size.height].tolist()
        selected = self.selected_rank
        self._rows = {row.rank: row for row in view.ranks(sorted({*shown, *([] if selected is None else [selected])}))}
        if selected is None:
            self.foot = [self.line().put(" no rank is like that", self.look.palette.muted)]
        else:
            self.foot = self._details(self._rows[selected], view.usual_place(selected))

    def wish_changed(self) -> None:
        """Choose the ranks again."""
        self._wanted = RankWish(self.filter, self._order, self.is_problems_only)

    def sort_by(self, order: RankOrder | None = None) -> None:
        """Sort by `order`, or by the next order in turn."""
        self._order = order or ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.wish_changed()
        self.redraw()

    @property
    def is_grid(self) -> bool:
        """Whether ranks are shown as cells, not as rows."""
        return self._grid is not None

    def show_grid(self, *, is_wanted: bool) -> None:
        """Show the grid, or the table."""
        self._wants_grid = is_wanted
        self.redraw()
        self._show_selected()

    def move(self, rows: int) -> None:
        """Move the selection; from now on it stays with the rank."""
        self._walk(rows * self._per_row)

    def sideways(self, cells: int) -> None:
        if self._grid is not None:
            self._walk(cells)

    def scroll_rows(self, rows: int) -> None:
        """Move the window; from now on it stays in place."""
        self._is_chosen = True
        super().scroll_rows(rows)

    def pick(self, index: int, x: int) -> bool:
        """Select the clicked rank; return whether there was one."""
        place = index if self._grid is None else self._grid.place_at(index, x)
        if place is not None:
            self._walk(place - self._place)
        return place is not None

    def follow_culprit(self, view: View) -> int:
        """Select the first culprit until the user moves the selection: its details are the relevant ones.

        Returns:
            The rank selected then, whether or not this view is shown.
        """
        if not self._is_chosen:
            culprits = [rank for verdict in view.verdicts() for rank in verdict.culprits]
            self._rank = min(culprits, default=0)
        self._rank = max(0, min(self._rank, view.num_ranks - 1))
        return self._rank

    @property
    def _per_row(self) -> int:
        return 1 if self._grid is None else self._grid.per_line

    def _walk(self, places: int) -> None:
        """Select another rank, and move the window to it."""
        self._is_chosen = True
        ranks, top = self._selection.ranks, self.top
        if len(ranks):
            self._rank = int(ranks[max(0, min(len(ranks) - 1, self._place + places))])
        self._find_selected()
        self.top = top
        self._show_selected()

    def _show_selected(self) -> None:
        """Move the window to the selected rank."""
        self.top = max(self.selected - self.body_height + 1, min(self.top, self.selected))
        self.redraw()

    def _find_selected(self) -> None:
        """Find the place of the selected rank; while it is left out, the rank at its place is selected."""
        ranks, before = self._selection.ranks, self.selected
        found = np.flatnonzero(ranks == self._rank)
        self._place = int(found[0]) if len(found) else max(0, min(self._place, len(ranks) - 1))
        self.selected = self._place // self._per_row
        if self._is_chosen:
            self.top = max(0, self.top + self.selected - before)
        else:
            self.top = max(self.selected - self.size.height // 3, min(self.top, self.selected))

    def _headings(self, view: View) -> list[Line]:
        """Return the filter and order, and the heading of the table or the counts of states in the grid."""
        palette, width = self.look.palette, self.size.width
        num_shown = len(self._selection.ranks)
        of_all = "" if num_shown == view.num_ranks and not self.filter else f" of {view.num_ranks:,}"
        line = self.line().put(f" RANKS  {num_shown:,}{of_all}", palette.heading)
        self.put_wish(line)
        if self._selection.num_unsearched:
            line.put(f"  {self._selection.num_unsearched:,} not searched yet", palette.heading)
        if self._order is not RankOrder.RANK:
            line.put(f"  by {self._order}", palette.heading)
        if self._grid is not None:
            self._grid.put_counts(line, width - len(GRID_HINT) - 2)
            line.pad(width - len(GRID_HINT) - 1, palette.heading).put(GRID_HINT, palette.heading)
            return [line]
        self._table = Table(self.look, rank_columns(view), width)
        is_plain = self._order is RankOrder.RANK and not self.filter and not self.is_problems_only
        return [self._table.heading()] if is_plain else [line, self._table.heading()]

    def _details(self, row: RankRow, usual_place: str) -> list[Line]:
        room = self.size.height - len(self.head) - min(self.num_rows, MIN_ROWS)
        if room < 3:
            return []
        head = self.line().put(f" RANK {row.rank} ", self.look.palette.heading)
        free = self.size.height - len(self.head) - self.num_rows - 1
        return [self.heading(head), *fact_lines(self.look, row, self.size.width, usual_place, free)[: room - 1]]
