"""The columns of a node, shared by every table that has nodes for rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.rows import Severity
from app.tui.columns import Column, Table
from app.words import bytes_text, percent_text, seconds_cell

if TYPE_CHECKING:
    from app.rows import NodeRow
    from app.tui.drawing import Line

STATE_WIDTH = 12
PERCENT_WIDTH = 5
MEMORY_TEXT_WIDTH = 18


def node_columns(name_width: int) -> list[Column[NodeRow]]:
    """Return every column of a node, for names of at most `name_width` cells."""
    return [
        Column("NODE", max(4, min(16, name_width)), 0, paint_node_name, is_lasting=True),
        Column("STATE", STATE_WIDTH, 0, _paint_state, is_lasting=True),
        Column("RANKS", 7, 1, _paint_ranks, is_lasting=True),
        Column("RUN", 5, 3, _paint_running, is_right=True),
        Column("CPU", 13, 4, _paint_cpu),
        Column("MEMORY OF THE HOST", 28, 2, paint_node_memory, is_flexible=True),
        report_column(),
    ]


def node_line(table: Table[NodeRow], row: NodeRow) -> Line:
    """Return the line of a node; why there is no way to it stands in the place of figures."""
    if not row.trouble:
        return table.row(row)
    return table.row_with(row, row.trouble, table.look.severity_style(row.severity))


def report_column() -> Column[NodeRow]:
    """Return the column that tells how old a node's figures are."""
    return Column("REPORT", 6, 0, _paint_age, is_right=True, is_lasting=True)


def paint_node_memory(line: Line, row: NodeRow, width: int) -> None:
    """Paint used and total memory of the host: a bar and figures."""
    palette = line.look.palette
    if row.memory_used_bytes is None or not row.memory_total_bytes:
        line.cell("", width)
        return
    frac = row.memory_used_bytes / row.memory_total_bytes
    bar_width = max(0, width - MEMORY_TEXT_WIDTH - 1)
    line.bar(frac, bar_width, palette.warning if frac > 0.9 else palette.busy)
    text = f"{bytes_text(row.memory_used_bytes)} / {bytes_text(row.memory_total_bytes)}"
    line.put(" ").cell(text, MEMORY_TEXT_WIDTH, palette.muted, is_right=True)


def paint_node_name(line: Line, row: NodeRow, width: int) -> None:
    """Paint the name of the node."""
    line.cell(row.node, width, line.look.palette.strong)


def _paint_state(line: Line, row: NodeRow, width: int) -> None:
    style = line.look.severity_style(row.severity)
    line.cell(f"{line.look.glyphs.severities[row.severity]} {row.state}", width, style)


def _paint_ranks(line: Line, row: NodeRow, width: int) -> None:
    line.cell(row.ranks, width)


def _paint_running(line: Line, row: NodeRow, width: int) -> None:
    palette = line.look.palette
    style = palette.muted if row.num_running == row.num_ranks else palette.warning
    line.cell(f"{row.num_running}/{row.num_ranks}" if row.num_ranks else "", width, style, is_right=True)


def _paint_cpu(line: Line, row: NodeRow, width: int) -> None:
    if row.cpu_frac is None:
        line.cell("", width)
        return
    line.bar(row.cpu_frac, width - PERCENT_WIDTH - 1, line.look.palette.busy)
    line.put(" ").cell(percent_text(row.cpu_frac), PERCENT_WIDTH, line.look.palette.muted, is_right=True)


def _paint_age(line: Line, row: NodeRow, width: int) -> None:
    palette = line.look.palette
    style = palette.muted if row.severity is Severity.OK else line.look.severity_style(row.severity)
    line.cell("" if row.age_s is None else seconds_cell(row.age_s), width, style, is_right=True)
