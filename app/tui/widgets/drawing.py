"""A line of text under construction (`Line`), and the shapes that all views draw: wrapped text, logs, waits, ranks.

`log_line` draws a log line: its origin, stream and text. `wait_line` draws a wait as one line of a page, `wait_block`
as a block in the view of waits. `fact_lines` draws all facts of one rank, below the table of ranks and on the page of
the rank. `RankGrid` draws a cell per rank, so that the states of thousands of ranks are seen together.
"""

from __future__ import annotations

import re
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.segment import Segment

from app.diagnosis.causes import RankState
from app.diagnosis.rank_facts import STATES
from app.fleet.start_progress import NodeStage
from app.preflight.findings import HostStep, Step
from app.text import (
    UNKNOWN,
    attempt_text,
    bytes_text,
    call_text,
    loss_step_text,
    loss_text,
    percent_text,
    ranks_text,
    seconds_cell,
    seconds_text,
)
from app.tui.widgets.charts import bar_cells
from app.view.ranks import rank_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from rich.style import Style

    from app.tui.logs.store import StoredLine
    from app.tui.palette import Palette
    from app.tui.theme import Look
    from app.tui.ui_state import UiState
    from app.view.nodes import Progress
    from app.view.ranks import BarrierRow
    from app.view.rows import RankRow

START_FAILED = (NodeStage.REFUSED, NodeStage.SILENT, NodeStage.UNKNOWN, HostStep.FAILED, Step.FAILED)
START_DONE = (NodeStage.PREPARED, NodeStage.BEGUN, HostStep.READY, Step.DONE)
START_ORDER = (
    *START_FAILED,
    NodeStage.TAKEN_BACK,
    *(NodeStage.ASKED, NodeStage.BEGINNING, NodeStage.WAITING, *HostStep, *Step),
    *START_DONE,
)


def in_step_order(progress: Progress) -> list[str]:
    """Return the nodes of a start; those that keep the others waiting come first."""
    return sorted(progress.nodes, key=lambda node: START_ORDER.index(progress.stage(node)))


def step_style(palette: Palette, step: str) -> Style:
    return palette.critical if step in START_FAILED else palette.ok if step in START_DONE else palette.muted


class Line:
    """Segments from left to right, with the number of cells they take."""

    __slots__ = ("look", "segments", "width")

    def __init__(self, look: Look) -> None:
        self.look = look
        self.segments: list[Segment] = []
        self.width = 0

    def put(self, text: str, style: Style | None = None) -> Line:
        if text:
            text = self.look.shown(text)
            self.segments.append(Segment(text, style or self.look.palette.ink))
            self.width += len(text) if text.isascii() else cell_len(text)
        return self

    def cell(self, text: str, width: int, style: Style | None = None, *, is_right: bool = False) -> Line:
        """Add text in exactly `width` cells, cut with an ellipsis or padded."""
        text = fitted(self.look.shown(text), width, self.look.glyphs.ellipsis, is_right=is_right)
        if text:
            self.segments.append(Segment(text, style or self.look.palette.ink))
            self.width += width
        return self

    def pad(self, column: int, style: Style | None = None) -> Line:
        """Add blanks up to a column; does nothing when the line is longer."""
        if self.width < column:
            self.segments.append(Segment(" " * (column - self.width), style or self.look.palette.ink))
            self.width = column
        return self

    def add(self, other: Line) -> Line:
        """Add another line's segments."""
        self.segments += other.segments
        self.width += other.width
        return self

    def bar(self, frac: float, width: int, style: Style, *, mark_frac: float | None = None) -> Line:
        """Add a bar that is `frac` full; `mark_frac` sets a mark on it."""
        glyphs, palette = self.look.glyphs, self.look.palette
        full, has_half, empty = bar_cells(frac, width)
        text = glyphs.bar_full * full + glyphs.bar_half * has_half
        if mark_frac is None:
            return self.put(text, style).put(glyphs.bar_empty * empty, palette.faint)
        at = min(width - 1, max(0, round(mark_frac * width)))
        whole = text + glyphs.bar_empty * empty
        for start, stop, part in ((0, min(at, len(text)), style), (len(text), at, palette.faint)):
            self.put(whole[start:stop], part)
        self.put(glyphs.mark, palette.ink)
        for start, stop, part in ((at + 1, len(text), style), (max(at + 1, len(text)), width, palette.faint)):
            self.put(whole[start:stop], part)
        return self

    def fit(self, width: int, fill: Style | None = None) -> Line:
        """Cut or pad it to exactly `width` cells."""
        if self.width < width:
            self.pad(width, fill)
        elif self.width > width:
            self._cut(width)
        return self

    def laid_over(self, style: Style) -> Line:
        """Lay a style over every segment's own."""
        self.segments = [Segment(text, own + style if own else style) for text, own, _ in self.segments]
        return self

    def fade(self, start: int) -> None:
        """Paint the segments from `start` on as old."""
        faint = self.look.palette.faint
        self.segments[start:] = [Segment(text, faint) for text, _, _ in self.segments[start:]]

    def _cut(self, width: int) -> None:
        kept: list[Segment] = []
        left = width
        for segment in self.segments:
            size = segment.cell_length
            if size >= left:
                if left:
                    kept.append(Segment(set_cell_size(segment.text, left), segment.style))
                break
            kept.append(segment)
            left -= size
        self.segments, self.width = kept, width


def fitted(text: str, width: int, ellipsis: str, *, is_right: bool = False) -> str:
    """Return text in exactly `width` cells."""
    size = len(text) if text.isascii() else cell_len(text)
    if size == width:
        return text
    if size < width:
        return " " * (width - size) + text if is_right else text + " " * (width - size)
    return set_cell_size(text, width - 1) + ellipsis if width > 0 else ""


_BREAK = re.compile(r" (?!(?<=\d )(?:%|[mu]?s|min|h|C|W|[KMG]Hz|[KMGT]?i?B)(?!\w))")
"""A blank that is not between a number and its unit."""


def wrapped(text: str, width: int, max_lines: int, ellipsis: str) -> list[str]:
    """Return text broken at blanks into at most `max_lines` lines of at most `width` cells; the last may be cut.

    A number stays with its unit.
    """
    lines: list[str] = []
    current = ""
    for word in _BREAK.split(" ".join(text.split())):
        longer = f"{current} {word}" if current else word
        if cell_len(longer) <= width or not current:
            current = longer
        else:
            lines.append(current)
            current = word
    lines.append(current)
    kept = lines[:max_lines]
    if len(lines) > max_lines:
        kept[-1] = f"{kept[-1]} {lines[max_lines]}"
    return [line if cell_len(line) <= width else fitted(line, width, ellipsis) for line in kept]


MAX_PREFIX = 24


def prefix(stored: StoredLine) -> str:
    """Return `demo-1:r2`, or `demo-1:launcher`."""
    return f"{stored.node}:r{stored.rank}" if stored.rank >= 0 else f"{stored.node}:launcher"


def prefix_width(lines: list[StoredLine]) -> int:
    """Return the cells that the prefixes of some lines need."""
    return text_width(prefix(line) for line in lines)


def text_width(prefixes: Iterable[str]) -> int:
    """Return the cells that some prefixes need."""
    return min(MAX_PREFIX, max(map(cell_len, prefixes), default=0))


def log_line(
    look: Look, stored: StoredLine, width: int, offset: int = 0, found: tuple[int, int] | None = None, who: str = ""
) -> Line:
    """Return a log line with its prefix in `width` cells, its text from cell `offset` on.

    Args:
        look: Look of the terminal.
        stored: The line.
        width: Width of the prefix.
        offset: Cells that the text is scrolled to the side.
        found: Range of characters that match the filter.
        who: Prefix that replaces the line's own.
    """
    palette = look.palette
    line = Line(look).put(" ").cell(who or prefix(stored), width, look.rank_style(stored.rank))
    line.put(f" {look.glyphs.stderr if stored.is_stderr else ' '} ", palette.warning)
    if found is not None and not offset:
        start, stop = found
        line.put(stored.text[:start], palette.ink).put(stored.text[start:stop], palette.found)
        return line.put(stored.text[stop:], palette.ink)
    return line.put(shifted(stored.text, offset), palette.heading if stored.is_mark else palette.ink)


def shifted(text: str, cells: int) -> str:
    """Return text without its first cells; half of a wide character becomes a blank."""
    if not cells or text.isascii():
        return text[cells:]
    size = cell_len(text)
    if size <= cells:
        return ""
    kept = set_cell_size(text, cells)
    num_whole = len(kept) if text.startswith(kept) else len(kept) - 1
    rest = text[num_whole:]
    return rest if text.startswith(kept) else " " + rest[1:]


BAR_WIDTH = 24


def wait_line(ui: UiState, row: BarrierRow, width: int) -> Line:
    look = ui.look
    style = look.severity_style(row.severity)
    line = Line(look).put(f" {look.glyphs.severities[row.severity]} ", style)
    line.cell(seconds_cell(row.waited_s), 6, style, is_right=True).put("  ")
    bar_width = max(0, min(BAR_WIDTH, width - 80))
    if bar_width > 5:
        line.bar(row.waited_s / ui.source.stall_s, bar_width, style).put("  ")
    missing = f" {look.glyphs.arrow} missing {ranks_text(row.missing)}" if row.missing else ""
    ends = [f"{missing}; {text}" for text in (row.placed_other_calls_text, row.other_calls_text) if text]
    ends = ends or [missing or ("; nobody is missing" if row.is_settled else "; who is missing is not known yet")]
    call, room = call_text(row.group, row.seq, row.op, row.label), max(0, width - line.width - 1)
    # When not all fits, the ranks that are missing or in another call are kept.
    sentences = [*(f"{call}: {ranks_text(row.in_this_call)}{end}" for end in ends), f"{call}{ends[-1]}"]
    return line.cell(next((text for text in sentences if cell_len(text) <= room), sentences[-1]), room)


def wait_block(ui: UiState, row: BarrierRow, width: int) -> list[Line]:
    """Return a wait in a few lines: what and how long, who waits where, who is missing or in another call where."""
    look = ui.look
    palette = look.palette
    style = look.severity_style(row.severity)
    call = call_text(row.group, row.seq, row.op, row.label)
    title = Line(look).put(f" {look.glyphs.severities[row.severity]} ", style).put(call, palette.strong)
    job = f"   job {row.job}" + (f", {attempt_text(row.attempt)}" if row.attempt else "")
    title.put(job, palette.faint)
    stall_s = ui.source.stall_s
    bar_width = max(8, min(60, width - 44))
    is_stall = row.waited_s >= stall_s
    timing = Line(look).put("   for      ", palette.muted).cell(seconds_cell(row.waited_s), 6, style).put("  ")
    timing.bar(row.waited_s / stall_s, bar_width, style).put("  ")
    timing.put(f"stall, from {stall_s:g} s" if is_stall else f"stall at {stall_s:g} s", palette.muted)
    sides = [("waiting", row.in_this_call, row.where), ("missing", row.missing, row.missing_where)]
    lines = [title, timing]
    for word, ranks, where in sides[: 2 if row.missing else 1]:
        line = _side(ui, word, ranks, width)
        if where:
            line.put("at ", palette.muted).put(where, palette.strong if word == "missing" else palette.ink)
        else:
            line.put("place not known", palette.faint)
        lines.append(line)
    for other in row.other_calls:
        line = _side(ui, "differs", other.ranks, width)
        lines.append(line.put(f"{other.verb} {other.call}", palette.strong).put(other.at, palette.muted))
    return lines


def _side(ui: UiState, word: str, ranks: list[int], width: int) -> Line:
    """Return the beginning of a line about some ranks of a wait."""
    palette = ui.look.palette
    line = Line(ui.look).put(f"   {word}  ", palette.muted)
    rank_width = max(14, min(40, width // 3))
    return line.cell(ranks_text(ranks), rank_width, palette.busy if word == "waiting" else palette.critical).put("  ")


FACT_WIDTH = 11
MAX_FACT_LINES = 3
WIDE_FROM = 110
"""Cells from which facts are in two columns."""


def fact_lines(look: Look, row: RankRow, width: int, usual_place: str = "", room: int = 0) -> list[Line]:
    """Return the facts of a rank, the most important first, in one column or two.

    A long fact takes more lines where there is `room` for them; else it is cut with an ellipsis.

    Args:
        look: Look of the terminal.
        row: The rank.
        width: Cells of a line.
        usual_place: Line at which a verdict sees the rank most often; it differs from the line of this moment.
        room: Lines that the facts may take without taking them from others.
    """
    facts = [(name, value) for name, value in _facts(row, usual_place) if value]
    num_columns = 1 if width < WIDE_FROM else 2
    column_width, size = width // num_columns, -(-len(facts) // num_columns)
    lines: list[Line] = []
    for max_lines in range(MAX_FACT_LINES, 0, -1):
        drawn = [_fact(look, name, value, column_width - 1, max_lines) for name, value in facts]
        columns = [list(chain(*drawn[first : first + size])) for first in range(0, len(drawn), size)]
        lines = [_side_by_side(look, parts, column_width) for parts in zip_longest(*columns)]
        if len(lines) <= room:
            break
    return lines


def _side_by_side(look: Look, parts: Iterable[Line | None], width: int) -> Line:
    line = Line(look)
    for place, part in enumerate(parts):
        if part is not None:
            line.pad(place * width).add(part)
    return line


def _fact(look: Look, name: str, value: str, width: int, max_lines: int) -> list[Line]:
    value, room = look.shown(value), width - FACT_WIDTH - 1
    texts = [value] if cell_len(value) <= room else wrapped(value, room, max_lines, look.glyphs.ellipsis)
    return [
        Line(look).put(" ").cell("" if place else name, FACT_WIDTH, look.palette.muted).put(text)
        for place, text in enumerate(texts)
    ]


def _facts(row: RankRow, usual_place: str) -> list[tuple[str, str]]:
    phase_s = f", for {seconds_text(row.phase_s)}" if row.phase_s is not None else ""
    waiting = f"  waiting {seconds_text(row.waiting_s)}" if row.waiting_s is not None else ""
    is_lost = row.state == RankState.LOST
    process = f"pid {row.pid}" if row.pid is not None else "not known" if is_lost else "no process yet"
    on_node = f" on {row.node}" if row.node else ""
    local = f", local rank {row.local_rank}" if row.local_rank is not None else ""
    is_least = row.is_step_least and row.step is not None
    step = f"at least {row.step}" if is_least else row.step_text or UNKNOWN
    least = "  last known" if is_least else ""
    has_ended = row.is_over or row.state is RankState.LOST
    epoch = f"  epoch {row.epoch}" if row.epoch is not None else ""
    loss = f"  loss {loss_text(row.loss)}{loss_step_text(row.loss_step, row.step)}" if row.loss is not None else ""
    return [
        ("state", _state_text(row)),
        ("last at" if has_ended else "now at", row.where),
        ("mostly at", usual_place),
        ("phase", f"{row.phase_text}{phase_s}" if row.phase_text else ""),
        ("last call", f"{rank_call(row)}{waiting}"),
        ("wait share", f"{percent_text(row.wait_frac)} of the last seconds" if row.wait_frac is not None else ""),
        ("step", f"{step}{epoch}{loss}{least}"),
        ("process", f"{process}{on_node}{local}"),
        ("memory", bytes_text(row.rss_bytes) if row.rss_bytes is not None else ""),
        ("report", f"{seconds_text(row.age_s)} old" if row.age_s is not None else "none yet"),
    ]


def _state_text(row: RankRow) -> str:
    """Return the state and its detail, which often begins with the state's name."""
    if row.state is RankState.MISSING and not row.detail:
        return "missing: it runs, and others wait for it"
    if not row.detail or row.detail.startswith(row.state):
        return row.detail or row.state
    return f"{row.state}: {row.detail}"


GRID_FROM = 256
"""Number of ranks from which the grid is shown first: more than fit as rows."""
GROUP = 8
"""Cells that stand together: the ranks of a typical node."""


class RankGrid:
    """The layout and colours of ranks as cells, in a window of some width.

    Attributes:
        per_line: Number of cells in a line.
    """

    def __init__(self, look: Look, width: int, ranks: NDArray[np.int64], states: NDArray[np.int8]) -> None:
        """Show `ranks` in their order; `states` are those of all ranks (indices into `rank_facts.STATES`)."""
        self._look = look
        self._ranks = ranks
        self._states = states
        self._label_width = max(4, len(str(len(states))))
        self._first_x = 1 + self._label_width + 2
        self.per_line = GROUP * max(1, (width - self._first_x) // (GROUP + 1))

    @property
    def num_lines(self) -> int:
        """Number of lines of the whole grid."""
        return -(-len(self._ranks) // self.per_line)

    def line(self, index: int, selected_place: int) -> Line:
        """Return a line: the number of its first rank, then its cells."""
        look, first = self._look, index * self.per_line
        ranks = self._ranks[first : first + self.per_line]
        line = Line(look).put(" ").cell(str(ranks[0]), self._label_width, look.palette.muted, is_right=True).put(" ")
        looks = [(look.glyphs.states[state], look.state_style(state)) for state in STATES]
        run, run_code = "", -1
        for offset, code in enumerate(self._states[ranks].tolist()):
            gap = "" if offset % GROUP else " "
            is_selected = first + offset == selected_place
            if code == run_code and not is_selected:
                run += gap + looks[code][0]
                continue
            line.put(run + gap, looks[run_code][1] if run_code >= 0 else None)
            run, run_code = looks[code][0], code
            if is_selected:
                line.put(run, looks[code][1] + look.palette.cell)
                run = ""
        return line.put(run, looks[run_code][1])

    def place_at(self, index: int, x: int) -> int | None:
        """Return the place of the cell at a column of a line; None when there is none."""
        group, within = divmod(x - self._first_x, GROUP + 1)
        place = index * self.per_line + group * GROUP + within
        is_cell = x >= self._first_x and within < GROUP and group * GROUP < self.per_line
        return place if is_cell and place < len(self._ranks) else None

    def put_counts(self, line: Line, width: int) -> Line:
        """Add the number of ranks in each state, the rarest first, as far as there is room."""
        counts = np.bincount(self._states[self._ranks], minlength=len(STATES))
        for code in sorted(np.flatnonzero(counts).tolist(), key=lambda code: (counts[code], code)):
            state = STATES[code]
            text = f"{self._look.glyphs.states[state]} {counts[code]:,} {state}"
            if line.width + len(text) + 3 <= width:
                line.put("   ", self._look.palette.heading)
                line.put(text, self._look.state_style(state) + self._look.palette.raised)
        return line
