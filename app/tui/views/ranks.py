"""Every rank in a row, and all that is known of the selected one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.columns import Table
from app.tui.line_view import LineView
from app.tui.rank_columns import node_width, rank_columns
from app.wording.rank_words import rank_call
from app.words import UNKNOWN, bytes_text, loss_text, percent_text, seconds_text

if TYPE_CHECKING:
    from app.rows import RankRow
    from app.tui.drawing import Line
    from app.tui.stage import Stage
    from app.view import View

MIN_ROWS = 4
"""The details of the selected rank leave at least this many rows to the table."""
FACT_WIDTH = 11


class RanksView(LineView):
    """A table in rank order, whatever happens: a row never moves under the eye that reads it."""

    has_selection = True

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "ranks")
        self._num_ranks = 0
        self._rows: dict[int, RankRow] = {}
        self._table: Table[RankRow] | None = None
        self._is_chosen = False

    @property
    def num_rows(self) -> int:
        """One row a rank."""
        return self._num_ranks

    def row(self, index: int) -> Line:
        """Return the line of a rank."""
        row = self._rows.get(index)
        if row is None or self._table is None:
            return self.line()
        is_selected = index == self.selected
        line = self._table.row(row)
        if not is_selected:
            return line
        pointed = self.line().put(self.look.glyphs.pointer, self.look.palette.accent)
        pointed.segments += line.segments[1:]
        pointed.width = line.width
        pointed.pad(self.size.width)
        return pointed.laid_over(self.look.palette.selected)

    def build(self) -> None:
        """Fetch the rows that are in the window, and the selected one."""
        view = self.stage.view
        self.head, self.foot = [], []
        self._num_ranks = view.num_ranks if view is not None else 0
        if view is None or not self._num_ranks:
            return
        self.follow_culprit(view)
        names = [node.node for node in view.nodes()]
        columns = rank_columns(node_width(names), num_ranks=self._num_ranks)
        self._table = Table(self.look, columns, self.size.width)
        self.head = [self._table.heading()]
        window = range(self.top, min(self._num_ranks, self.top + self.size.height))
        wanted = sorted({*window, self.selected})
        self._rows = {row.rank: row for row in view.ranks(wanted)}
        if self.selected in self._rows:
            self.foot = self._details(self._rows[self.selected])

    def move(self, rows: int) -> None:
        """Move the selection; from now on it stays where it is put."""
        self._is_chosen = True
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
        culprits = [rank for verdict in view.verdicts() for rank in verdict.culprits]
        if not self._is_chosen:
            self.selected = min(culprits, default=0)
            self.top = max(self.selected - self.size.height // 3, min(self.top, self.selected))
        self.selected = max(0, min(self.selected, view.num_ranks - 1))
        return self.selected

    def _details(self, row: RankRow) -> list[Line]:
        room = self.size.height - 1 - min(self._num_ranks, MIN_ROWS)
        palette = self.look.palette
        head = self.line().put(f" RANK {row.rank} ", palette.heading)
        head.fit(self.size.width, palette.heading)
        facts = [line for name, value in _facts(row) if (line := self._fact(name, value)) is not None]
        if room < 3:
            return []
        num_columns = 2 if self.size.width >= 110 else 1
        if num_columns == 1:
            return [head, *facts[: room - 1]]
        half = -(-len(facts) // 2)
        merged = []
        for index in range(half):
            line = self.line().add(facts[index])
            if half + index < len(facts):
                line.fit(self.size.width // 2)
                line.add(facts[half + index])
            merged.append(line)
        return [head, *merged[: room - 1]]

    def _fact(self, name: str, value: str) -> Line | None:
        if not value:
            return None
        return self.line().put(" ").cell(name, FACT_WIDTH, self.look.palette.muted).put(value)


def _facts(row: RankRow) -> list[tuple[str, str]]:
    """Return what is known of a rank, the most telling first."""
    phase_s = f", for {seconds_text(row.phase_s)}" if row.phase_s is not None else ""
    waiting = f"  waiting {seconds_text(row.waiting_s)}" if row.waiting_s is not None else ""
    process = f"pid {row.pid}" if row.pid is not None else "no process yet"
    local = f", local rank {row.local_rank}" if row.local_rank is not None else ""
    step = str(row.step) if row.step is not None else UNKNOWN
    epoch = f"  epoch {row.epoch}" if row.epoch is not None else ""
    loss = f"  loss {loss_text(row.loss)}" if row.loss is not None else ""
    return [
        ("state", _state_text(row)),
        ("where", row.where),
        ("phase", f"{row.phase}{phase_s}" if row.phase else ""),
        ("collective", f"{rank_call(row)}{waiting}"),
        ("wait share", percent_text(row.wait_frac) if row.wait_frac is not None else ""),
        ("step", f"{step}{epoch}{loss}"),
        ("process", f"{process} on {row.node}{local}"),
        ("memory", bytes_text(row.rss_bytes) if row.rss_bytes is not None else ""),
        ("report", f"{seconds_text(row.age_s)} old" if row.age_s is not None else "none yet"),
    ]


def _state_text(row: RankRow) -> str:
    """Return the state and its detail, which often begins with the word itself."""
    if not row.detail or row.detail.startswith(row.state):
        return row.detail or row.state
    return f"{row.state}: {row.detail}"
