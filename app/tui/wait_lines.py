"""How a wait is drawn: one line on a page of many things, a block where waits are the subject."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.tui.drawing import Line
from app.words import call_text, ranks_text, seconds_cell

if TYPE_CHECKING:
    from app.rows import BarrierRow
    from app.tui.stage import Stage

BAR_WIDTH = 24


def wait_line(stage: Stage, row: BarrierRow, width: int) -> Line:
    """Return a wait in one line."""
    look = stage.look
    style = look.severity_style(row.severity)
    line = Line(look).put(f" {look.glyphs.severities[row.severity]} ", style)
    line.cell(seconds_cell(row.waited_s), 6, style, is_right=True).put("  ")
    bar_width = max(0, min(BAR_WIDTH, width - 80))
    if bar_width > 5:
        line.bar(row.waited_s / stage.source.stall_s, bar_width, style).put("  ")
    missing = f"{look.glyphs.arrow} missing {ranks_text(row.missing)}" if row.missing else "nobody is missing"
    call, room = call_text(row.group, row.seq, row.op, row.label), max(0, width - line.width - 1)
    sentence = f"{call}: {ranks_text(row.waiting)} {missing}"
    # Where not all has room, who is missing has.
    return line.cell(sentence if len(sentence) <= room else f"{call} {missing}", room)


def wait_block(stage: Stage, row: BarrierRow, width: int) -> list[Line]:
    """Return a wait in four lines: what and how long, who waits where, who is missing where."""
    look = stage.look
    palette = look.palette
    style = look.severity_style(row.severity)
    call = call_text(row.group, row.seq, row.op, row.label)
    title = Line(look).put(f" {look.glyphs.severities[row.severity]} ", style).put(call, palette.strong)
    job = f"   job {row.job}" + (f", attempt {row.attempt}" if row.attempt else "")
    title.put(job, palette.faint)
    stall_s = stage.source.stall_s
    bar_width = max(8, min(60, width - 44))
    is_stall = row.waited_s >= stall_s
    timing = Line(look).put("   for      ", palette.muted).cell(seconds_cell(row.waited_s), 6, style).put("  ")
    timing.bar(row.waited_s / stall_s, bar_width, style).put("  ")
    timing.put(f"stall, from {stall_s:g} s" if is_stall else f"stall at {stall_s:g} s", palette.muted)
    lines = [title, timing, _side(stage, "waiting", row.waiting, row.where, width)]
    if row.missing:
        lines.append(_side(stage, "missing", row.missing, row.missing_where, width))
    return lines


def _side(stage: Stage, word: str, ranks: list[int], where: str, width: int) -> Line:
    look = stage.look
    is_missing = word == "missing"
    line = Line(look).put(f"   {word}  ", look.palette.muted)
    rank_width = max(14, min(40, width // 3))
    line.cell(ranks_text(ranks), rank_width, look.palette.critical if is_missing else look.palette.busy).put("  ")
    if where:
        line.put("at ", look.palette.muted).put(where, look.palette.strong if is_missing else look.palette.ink)
    else:
        line.put("place not known", look.palette.faint)
    return line
