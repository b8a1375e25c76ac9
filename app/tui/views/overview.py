"""One page with everything: nodes, ranks, waits, the loss and the last log lines."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from app.diagnosis.causes import Severity
from app.diagnosis.rank_facts import UP
from app.tui.widgets.chart_panel import loss_panel, no_loss_text
from app.tui.widgets.columns import Table, node_columns, node_line, node_width, rank_columns
from app.tui.widgets.drawing import in_step_order, log_line, prefix_width, step_style, wait_line
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.nodes import Progress
    from app.view.view import View

MAX_NODES = 4
MAX_NODE_TABLE_WIDTH = 132
"""Cells of the table; a bar over the whole width of a wide screen is no easier to read."""
MAX_WAITS = 3
SPLIT_WIDTH = 110
"""Cells from which the loss and the log are side by side."""
MIN_LOG_LINES = 3
MIN_CHART_LINES = 5


class OverviewView(LineView):
    """Sections from top to bottom; each takes what it needs of the remaining lines."""

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "overview")

    def build(self) -> None:
        """Make all lines; they always fit the window."""
        view = self.ui.view
        if view is None or not view.num_ranks:
            self.lines, num_hidden = self._start(view)
            self.num_free_lines = self.size.height - len(self.lines) - num_hidden
            return
        height = self.size.height
        nodes = self._node_lines(view, MAX_NODES if height > 22 else 2)
        if view.why_unknown:
            unknown = self.nothing_yet("WAITS, LOSS, LOG", "")
            self.lines = [*nodes, *self._ranks(view, height - len(nodes) - len(unknown)), *unknown][:height]
            self.num_free_lines = height - len(self.lines)
            return
        waits = self._waits(view, MAX_WAITS if height > 22 else 1)
        least = 1 + (MIN_CHART_LINES if self.size.width >= SPLIT_WIDTH else MIN_LOG_LINES)
        rest = height - len(nodes) - len(waits)
        has_all = view.num_ranks < rest - least
        rank_room = rest - least if has_all else max(3, rest - 1 - MIN_CHART_LINES)
        top = [*nodes, *self._ranks(view, rank_room), *waits]
        room = height - len(top)
        # A long verdict may take the lines of the chart and the log but the least.
        self.num_free_lines = room - least
        self.lines = (top + self._bottom(room))[:height]

    def _start(self, view: View | None) -> tuple[list[Line], int]:
        """Return the page before the first rank is known, and how many sentences it leaves out."""
        palette, glyphs = self.look.palette, self.look.glyphs
        lines = self._node_lines(view, MAX_NODES) if view is not None and view.num_nodes else []
        if (progress := self.ui.opening) is not None:
            lines = self._opening(progress)
        # While no job is shown, the lines of every job are another job's.
        has_log = bool(len(self.ui.logs)) and not self.ui.logs.has_other_jobs("")
        notices = list(self.ui.notices)
        room = max(2, self.size.height - len(lines) - 1 - has_log * (1 + MIN_LOG_LINES))
        shown = notices[-(room - (len(notices) > room)) :]
        num_earlier = len(notices) - len(shown)
        if notices:
            lines.append(self.heading(self._title("SESSION")))
        if num_earlier:
            lines.append(self.line().put(f" and {num_earlier:,} earlier", palette.muted))
        lines += [self.line().put(f" {glyphs.dot} ", palette.accent).put(notice) for notice in shown]
        log = self._log(self.size.width, self.size.height - len(lines)) if has_log else []
        return lines + log, num_earlier

    def _opening(self, progress: Progress) -> list[Line]:
        """Return a line a node that is being reached, with what it does."""
        palette = self.look.palette
        nodes, room = in_step_order(progress), max(2, self.size.height - 2)
        shown = nodes[: room - (len(nodes) > room)]
        width = node_width(["NODE", *shown])
        lines = [self.heading(self.line().put(f" {'NODE':<{width}}  STATE", palette.heading))]
        for node in shown:
            step = progress.stage(node)
            line = self.line().pad(1).cell(node, width, palette.strong).pad(1 + width + 2)
            lines.append(line.put(step, step_style(palette, step)))
        if len(nodes) > len(shown):
            lines.append(self.line().put(f" and {len(nodes) - len(shown):,} more", palette.muted))
        return lines

    def _title(self, text: str, note: str = "") -> Line:
        return self.line().put(f" {text}", self.look.palette.heading).put(note, self.look.palette.heading)

    def _node_lines(self, view: View, room: int) -> list[Line]:
        has_more = view.num_nodes > room
        # Nodes with problems or culprits come first, so that nodes without problems are left out.
        shown = view.first_nodes(room - has_more, odd_first=has_more)
        table_width = min(self.size.width, MAX_NODE_TABLE_WIDTH)
        table = Table(self.look, node_columns(node_width(view.node_names)), table_width)
        lines = [self.heading(table.heading()), *(node_line(table, node) for node in shown)]
        if has_more:
            num_down = int((view.node_codes != UP).sum())
            up = ", all up" if num_down == sum(node.state != "up" for node in shown) else ""
            num_others = view.num_nodes - len(shown)
            lines.append(self.line().put(f" and {num_others:,} more nodes{up}", self.look.palette.muted))
        if new_nodes := view.new_nodes:
            glyph = self.look.glyphs.severities[Severity.WARNING]
            lines.append(self.line().put(f" {glyph} ", self.look.palette.warning).put(new_nodes))
        return lines

    def _ranks(self, view: View, room: int) -> list[Line]:
        num_ranks = view.num_ranks
        table = Table(self.look, rank_columns(view), self.size.width)
        if num_ranks < room:
            return [self.heading(table.heading()), *(table.row(row) for row in view.ranks(range(num_ranks)))]
        # The culprits are always shown, the other ranks fill the rest in order.
        culprits = sorted({rank for verdict in view.verdicts() for rank in verdict.culprits})[: room - 2]
        others = (rank for rank in range(num_ranks) if rank not in set(culprits))
        wanted = sorted([*culprits, *(rank for rank, _ in zip(others, range(room - 2 - len(culprits)), strict=False))])
        rest = f"   and {num_ranks - len(wanted):,} more ranks{self._press('ranks')}"
        more = self.line().put(rest, self.look.palette.muted)
        return [self.heading(table.heading()), *(table.row(row) for row in view.ranks(wanted)), more]

    def _waits(self, view: View, room: int) -> list[Line]:
        barriers = view.barriers()
        if not barriers:
            calm = self.line().put(f" {self.look.glyphs.severities[Severity.OK]} ", self.look.palette.ok)
            return [self.heading(self._title("WAITS")), calm.put("no long wait", self.look.palette.muted)]
        more = f"  +{len(barriers) - room} more{self._press('barriers')}" if len(barriers) > room else ""
        lines = [wait_line(self.ui, row, self.size.width) for row in barriers[:room]]
        return [self.heading(self._title("WAITS", more)), *lines]

    def _press(self, view: str) -> str:
        key = self.ui.keymap.first(view)
        return f": press {key}" if key else ""

    def _bottom(self, room: int) -> list[Line]:
        width = self.size.width
        if width >= SPLIT_WIDTH and room > MIN_CHART_LINES:
            chart_width = width * 2 // 5
            chart = self._loss(chart_width, room)
            log = self._log(width - chart_width - 1, room)
            return [
                self._side_by_side(left, right, chart_width, is_title=index == 0)
                for index, (left, right) in enumerate(zip_longest(chart, log))
            ]
        chart_room = min(9, room - MIN_LOG_LINES - 1)
        chart = self._loss(width, chart_room) if chart_room >= MIN_CHART_LINES else []
        return chart + self._log(width, room - len(chart))

    def _loss(self, width: int, height: int) -> list[Line]:
        source, shown = self.ui.source, self.ui.history.shown
        points = shown.loss_curve if shown is not None else ()
        at = "at" if shown is None or shown.is_loss_dated else "at about"
        return loss_panel(self.look, points, (width, height), no_loss_text(self.ui), at=at, reading=source.reading)

    def _side_by_side(self, left: Line | None, right: Line | None, at: int, *, is_title: bool) -> Line:
        palette = self.look.palette
        fill = palette.heading if is_title else palette.ink
        line = left or self.line()
        line.fit(at, fill)
        line.put(" ", fill)
        return line.add(right) if right is not None else line

    def _log(self, width: int, room: int) -> list[Line]:
        if room < 2:
            return []
        latest = self.ui.latest_lines(room - 1)
        title = self._title("LOG")
        title.fit(width, self.look.palette.heading)
        lines = [title]
        for stored in latest:
            line = log_line(self.look, stored, prefix_width(latest))
            line.fit(width)
            lines.append(line)
        if not latest:
            lines.append(self.line().put(f" {self.ui.no_lines_text}", self.look.palette.faint))
        return lines
