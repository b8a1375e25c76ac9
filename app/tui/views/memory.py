"""The view of memory: of every rank compared with the others, of every node, and of every GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.diagnosis.causes import Severity
from app.text import bytes_cell, seconds_cell, signed_percent_text
from app.tui.widgets.columns import (
    Column,
    Table,
    cells,
    figure,
    gpu_columns,
    node_line,
    node_name_column,
    node_width,
    paint_node_memory,
    place_columns,
    report_column,
    size_text,
)
from app.tui.widgets.drawing import wrapped
from app.tui.widgets.line_view import LineView

if TYPE_CHECKING:
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.memory import MemoryRow, MemorySummary
    from app.view.rows import Finding, GpuRow, NodeRow
    from app.view.view import View

MAX_NODE_ROWS = 4
MAX_GPU_ROWS = 8
MIN_RANK_ROWS = 4
"""Rows kept for ranks, whatever is below."""
MAX_FINDINGS = 2
MAX_FINDING_LINES = 3
FULL_FRAC = 0.95
"""Share of a GPU's memory, or of /dev/shm, above which it is nearly full."""
ODD = (Severity.WARNING, Severity.CRITICAL)


class MemoryView(LineView):
    """A bar per rank, so that a rank with more memory stands out.

    On CPUs it is the process's memory, with the median marked. On GPUs it is what the rank holds of its GPU, with what
    torch has reserved marked: the rest is contexts, NCCL and other libraries.
    """

    counts_free_lines = True

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "memory")
        self._table: Table[MemoryRow] | None = None
        self._summary: MemorySummary | None = None
        self._num_ranks = 0
        self._rows: dict[int, MemoryRow] = {}

    @property
    def num_rows(self) -> int:
        return self._num_ranks

    def row(self, index: int) -> Line:
        row = self._rows.get(index)
        return self._table.row(row) if row is not None and self._table is not None else self.line()

    def build(self) -> None:
        view = self.known
        self.head, self.foot, self._num_ranks = [], [], 0
        if view is None:
            self.head = self.nothing_yet("MEMORY", "Once a job runs: what each rank holds, on which GPU.")
            return
        self._num_ranks = view.num_ranks
        self._summary = view.memory_summary()
        wanted = range(self.top, min(self._num_ranks, self.top + self.size.height))
        self._rows = {row.rank: row for row in view.memory(wanted)}
        has_gpus = any(row.gpu is not None or row.torch_reserved_bytes is not None for row in self._rows.values())
        self._table = Table(self.look, self._gpu_columns(view) if has_gpus else self._columns(view), self.size.width)
        gpus = view.oddest_gpus(MAX_GPU_ROWS)
        findings = [*view.gpu_findings(gpus), *view.memory_findings(list(self._rows.values()))]
        self.head = [self._sentence(), *self._finding_lines(findings), self._table.heading()]
        room = self.size.height - len(self.head) - min(MIN_RANK_ROWS, self._num_ranks)
        self.foot = self._node_lines(view, room)
        self.foot = self._gpu_lines(gpus, view.num_gpus, room - len(self.foot)) + self.foot

    def _first_columns(self, view: View) -> list[Column[MemoryRow]]:
        return [
            *place_columns(view),
            figure("RESIDENT", 8, 0, lambda row: size_text(row.rss_bytes)),
            figure("PSS", 5, 4, lambda row: size_text(row.pss_bytes), "muted"),
        ]

    def _gpu_columns(self, view: View) -> list[Column[MemoryRow]]:
        return [
            *self._first_columns(view),
            figure("GPU", 3, 0, lambda row: "" if row.gpu is None else str(row.gpu), "strong"),
            figure("HELD", 5, 0, lambda row: size_text(row.gpu_used_bytes)),
            figure("TORCH", 5, 1, lambda row: size_text(row.torch_reserved_bytes), "muted"),
            figure("TENSORS", 7, 3, lambda row: size_text(row.torch_allocated_bytes), "muted"),
            figure("PEAK", 5, 4, lambda row: size_text(row.torch_peak_bytes), "muted"),
            *self._growth_columns(),
            Column(f"{self.look.glyphs.mark} IS TORCH'S", 16, 0, self._paint_gpu_bar, is_flexible=True),
        ]

    def _columns(self, view: View) -> list[Column[MemoryRow]]:
        return [
            *self._first_columns(view),
            figure("PEAK", 6, 3, lambda row: size_text(row.peak_rss_bytes), "muted"),
            Column("VS MEDIAN", 9, 1, self._paint_difference, is_right=True),
            *self._growth_columns(),
            Column(f"{self.look.glyphs.mark} IS THE MEDIAN", 16, 0, self._paint_bar, is_flexible=True),
        ]

    def _growth_columns(self) -> list[Column[MemoryRow]]:
        """Return the columns of growth, when any rank's memory grows."""
        if all(_growth_of(row)[0] is None for row in self._rows.values()):
            return []
        return [
            Column("GROWS", 9, 0, _paint_growth, is_right=True),
            Column("FULL IN", 7, 0, _paint_remaining, is_right=True),
        ]

    def _sentence(self) -> Line:
        line = self.line().put(" ")
        summary = self._summary
        if summary is None:
            return line.put("no rank has reported its memory yet", self.look.palette.muted).pad(self.size.width)
        style = self.look.severity_style(summary.severity)
        line.put(f"{self.look.glyphs.severities[summary.severity]} ", style)
        return line.cell(summary.text, self.size.width - line.width)

    def _finding_lines(self, findings: list[Finding]) -> list[Line]:
        look, lines = self.look, []
        for finding in findings[:MAX_FINDINGS]:
            style = look.severity_style(finding.severity)
            text = f"{finding.text}; {finding.hint}" if finding.hint else finding.text
            parts = wrapped(text, max(8, self.size.width - 4), MAX_FINDING_LINES, look.glyphs.ellipsis)
            for number, part in enumerate(parts):
                glyph = " " if number else look.glyphs.severities[finding.severity]
                lines.append(self.line().put(f" {glyph} ", style).cell(part, self.size.width - 3, style))
        return lines

    def _gpu_lines(self, gpus: list[GpuRow], num_gpus: int, room: int) -> list[Line]:
        """Return the GPUs: all in their order, or the most severe when not all fit."""
        if not gpus or room < 3:
            return []
        num_shown = len(gpus) if num_gpus == len(gpus) <= room - 2 else min(len(gpus), room - 3)
        shown = sorted(gpus[:num_shown], key=lambda row: (row.node, row.gpu))
        table = Table(self.look, gpu_columns(max(len(row.node) for row in gpus)), self.size.width)
        lines = [self.line(), self.heading(table.heading()), *(table.row(row) for row in shown)]
        if num_gpus > num_shown:
            lines.append(self.line().put(f" and {num_gpus - num_shown} more GPUs", self.look.palette.muted))
        return lines

    def _node_lines(self, view: View, room: int) -> list[Line]:
        room = max(0, min(MAX_NODE_ROWS, room - 2))
        if not room:
            return []
        nodes = view.first_nodes(room)
        has_swap = any(node.swap_total_bytes for node in nodes)
        columns: list[Column[NodeRow]] = [
            node_name_column(node_width(view.node_names)),
            Column("RANKS", 9, 1, cells(lambda row: row.ranks, "muted"), is_lasting=True),
            Column("MEMORY OF THE HOST", 30, 0, paint_node_memory, is_flexible=True),
            Column("/DEV/SHM", 11, 0, partial(_paint_used, what="shm"), is_right=True),
            *([Column("SWAP", 11, 2, partial(_paint_used, what="swap"), is_right=True)] if has_swap else []),
            figure("DISK FREE", 9, 4, lambda row: size_text(row.disk_free_bytes), "muted"),
            figure("NET IN", 7, 5, lambda row: size_text(row.nic_rx_bytes_hz, "/s"), "muted"),
            figure("NET OUT", 7, 5, lambda row: size_text(row.nic_tx_bytes_hz, "/s"), "muted"),
            figure("AGENT", 6, 3, lambda row: size_text(row.agent_rss_bytes), "muted"),
            report_column(),
        ]
        table = Table(self.look, columns, self.size.width)
        lines = [self.line(), self.heading(table.heading()), *(node_line(table, node) for node in nodes)]
        if view.num_nodes > room:
            lines.append(self.line().put(f" and {view.num_nodes - room} more nodes", self.look.palette.muted))
        return lines

    def _paint_bar(self, line: Line, row: MemoryRow, width: int) -> None:
        summary = self._summary
        held_bytes = row.peak_rss_bytes if row.has_ended else row.rss_bytes
        if summary is None or held_bytes is None or not summary.max_bytes:
            line.cell("" if summary is None else "not known", width, self.look.palette.muted)
            return
        # The longest bar ends before the edge, so that growth stays visible.
        full = summary.max_bytes * 1.1
        style = self.look.severity_style(row.severity) if row.severity in ODD else self.look.palette.busy
        line.bar(held_bytes / full, width, style, mark_frac=summary.median_bytes / full)

    def _paint_gpu_bar(self, line: Line, row: MemoryRow, width: int) -> None:
        held = row.gpu_used_bytes if row.gpu_used_bytes is not None else row.torch_reserved_bytes
        if held is None or not row.gpu_total_bytes:
            line.cell("", width)
            return
        torch = row.torch_reserved_bytes
        frac = held / row.gpu_total_bytes
        style = self.look.palette.warning if frac > FULL_FRAC else self.look.palette.busy
        line.bar(frac, width, style, mark_frac=None if torch is None else torch / row.gpu_total_bytes)

    def _paint_difference(self, line: Line, row: MemoryRow, width: int) -> None:
        text = "" if row.from_median_frac is None else signed_percent_text(row.from_median_frac)
        style = self.look.severity_style(row.severity) if row.severity in ODD else self.look.palette.muted
        line.cell(text, width, style, is_right=True)


def _growth_of(row: MemoryRow) -> tuple[float | None, float | None]:
    """Return the growth in bytes a minute and the seconds to the limit, of the rank's memory that is full first."""
    host = (row.growth_bytes_per_min, row.remaining_s)
    gpu = (row.gpu_growth_bytes_per_min, row.gpu_remaining_s)
    known = [trend for trend in (host, gpu) if trend[0] is not None]
    return min(known, key=lambda trend: trend[1] or 0.0, default=(None, None))


def _paint_growth(line: Line, row: MemoryRow, width: int) -> None:
    rate, _ = _growth_of(row)
    style = line.look.palette.warning if row.is_near else line.look.palette.muted
    line.cell("" if rate is None else f"+{bytes_cell(rate)}/min", width, style, is_right=True)


def _paint_remaining(line: Line, row: MemoryRow, width: int) -> None:
    _, remaining_s = _growth_of(row)
    style = line.look.palette.warning if row.is_near else line.look.palette.muted
    line.cell("" if remaining_s is None else seconds_cell(remaining_s), width, style, is_right=True)


def _paint_used(line: Line, row: NodeRow, width: int, what: str) -> None:
    used, total = getattr(row, f"{what}_used_bytes"), getattr(row, f"{what}_total_bytes")
    if used is None or not total:
        line.cell("", width)
        return
    palette = line.look.palette
    style = palette.warning if used > FULL_FRAC * total else palette.muted
    line.cell(f"{bytes_cell(used)}/{bytes_cell(total)}", width, style, is_right=True)
