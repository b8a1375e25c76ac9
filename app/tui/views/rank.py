"""The page of one rank: its facts, waits, memory, events and output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.filters.lines import LineWish
from app.filters.terms import Filter, NumberTerm
from app.text import bytes_text, seconds_cell, signed_percent_text
from app.tui.logs.matches import LogMatches
from app.tui.widgets.drawing import fact_lines, log_line, prefix_width, wait_line, wrapped
from app.tui.widgets.line_view import LineView
from app.view.ranks import rank_text

if TYPE_CHECKING:
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.memory import MemoryRow
    from app.view.rows import RankRow
    from app.view.view import View

MAX_EVENTS = 5
MAX_EVENTS_LOOKED_AT = 1000
MAX_SENTENCE_LINES = 3
MIN_LOG_LINES = 5
"""Log lines below which the page scrolls."""


class RankPage(LineView):
    """Opened from a row about the rank, and closed to the view that it was opened in.

    Attributes:
        rank: The rank.
        came_from: Name of the view that it was opened in.
    """

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "rank")
        self.rank = 0
        self.came_from = "ranks"
        self._prints: LogMatches | None = None

    def open(self, rank: int, came_from: str) -> None:
        self.rank, self.came_from, self.top, self._prints = rank, came_from, 0, None

    @property
    def selected_rank(self) -> int:
        return self.rank

    @property
    def copied(self) -> tuple[str, str] | None:
        rows = self.ui.view.ranks([self.rank]) if self.ui.view is not None else []
        return (f"rank {self.rank}", rank_text(rows[0])) if rows else super().copied

    def sideways(self, cells: int) -> None:
        num_ranks = self.ui.view.num_ranks if self.ui.view is not None else 0
        self.open(max(0, min(num_ranks - 1, self.rank + cells)), self.came_from)
        self.redraw()

    def build(self) -> None:
        """Make all lines; the latest lines of its output fill the window."""
        view = self.ui.view
        rows = view.ranks([self.rank]) if view is not None else []
        self.head, self.lines = [self._heading(rows[0] if rows else None)], []
        if view is None or not rows:
            self.lines = [self.line().put(" there is no such rank now", self.look.palette.muted)]
            return
        room = max(0, self.body_height - MIN_LOG_LINES - 1)
        self.lines += fact_lines(self.look, rows[0], self.size.width, view.usual_place(self.rank), room)
        known = [] if view.why_unknown else self._waits(view) + self._memory(view)
        self.lines += self._verdicts(view) + known + self._events()
        self.lines += self._printed(max(MIN_LOG_LINES, self.body_height - len(self.lines) - 1))

    def _heading(self, row: RankRow | None) -> Line:
        palette = self.look.palette
        line = self.line().put(f" {self.came_from.capitalize()} > ", palette.heading)
        line.put(f" rank {self.rank} ", palette.tab)
        if row is not None:
            line.put(f"  {row.node}  {self.look.glyphs.states[row.state]} {row.state}", palette.heading)
        for keys in self._keys():
            if line.width + len(keys) + 3 < self.size.width:
                line.pad(self.size.width - len(keys) - 1, palette.heading).put(keys, palette.heading)
                break
        return line

    def _keys(self) -> tuple[str, str]:
        """Return the keys of this page with their effects, in a long and a short form."""
        hint, first = self.ui.keymap.hint, self.ui.keymap.first
        sides = f"{first('left')} {first('right')}: other ranks" if first("left") and first("right") else ""
        back = hint("back", "back")
        at_length = (sides, hint("open", "its log lines"), hint("stacks", "stacks"), back)
        return "   ".join(filter(None, at_length)), "   ".join(filter(None, (hint("open", "its log"), back)))

    def _section(self, title: str, lines: list[Line]) -> list[Line]:
        if not lines:
            return []
        return [self.heading(self.line().put(f" {title}", self.look.palette.heading)), *lines]

    def _verdicts(self, view: View) -> list[Line]:
        """Return the rank's verdicts except the first one, which is above every view."""
        lines = []
        for verdict in view.verdicts()[1:]:
            if self.rank in verdict.culprits:
                style = self.look.severity_style(verdict.severity)
                lines += [self.line().put("  ").put(text, style) for text in self._wrapped(verdict.text)]
                lines += [self.line().put("  ").put(text) for text in self._wrapped(verdict.hint)]
        return self._section("VERDICT", lines)

    def _wrapped(self, text: str) -> list[str]:
        return wrapped(self.look.shown(text), self.size.width - 4, MAX_SENTENCE_LINES, self.look.glyphs.ellipsis)

    def _waits(self, view: View) -> list[Line]:
        waits = [row for row in view.barriers() if self.rank in row.waiting or self.rank in row.missing]
        return self._section("WAITS", [wait_line(self.ui, row, self.size.width) for row in waits])

    def _memory(self, view: View) -> list[Line]:
        parts = [f"{name} {value}" for row in view.memory([self.rank]) for name, value in _held(row)]
        return self._section("MEMORY", [self.line().put(" ").put("   ".join(parts))] if parts else [])

    def _events(self) -> list[Line]:
        log, palette, lines = self.ui.events, self.look.palette, []
        for index in range(len(log) - 1, max(-1, len(log) - 1 - MAX_EVENTS_LOOKED_AT), -1):
            event = log[index]
            if self.rank in event.ranks:
                age = seconds_cell(max(0.0, log.now_s - event.at_s))
                line = self.line().put("  ").cell(age, 6, palette.faint, is_right=True).put(" ago  ", palette.faint)
                glyph = self.look.glyphs.severities[event.severity]
                line.put(f"{glyph} {event.kind}  ", self.look.severity_style(event.severity))
                lines.append(line.cell(event.text, max(0, self.size.width - line.width - 2)))
            if len(lines) == MAX_EVENTS:
                break
        return self._section("EVENTS", lines[::-1])

    def _printed(self, room: int) -> list[Line]:
        logs, job_id = self.ui.logs, self.ui.job_of_logs
        if self._prints is None or self._prints.logs is not logs or self._prints.wish.job_id != job_id:
            only = NumberTerm("rank", ((self.rank, self.rank),))
            self._prints = LogMatches(LineWish(Filter(f"rank={self.rank}", (only,)), job_id=job_id), logs)
        self.ui.search(self._prints)
        latest = self._prints.last(room, self.ui.first_of_attempt)
        lines = [log_line(self.look, stored, prefix_width(latest)) for stored in latest]
        unsearched = self._prints.num_unsearched
        none = f"{unsearched:,} older lines not searched yet" if unsearched else self.ui.no_lines_of(self.rank)
        return self._section("LOG", lines or [self.line().put(f"  {none}", self.look.palette.faint)])


def _held(row: MemoryRow) -> list[tuple[str, str]]:
    """Return (name, value) of the known memory figures of a rank."""
    sizes = (
        ("RSS", row.rss_bytes),
        ("PSS", row.pss_bytes),
        ("peak", row.peak_rss_bytes),
        ("GPU", row.gpu_used_bytes),
        ("allocated", row.torch_allocated_bytes),
        ("reserved", row.torch_reserved_bytes),
        ("peak", row.torch_peak_bytes),
        ("of", row.gpu_total_bytes),
    )
    parts = [(name, bytes_text(size)) for name, size in sizes if size is not None]
    if row.from_median_frac is not None:
        parts.insert(1, ("beside the median", signed_percent_text(row.from_median_frac)))
    return parts
