"""Every rank in a row, and all that is known of the selected one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.filters.ranks import RANK_KEYS, RankOrder, RankSelection, RankWish
from app.tui.columns import Table
from app.tui.filtered_view import FilteredView
from app.tui.rank_columns import node_width, rank_columns
from app.tui.rank_details import fact_lines
from app.wording.rank_words import rank_text

if TYPE_CHECKING:
    from app.rows import RankRow
    from app.tui.drawing import Line
    from app.tui.stage import Stage
    from app.view import View

MIN_ROWS = 4
"""The details of the selected rank leave at least this many rows to the table."""
ORDERS = tuple(RankOrder)


class RanksView(FilteredView):
    """A table whose rows keep their places while one reads; the selection goes with its rank, not with its row."""

    has_selection = True
    filter_keys = RANK_KEYS
    filter_example = "state=waiting node=gpu* rank=0,3-5 wait>5s /regex/ !not"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "ranks")
        self._rows: dict[int, RankRow] = {}
        self._table: Table[RankRow] | None = None
        self._selection = RankSelection()
        self._order = RankOrder.RANK
        self._wanted = RankWish()
        self._rank = 0
        """The one that was selected; while it is left out, another row is."""
        self._is_chosen = False

    @property
    def num_rows(self) -> int:
        """One row for each rank that is shown."""
        return len(self._selection.ranks)

    @property
    def selected_rank(self) -> int | None:
        """The rank whose row is selected."""
        return int(self._selection.ranks[self.selected]) if self.selected < self.num_rows else None

    @property
    def copied(self) -> tuple[str, str] | None:
        """The selected rank in one line."""
        rank = self.selected_rank
        row = None if rank is None else self._rows.get(rank)
        return super().copied if row is None else (f"rank {row.rank}", rank_text(row))

    def row(self, index: int) -> Line:
        """Return the line of the rank at a place."""
        row = self._rows.get(int(self._selection.ranks[index]))
        if row is None or self._table is None:
            return self.line()
        line = self._table.row(row)
        return self.pointed(line) if index == self.selected else line

    def build(self) -> None:
        """Fetch the rows that are in the window, and the selected one."""
        view = self.stage.view
        self.head, self.foot = [], []
        self._selection.update(view, self._wanted) if view is not None else None
        if view is None or not view.num_ranks:
            return
        self.follow_culprit(view)
        self._find_selected()
        names = [node.node for node in view.nodes()]
        columns = rank_columns(node_width(names), num_ranks=view.num_ranks)
        self._table = Table(self.look, columns, self.size.width)
        self.head = [*self._title(view), self._table.heading()]
        ranks = self._selection.ranks
        window = ranks[self.top : self.top + self.size.height].tolist()
        selected = self.selected_rank
        self._rows = {row.rank: row for row in view.ranks(sorted({*window, *([] if selected is None else [selected])}))}
        if selected is None:
            self.foot = [self.line().put(" no rank is like that", self.look.palette.muted)]
        else:
            self.foot = self._details(self._rows[selected])

    def wish_changed(self) -> None:
        """Look for the ranks anew."""
        self._wanted = RankWish(self.filter, self._order, self.is_problems_only)

    def sort_by(self, order: RankOrder | None = None) -> None:
        """Sort by something, or by the next in turn."""
        self._order = order or ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self.wish_changed()
        self.redraw()

    def move(self, rows: int) -> None:
        """Move the selection; from now on it stays with the rank."""
        self._is_chosen = True
        if self.num_rows:
            self._rank = int(self._selection.ranks[max(0, min(self.num_rows - 1, self.selected + rows))])
        super().move(rows)

    def scroll_rows(self, rows: int) -> None:
        """Move the window; from now on it stays where it is put."""
        self._is_chosen = True
        super().scroll_rows(rows)

    def follow_culprit(self, view: View) -> int:
        """Select the first culprit for as long as nobody has moved the selection: its details are the ones wanted.

        Returns:
            The rank that is selected then, whether or not this view is shown.
        """
        if not self._is_chosen:
            culprits = [rank for verdict in view.verdicts() for rank in verdict.culprits]
            self._rank = min(culprits, default=0)
        self._rank = max(0, min(self._rank, view.num_ranks - 1))
        return self._rank

    def _find_selected(self) -> None:
        """Find the row of the selected rank; while it is left out, the row that has taken its place is selected."""
        ranks = self._selection.ranks
        place = np.flatnonzero(ranks == self._rank)
        if len(place):
            moved, self.selected = int(place[0]) - self.selected, int(place[0])
            if moved and self._is_chosen:
                self.top = max(0, self.top + moved)
        else:
            self.selected = max(0, min(self.selected, len(ranks) - 1))
        if not self._is_chosen:
            self.top = max(self.selected - self.size.height // 3, min(self.top, self.selected))

    def _title(self, view: View) -> list[Line]:
        """Return what is left out and how the rest is sorted; nothing where all stand in their order."""
        palette = self.look.palette
        if not self.filter and not self.is_problems_only and self._order is RankOrder.RANK:
            return []
        line = self.line().put(f" RANKS  {self.num_rows:,} of {view.num_ranks:,}", palette.heading)
        self.put_wish(line)
        if self._selection.num_unsearched:
            line.put(f"  {self._selection.num_unsearched:,} not searched yet", palette.heading)
        if self._order is not RankOrder.RANK:
            line.put(f"  by {self._order}", palette.heading)
        line.fit(self.size.width, palette.heading)
        return [line]

    def _details(self, row: RankRow) -> list[Line]:
        room = self.size.height - len(self.head) - min(self.num_rows, MIN_ROWS)
        if room < 3:
            return []
        head = self.line().put(f" RANK {row.rank} ", self.look.palette.heading)
        head.fit(self.size.width, self.look.palette.heading)
        return [head, *fact_lines(self.look, row, self.size.width)[: room - 1]]
