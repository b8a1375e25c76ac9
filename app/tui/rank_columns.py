"""The columns of a rank, shared by every table that has ranks for rows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from app.rows import OLD_S, RankState, Severity
from app.tui.columns import Column
from app.wording.rank_words import rank_call
from app.words import bytes_cell, loss_text, percent_text, seconds_cell

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.rows import RankRow
    from app.tui.drawing import Line

STATE_WIDTH = 10
MAX_NODE_WIDTH = 16
PERCENT_WIDTH = 5

_BLAMED_STATES = {RankState.MISSING, RankState.FROZEN, RankState.SILENT, RankState.EXITED, RankState.LOST}


def rank_columns(node_width: int, *, num_ranks: int) -> list[Column[RankRow]]:
    """Return every column of a rank, for node names of at most `node_width` cells.

    Of a rank that is not heard of, its place and its wait are what one looks for: they last, as "last seen".
    """
    rank_width = max(4, len(str(num_ranks)))
    return [
        Column("RANK", rank_width, 0, paint_rank, is_right=True, is_lasting=True),
        Column("NODE", max(4, min(node_width, MAX_NODE_WIDTH)), 2, paint_node, is_lasting=True),
        Column("STATE", STATE_WIDTH, 0, paint_state, is_lasting=True),
        Column("STEP", 7, 0, _paint_step, is_right=True),
        Column("LOSS", 6, 3, _paint_loss, is_right=True),
        Column("PHASE", 10, 7, _paint_phase),
        Column("COLLECTIVE", 16, 4, _paint_call),
        Column("WAITING", 7, 0, _paint_waiting, is_right=True, is_lasting=True),
        Column("WAIT SHARE", 16, 8, partial(paint_share, has_mark=False)),
        Column("MEMORY", 6, 5, _paint_memory, is_right=True),
        Column("AGE", 6, 6, _paint_age, is_right=True, is_lasting=True),
        Column("WHERE", 20, 0, _paint_where, is_flexible=True, is_lasting=True),
    ]


def node_width(names: Sequence[str]) -> int:
    """Return the cells that the longest of some node names needs."""
    return max(map(len, names), default=0)


def paint_rank(line: Line, row: RankRow, width: int) -> None:
    """Paint the number of the rank."""
    line.cell(str(row.rank), width, line.look.palette.strong, is_right=True)


def paint_node(line: Line, row: RankRow, width: int) -> None:
    """Paint the node of the rank."""
    line.cell(row.node, width, line.look.palette.muted)


def paint_state(line: Line, row: RankRow, width: int) -> None:
    """Paint the state: glyph, word and colour."""
    line.cell(f"{line.look.glyphs.states[row.state]} {row.state}", width, line.look.state_style(row.state))


def paint_share(line: Line, row: RankRow, width: int, *, has_mark: bool = False) -> None:
    """Paint the share of time that the rank spent waiting: a bar and a figure."""
    palette = line.look.palette
    if row.wait_frac is None:
        line.cell("", width)
        return
    line.bar(row.wait_frac, width - PERCENT_WIDTH - 1, palette.busy, mark_frac=0.5 if has_mark else None)
    line.put(" ").cell(percent_text(row.wait_frac), PERCENT_WIDTH, palette.muted, is_right=True)


def _paint_step(line: Line, row: RankRow, width: int) -> None:
    text = "" if row.step is None else str(row.step)
    line.cell(text, width, is_right=True)


def _paint_loss(line: Line, row: RankRow, width: int) -> None:
    line.cell("" if row.loss is None else loss_text(row.loss), width, is_right=True)


def _paint_phase(line: Line, row: RankRow, width: int) -> None:
    line.cell(row.phase, width, line.look.palette.muted)


def _paint_call(line: Line, row: RankRow, width: int) -> None:
    line.cell(rank_call(row), width)


def _paint_waiting(line: Line, row: RankRow, width: int) -> None:
    palette = line.look.palette
    if row.waiting_s is None:
        line.cell("", width)
        return
    style = {Severity.CRITICAL: palette.critical, Severity.WARNING: palette.warning}.get(row.severity, palette.busy)
    line.cell(seconds_cell(row.waiting_s), width, style, is_right=True)


def _paint_memory(line: Line, row: RankRow, width: int) -> None:
    line.cell("" if row.rss_bytes is None else bytes_cell(row.rss_bytes), width, is_right=True)


def _paint_age(line: Line, row: RankRow, width: int) -> None:
    palette = line.look.palette
    has_ended = row.state in {RankState.DONE, RankState.STOPPED}
    is_stale = row.age_s is not None and row.age_s > OLD_S and not has_ended
    line.cell(
        "" if row.age_s is None else seconds_cell(row.age_s),
        width,
        palette.warning if is_stale else palette.muted,
        is_right=True,
    )


def _paint_where(line: Line, row: RankRow, width: int) -> None:
    palette = line.look.palette
    is_blamed = row.state in _BLAMED_STATES
    # The line of source is what one opens next; what is odd comes behind it if there is room. Of a rank that is gone
    # how it ended comes first: that tells the culprit from its victims, who all stood in the same line.
    told = (row.detail, row.where) if row.state is RankState.EXITED else (row.where, row.detail)
    text = "  ".join(part for part in told if part)
    line.cell(text, width, palette.ink if is_blamed else palette.muted)
