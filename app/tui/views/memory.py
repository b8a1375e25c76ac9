"""Memory of every rank beside the others', and of every node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.rows import Severity
from app.tui.columns import Column, Table
from app.tui.line_view import LineView
from app.tui.node_columns import paint_node_memory
from app.words import bytes_cell, bytes_text

if TYPE_CHECKING:
    from app.rows import MemoryRow, MemorySummary, NodeRow
    from app.tui.drawing import Line
    from app.tui.stage import Stage
    from app.view import View

MAX_NODE_ROWS = 4
ODD = (Severity.WARNING, Severity.CRITICAL)


class MemoryView(LineView):
    """A bar per rank, the median marked on each, so that what sticks out is seen before it is read."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, "memory")
        self._table: Table[MemoryRow] | None = None
        self._summary: MemorySummary | None = None
        self._num_ranks = 0
        self._rows: dict[int, MemoryRow] = {}

    @property
    def num_rows(self) -> int:
        """One row a rank."""
        return self._num_ranks

    def row(self, index: int) -> Line:
        """Return the line of a rank."""
        row = self._rows.get(index)
        return self._table.row(row) if row is not None and self._table is not None else self.line()

    def build(self) -> None:
        """Make the summary, fetch the ranks in the window, and put the nodes below."""
        view = self.stage.view
        self.head, self.foot, self._num_ranks = [], [], 0
        if view is None or not view.num_ranks:
            return
        self._num_ranks = view.num_ranks
        self._summary = view.memory_summary()
        self._table = Table(self.look, self._columns(view), self.size.width)
        self.head = [self._sentence(), self._table.heading()]
        self.foot = self._node_lines(view.nodes())
        wanted = range(self.top, min(self._num_ranks, self.top + self.size.height))
        self._rows = {row.rank: row for row in view.memory(wanted)}

    def _columns(self, view: View) -> list[Column[MemoryRow]]:
        nodes = max((len(node.node) for node in view.nodes()), default=4)
        return [
            Column("RANK", max(4, len(str(view.num_ranks))), 0, _paint_rank, is_right=True),
            Column("NODE", max(4, min(16, nodes)), 2, _paint_node),
            Column("RESIDENT", 8, 0, _paint_rss, is_right=True),
            Column("PEAK", 6, 3, _paint_peak, is_right=True),
            Column("VS MEDIAN", 9, 1, self._paint_difference, is_right=True),
            Column(f"{self.look.glyphs.mark} IS THE MEDIAN", 16, 0, self._paint_bar, is_flexible=True),
        ]

    def _sentence(self) -> Line:
        line = self.line().put(" ")
        summary = self._summary
        if summary is None:
            return line.put("no rank has reported its memory yet", self.look.palette.muted)
        style = self.look.severity_style(summary.severity)
        line.put(f"{self.look.glyphs.severities[summary.severity]} ", style)
        return line.cell(summary.text, self.size.width - line.width)

    def _node_lines(self, nodes: list[NodeRow]) -> list[Line]:
        room = max(0, min(MAX_NODE_ROWS, self.size.height - 8))
        if not room:
            return []
        columns: list[Column[NodeRow]] = [
            Column("NODE", max(4, min(16, max((len(node.node) for node in nodes), default=4))), 0, _paint_name),
            Column("RANKS", 9, 1, _paint_ranks),
            Column("MEMORY OF THE HOST", 30, 0, paint_node_memory, is_flexible=True),
            Column("AGENT", 6, 2, _paint_agent, is_right=True),
        ]
        table = Table(self.look, columns, self.size.width)
        heading = table.heading()
        heading.fit(self.size.width, self.look.palette.heading)
        lines = [self.line(), heading, *(table.row(node) for node in nodes[:room])]
        if len(nodes) > room:
            lines.append(self.line().put(f" and {len(nodes) - room} more nodes", self.look.palette.muted))
        return lines

    def _paint_bar(self, line: Line, row: MemoryRow, width: int) -> None:
        summary = self._summary
        if summary is None or row.rss_bytes is None or not summary.max_bytes:
            line.cell("", width)
            return
        # The longest bar ends short of the edge, so that growth is seen to have room.
        full = summary.max_bytes * 1.1
        style = self.look.severity_style(row.severity) if row.severity in ODD else self.look.palette.busy
        line.bar(row.rss_bytes / full, width, style, mark_frac=summary.median_bytes / full)

    def _paint_difference(self, line: Line, row: MemoryRow, width: int) -> None:
        text = "" if row.from_median_frac is None else f"{100 * row.from_median_frac:+.0f} %"
        style = self.look.severity_style(row.severity) if row.severity in ODD else self.look.palette.muted
        line.cell(text, width, style, is_right=True)


def _paint_rank(line: Line, row: MemoryRow, width: int) -> None:
    line.cell(str(row.rank), width, line.look.palette.strong, is_right=True)


def _paint_node(line: Line, row: MemoryRow, width: int) -> None:
    line.cell(row.node, width, line.look.palette.muted)


def _paint_rss(line: Line, row: MemoryRow, width: int) -> None:
    line.cell("" if row.rss_bytes is None else bytes_text(row.rss_bytes), width, is_right=True)


def _paint_peak(line: Line, row: MemoryRow, width: int) -> None:
    text = "" if row.peak_rss_bytes is None else bytes_cell(row.peak_rss_bytes)
    line.cell(text, width, line.look.palette.muted, is_right=True)


def _paint_name(line: Line, row: NodeRow, width: int) -> None:
    line.cell(row.node, width, line.look.palette.strong)


def _paint_ranks(line: Line, row: NodeRow, width: int) -> None:
    line.cell(row.ranks, width, line.look.palette.muted)


def _paint_agent(line: Line, row: NodeRow, width: int) -> None:
    text = "" if row.agent_rss_bytes is None else bytes_cell(row.agent_rss_bytes)
    line.cell(text, width, line.look.palette.muted, is_right=True)
