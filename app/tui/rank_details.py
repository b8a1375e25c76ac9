"""All that is known of one rank, as facts with names: below the table of ranks, and on the page of the rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.rows import RankState
from app.tui.drawing import Line
from app.wording.rank_words import rank_call
from app.words import UNKNOWN, bytes_text, loss_text, percent_text, seconds_text

if TYPE_CHECKING:
    from app.rows import RankRow
    from app.tui.theme import Look

FACT_WIDTH = 11
WIDE_FROM = 110
"""Cells from which facts stand in two columns."""


def fact_lines(look: Look, row: RankRow, width: int) -> list[Line]:
    """Return the facts of a rank, the most telling first, in one column or in two."""
    facts = [
        Line(look).put(" ").cell(name, FACT_WIDTH, look.palette.muted).put(value)
        for name, value in _facts(row)
        if value
    ]
    if width < WIDE_FROM:
        return facts
    half = -(-len(facts) // 2)
    lines = []
    for index in range(half):
        line = Line(look).add(facts[index])
        if half + index < len(facts):
            line.fit(width // 2)
            line.add(facts[half + index])
        lines.append(line)
    return lines


def _facts(row: RankRow) -> list[tuple[str, str]]:
    phase_s = f", for {seconds_text(row.phase_s)}" if row.phase_s is not None else ""
    waiting = f"  waiting {seconds_text(row.waiting_s)}" if row.waiting_s is not None else ""
    is_lost = row.state == RankState.LOST
    process = f"pid {row.pid}" if row.pid is not None else "not known" if is_lost else "no process yet"
    on_node = f" on {row.node}" if row.node else ""
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
        ("process", f"{process}{on_node}{local}"),
        ("memory", bytes_text(row.rss_bytes) if row.rss_bytes is not None else ""),
        ("report", f"{seconds_text(row.age_s)} old" if row.age_s is not None else "none yet"),
    ]


def _state_text(row: RankRow) -> str:
    """Return the state and its detail, which often begins with the word itself."""
    if not row.detail or row.detail.startswith(row.state):
        return row.detail or row.state
    return f"{row.state}: {row.detail}"
