"""Rows as lines of plain text, for the commands that print one table: a header, and aligned columns. Pure.

Each function takes the widths of the columns that were printed before, by header, and updates them: in a table that is
printed again and again, columns only grow.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from app.text import (
    UNKNOWN,
    bytes_cell,
    call_text,
    loss_text,
    percent_text,
    ranges_text,
    seconds_cell,
    signed_percent_text,
)
from app.view.because_text import signal_texts
from app.view.pace import MIN_SHOWN_FRAC, STEP_ORDER
from app.view.ranks import rank_call

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.view.memory import MemoryRow
    from app.view.pace import PaceRow
    from app.view.ranks import BarrierRow
    from app.view.rows import RankRow

Row = TypeVar("Row")

MAX_WORSE = 2
"""Limit of signals in a cell."""


class _Column(NamedTuple, Generic[Row]):
    """A column of a table; it is left out while no row has had a value.

    Attributes:
        name: Its header; a leading space aligns its cells to the right.
        cell: Returns the text of a row.
    """

    name: str
    cell: Callable[[Row], str]


def rank_lines(rows: Sequence[RankRow], widths: dict[str, int]) -> list[str]:
    """Return a table of ranks: what each does, its current call and its place."""
    columns: list[_Column[RankRow]] = [
        _Column(" RANK", lambda row: str(row.rank)),
        _Column("NODE", lambda row: row.node),
        _Column("STATE", lambda row: row.state.value),
        _Column(" STEP", lambda row: row.step_text or UNKNOWN),
        _Column(" LOSS", lambda row: loss_text(row.loss)),
        _Column("PHASE", lambda row: row.phase_text),
        _Column("LAST CALL", rank_call),
        _Column(" WAITING", lambda row: seconds_cell(row.waiting_s)),
        _Column(" WAIT SHARE", lambda row: percent_text(row.wait_frac)),
        _Column(" MEMORY", lambda row: bytes_cell(row.rss_bytes)),
        _Column(" GPU MEMORY", lambda row: bytes_cell(row.gpu_used_bytes)),
        _Column("AT", lambda row: "  ".join(row.places)),
    ]
    return _lines(columns, rows, widths)


def barrier_lines(rows: Sequence[BarrierRow], widths: dict[str, int]) -> list[str]:
    """Return a table of the calls in which ranks wait, with the ranks still missing or in another call."""
    columns: list[_Column[BarrierRow]] = [
        _Column("CALL", lambda row: call_text(row.group, row.seq, row.op, row.label)),
        _Column(" WAITED", lambda row: seconds_cell(row.waited_s)),
        _Column("WAITING", lambda row: ranges_text(row.in_this_call)),
        _Column("MISSING", lambda row: ranges_text(row.missing)),
        _Column("WAITING AT", lambda row: row.where),
        _Column("MISSING AT", lambda row: row.missing_where),
        _Column("OTHER CALLS", lambda row: row.placed_other_calls_text),
    ]
    return _lines(columns, rows, widths)


def straggler_lines(rows: Sequence[PaceRow], widths: dict[str, int]) -> list[str]:
    """Return a table of how the ranks spend their time, and of what each does more than the others."""
    headers = {phase: f" {phase.upper()}" for phase in STEP_ORDER}
    phases = [
        phase
        for phase in STEP_ORDER
        if headers[phase] in widths or any(row.phases[phase] >= MIN_SHOWN_FRAC for row in rows)
    ]
    columns: list[_Column[PaceRow]] = [
        _Column(" RANK", lambda row: str(row.rank)),
        _Column("NODE", lambda row: row.node),
        _Column(" COST", lambda row: percent_text(row.cost_frac)),
        _Column(" WAITS", lambda row: percent_text(row.wait_frac)),
        _Column(" LAST ON NODE", lambda row: percent_text(row.last_frac)),
        *(_Column(headers[phase], partial(_phase_cell, phase)) for phase in phases),
        _Column("MORE TIME IN", lambda row: ", ".join(row.more_of)),
        _Column("STANDS OUT", _worse_cell),
        _Column("AT", lambda row: row.where),
    ]
    return _lines(columns, rows, widths)


def _worse_cell(row: PaceRow) -> str:
    """Return `GPU clock 1,230 MHz (1,980 MHz)`: signals that stand out, with the peers' median."""
    texts = [signal_texts(signal) for signal in row.signals if signal.is_worse][:MAX_WORSE]
    return ", ".join(f"{label} {value} ({peers})" for label, value, peers in texts)


def _phase_cell(phase: str, row: PaceRow) -> str:
    return percent_text(row.phases[phase])


def memory_lines(rows: Sequence[MemoryRow], widths: dict[str, int]) -> list[str]:
    """Return a table of the ranks' memory, compared with the median, and of each rank's nearest limit."""
    columns: list[_Column[MemoryRow]] = [
        _Column(" RANK", lambda row: str(row.rank)),
        _Column("NODE", lambda row: row.node),
        _Column(" RSS", lambda row: bytes_cell(row.rss_bytes)),
        _Column(" PSS", lambda row: bytes_cell(row.pss_bytes)),
        _Column(" PEAK", lambda row: bytes_cell(row.peak_rss_bytes)),
        _Column(
            " VS MEDIAN",
            lambda row: UNKNOWN if row.from_median_frac is None else signed_percent_text(row.from_median_frac),
        ),
        _Column(" GPU", lambda row: UNKNOWN if row.gpu is None else str(row.gpu)),
        _Column(" GPU USED", lambda row: bytes_cell(row.gpu_used_bytes)),
        _Column(" ALLOCATED", lambda row: bytes_cell(row.torch_allocated_bytes)),
        _Column(" RESERVED", lambda row: bytes_cell(row.torch_reserved_bytes)),
        _Column("LIMIT", lambda row: row.limit),
        _Column(" USED", lambda row: bytes_cell(row.limit_used_bytes)),
        _Column(" OF", lambda row: bytes_cell(row.limit_bytes)),
        _Column(" GROWTH/MIN", lambda row: bytes_cell(row.growth_bytes_per_min)),
        _Column(" FULL IN", lambda row: seconds_cell(row.remaining_s)),
    ]
    return _lines(columns, rows, widths)


def _lines(columns: Sequence[_Column[Row]], rows: Sequence[Row], widths: dict[str, int]) -> list[str]:
    """Return the header and a line for each row; empty without rows."""
    if not rows:
        return []
    parts: list[list[str]] = []
    for column in columns:
        cells = [column.cell(row) for row in rows]
        if column.name not in widths and not set(cells) - {"", UNKNOWN}:
            continue
        width = max(len(column.name.strip()), widths.get(column.name, 0), *map(len, cells))
        widths[column.name] = width
        align = str.rjust if column.name.startswith(" ") else str.ljust
        parts.append([align(text, width) for text in (column.name.strip(), *cells)])
    return ["  ".join(line).rstrip() for line in zip(*parts, strict=True)]
