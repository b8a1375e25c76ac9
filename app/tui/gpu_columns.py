"""The columns of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.rows import Severity
from app.tui.columns import Column
from app.words import bytes_cell, percent_text, seconds_text

if TYPE_CHECKING:
    from app.rows import GpuRow
    from app.tui.drawing import Line

ODD = (Severity.WARNING, Severity.CRITICAL)
HOT_CELSIUS = 85.0
"""Most data-centre GPUs slow themselves down a few degrees above."""


def gpu_columns(name_width: int) -> list[Column[GpuRow]]:
    """Return every column of a GPU, for nodes' names of at most `name_width` cells."""
    return [
        Column("NODE", max(4, min(16, name_width)), 2, _paint_node, is_lasting=True),
        Column("GPU", 3, 0, _paint_index, is_right=True, is_lasting=True),
        Column("RANK", 6, 0, _paint_ranks, is_lasting=True),
        Column("BUSY", 5, 0, _paint_busy, is_right=True),
        Column("USED/TOTAL", 11, 0, _paint_memory, is_right=True),
        Column("TORCH", 5, 6, _paint_torch, is_right=True),
        Column("TEMP", 5, 1, _paint_temperature, is_right=True),
        Column("POWER", 9, 3, _paint_power, is_right=True),
        Column("CLOCK", 9, 4, _paint_clock, is_right=True),
        Column("MODEL", 22, 5, _paint_name),
        Column("STATE", 28, 0, _paint_state, is_flexible=True, is_lasting=True),
    ]


def _paint_node(line: Line, row: GpuRow, width: int) -> None:
    line.cell(row.node, width, line.look.palette.strong)


def _paint_index(line: Line, row: GpuRow, width: int) -> None:
    line.cell(str(row.gpu), width, line.look.palette.strong, is_right=True)


def _paint_ranks(line: Line, row: GpuRow, width: int) -> None:
    line.cell(",".join(str(rank) for rank in row.ranks), width)


def _paint_busy(line: Line, row: GpuRow, width: int) -> None:
    line.cell("" if row.busy_frac is None else percent_text(row.busy_frac), width, is_right=True)


def _paint_memory(line: Line, row: GpuRow, width: int) -> None:
    if row.memory_used_bytes is None:
        line.cell("", width)
        return
    line.cell(f"{bytes_cell(row.memory_used_bytes)}/{bytes_cell(row.memory_total_bytes)}", width, is_right=True)


def _paint_torch(line: Line, row: GpuRow, width: int) -> None:
    text = "" if row.torch_reserved_bytes is None else bytes_cell(row.torch_reserved_bytes)
    line.cell(text, width, line.look.palette.muted, is_right=True)


def _paint_temperature(line: Line, row: GpuRow, width: int) -> None:
    palette, celsius = line.look.palette, row.temperature_celsius
    style = palette.warning if celsius is not None and celsius >= HOT_CELSIUS else palette.muted
    line.cell("" if celsius is None else f"{celsius:.0f} C", width, style, is_right=True)


def _paint_power(line: Line, row: GpuRow, width: int) -> None:
    limit = "" if row.power_limit_watts is None else f"/{row.power_limit_watts:.0f}"
    text = "" if row.power_watts is None else f"{row.power_watts:.0f}{limit} W"
    line.cell(text, width, line.look.palette.muted, is_right=True)


def _paint_clock(line: Line, row: GpuRow, width: int) -> None:
    text = "" if row.sm_clock_hz is None else f"{row.sm_clock_hz / 1e6:.0f} MHz"
    line.cell(text, width, line.look.palette.muted, is_right=True)


def _paint_name(line: Line, row: GpuRow, width: int) -> None:
    line.cell(row.name.removeprefix("NVIDIA "), width, line.look.palette.muted)


def _paint_state(line: Line, row: GpuRow, width: int) -> None:
    look = line.look
    style = look.severity_style(row.severity) if row.severity in ODD else look.palette.muted
    text = row.detail if row.detail and row.state != "silent" else row.state
    if row.is_old:
        text = f"{text}, {seconds_text(row.age_s)} ago"
    line.cell(f"{look.glyphs.severities[row.severity]} {text}", width, style)
