"""The view of log lines: all ranks' output in order of arrival, or the lines that match a filter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len

from app.filters.lines import LOG_KEYS, LineWish
from app.text import clean_name, ranks_text
from app.tui.logs.matches import CollapsedLines
from app.tui.logs.search import LogSearch
from app.tui.widgets.drawing import log_line, prefix, prefix_width, shifted, text_width
from app.tui.widgets.line_view import LONG_LINES, FilteredView

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.tui.logs.store import StoredLine
    from app.tui.ui_state import UiState
    from app.tui.widgets.drawing import Line
    from app.view.rows import RootCauseRow

SIDE_STEP = 8
"""Cells that one key press moves the text."""
SPARE = 3
"""Blank cells behind the longest line when it is moved as far as it is long."""


class LogsView(FilteredView):
    """Follows the latest line until the user scrolls back, and again from the last line on.

    Once a rank has failed, the root cause is shown above the lines, and its traceback can replace them.

    Attributes:
        marked: Number of the line that was jumped to or clicked; None without one.
        came_from_rank: Whether they were opened from the page of a rank, and have been shown since.
        is_collapsing: Whether lines that several ranks print alike are one row.
    """

    filter_keys = LOG_KEYS
    filter_example = "level=error stream=stderr rank=0,3-5 node=gpu* word /regex/ !not"

    def __init__(self, ui: UiState) -> None:
        super().__init__(ui, "logs")
        self.is_following = True
        self.shows_traceback = False
        self.side = 0
        self.marked: int | None = None
        self.came_from_rank = self.is_collapsing = False
        self._logs = ui.logs
        """Store whose lines the numbers here count."""
        self._matches: LogSearch | None = None
        self._collapsed: CollapsedLines | None = None
        self._anchor = 0
        """Number of the line at the top of the window, while new lines are not followed."""
        self._prefix_width = 0
        self._seen = 0

    @property
    def cause(self) -> RootCauseRow | None:
        """Root cause of the job's failure; None until a rank has failed."""
        job = self.ui.view.job() if self.ui.view is not None else None
        return job.root_cause if job is not None else None

    @property
    def num_rows(self) -> int:
        if self.shows_traceback:
            return len(self.lines)
        return len(self.ui.logs) if self._listed is None else len(self._listed)

    @property
    def selected_rank(self) -> int | None:
        return self._picked.rank if self._picked is not None and self._picked.rank >= 0 else None

    @property
    def copied(self) -> tuple[str, str] | None:
        if self.shows_traceback:
            return "the traceback", "\n".join(self._traceback)
        picked = self._picked
        return super().copied if picked is None else ("a log line", f"{prefix(picked)} {picked.text}")

    def row(self, index: int) -> Line:
        if self.shows_traceback:
            return self.lines[index]
        number = self._number(index)
        stored = self.ui.logs.line(number)
        spans = [term.pattern.span(stored.text) for term in self.filter.texts if not term.is_inverse]
        found = next(filter(None, spans), None)
        line = log_line(self.look, stored, self._prefix_width, self.side, found, self._who(index))
        return self.pointed(line) if number == self.marked else line

    def collapse(self) -> None:
        """Show lines that several ranks print alike as one, or every line again."""
        self.is_collapsing = not self.is_collapsing
        self.show_traceback(is_wanted=False)
        self.redraw()

    def show_traceback(self, *, is_wanted: bool) -> None:
        """Show the traceback of the root cause, or the lines again where they were."""
        if is_wanted == self.shows_traceback:
            return
        self.shows_traceback, self.side, self.top = is_wanted, 0, 0
        self.redraw()

    def build(self) -> None:
        """Stay at the latest line, or at the line that the user reads."""
        cause = self.cause
        self.shows_traceback &= cause is not None
        self.head = [] if cause is None else self._cause_lines(cause)
        if cause is not None and self.shows_traceback:
            self.lines = self._traceback_lines(cause)
            return
        if self._logs is not self.ui.logs:  # the replay has gone back: its lines are numbered again
            self._logs, self.is_following, self.marked = self.ui.logs, True, None
        self._look_for_lines()
        self._collapse_lines()
        place = len(self.head)
        self.head.append(self.line())
        is_unfiltered = not self.filter and not self.is_problems_only
        if not len(self.ui.logs) or (is_unfiltered and not self.num_rows and not self._num_unsearched):
            self.head.append(self.line().put(f" {self.ui.no_lines_text}", self.look.palette.muted))
        if self.is_following:
            self.top = self._last_top
            self._seen = self.ui.logs.end
        else:
            self.top = min(self._place_of(self._anchor), self._last_top)
        widths = prefix_width(self._window()), text_width(map(self._who, self._shown()))
        self._prefix_width = max(self._prefix_width, *widths)
        self.head[place] = self._title()

    def move(self, rows: int) -> None:
        """Scroll; at the last line, follow again."""
        self.scroll_rows(rows)

    def scroll_rows(self, rows: int) -> None:
        """Scroll; at the last line, follow again."""
        self.top = max(0, min(self._last_top, self.top + rows))
        if not self.shows_traceback:
            self.is_following = self.top == self._last_top and (rows >= 0 or self._last_top == 0)
            self._anchor = self._number(self.top) if self.num_rows else 0
        self.redraw()

    def sideways(self, cells: int) -> None:
        furthest = max(0, self._num_hidden + SPARE)
        self.side = max(0, min(furthest if cells > 0 else self.side, self.side + cells * SIDE_STEP))
        self.redraw()

    @property
    def _num_hidden(self) -> int:
        """Cells of the longest line in the window that have no room in it."""
        texts = self._traceback if self.shows_traceback else [stored.text for stored in self._window()]
        longest = max(map(cell_len, texts), default=0)
        return longest - (self.size.width - (2 if self.shows_traceback else self._prefix_width + 5))

    def to_error(self, direction: int) -> bool:
        """Go to the next line at level error (1) or the previous one (-1); return whether there is one.

        While the latest lines are followed, both directions go to the latest error.
        """
        direction = -1 if self.is_following else direction
        errors = self._shown_errors()
        place = int(np.searchsorted(errors, self._anchor_of_errors(direction))) - (direction < 0)
        if not 0 <= place < len(errors):
            return False
        number = int(errors[place])
        self.show_traceback(is_wanted=False)
        self.is_following, self.marked = False, number
        above = max(0, self._place_of(number) - self.body_height // 3)
        self._anchor = self._number(above)
        self.redraw()
        return True

    def pick(self, index: int, x: int) -> bool:  # noqa: ARG002 (of a grid)
        self.marked = None if self.shows_traceback else self._number(index)
        self.redraw()
        return True

    @property
    def _picked(self) -> StoredLine | None:
        """Marked line when it is in the window, else the last line of the window."""
        if self.shows_traceback or not self.num_rows:
            return None
        window = [self._number(index) for index in self._shown()]
        return self.ui.logs.line(self.marked if self.marked in window else window[-1]) if window else None

    def _anchor_of_errors(self, direction: int) -> int:
        """Return the line from which to search the next error: after the marked line, when it is in the window."""
        if self.is_following:
            return self.ui.logs.end
        shown = self._shown()
        first, last = (self._number(shown[0]), self._number(shown[-1])) if shown else (0, 0)
        if self.marked is not None and first <= self.marked <= last:
            return self.marked + (direction > 0)
        return first if direction > 0 else last + 1

    def _shown_errors(self) -> NDArray[np.int64]:
        """Return the numbers of the rows at level error, the oldest first."""
        errors = self.ui.errors.numbers
        if self._listed is None:
            return errors[errors >= self.ui.logs.first]
        return np.intersect1d(errors, self._listed.numbers, assume_unique=True)

    def _look_for_lines(self) -> None:
        """Search matching lines for a frame's share of time, when a filter is set."""
        view = self.ui.view
        verdicts = view.verdicts() if view is not None and self.is_problems_only else []
        culprits = frozenset(rank for verdict in verdicts for rank in verdict.culprits)
        wish = LineWish(self.filter, self.is_problems_only, culprits, self.ui.job_of_logs)
        if not wish:
            self._matches = None
            return
        if self._matches is None or self._matches.wish != wish or self._matches.logs is not self.ui.logs:
            self._matches = LogSearch(wish, self.ui.logs)
        self.ui.search(self._matches)

    def _collapse_lines(self) -> None:
        """Collapse some more lines; starts once all matches have been found."""
        logs, matches = self.ui.logs, self._matches
        if not self.is_collapsing or (matches is not None and not matches.has_all_old):
            self._collapsed = None
            return
        if self._collapsed is None or self._collapsed.logs is not logs or self._collapsed.matches is not matches:
            self._collapsed = CollapsedLines(logs, matches)
        self.ui.search(self._collapsed)

    @property
    def _listed(self) -> LogSearch | CollapsedLines | None:
        """Source of the rows; None when every line is a row."""
        return self._collapsed if self._collapsed is not None else self._matches

    @property
    def _num_unsearched(self) -> int:
        return 0 if self._matches is None else self._matches.num_unsearched

    def _who(self, place: int) -> str:
        """Return the prefix of a row of several ranks; empty for other rows."""
        ranks = self._collapsed.ranks(place) if self._collapsed is not None else ()
        return ranks_text(sorted(ranks)) if len(ranks) > 1 else ""

    def _number(self, place: int) -> int:
        return self.ui.logs.first + place if self._listed is None else self._listed.number(place)

    def _place_of(self, number: int) -> int:
        return max(0, number - self.ui.logs.first) if self._listed is None else self._listed.place_of(number)

    def _shown(self) -> range:
        return range(self.top, min(self.num_rows, self.top + self.body_height))

    def _window(self) -> list[StoredLine]:
        return [self.ui.logs.line(self._number(index)) for index in self._shown()]

    @property
    def _traceback(self) -> list[str]:
        cause = self.cause
        if cause is None:
            return []
        return cause.traceback or (cause.text.split("; ") if _is_hang(cause) else ["it left no traceback"])

    def _traceback_lines(self, cause: RootCauseRow) -> list[Line]:
        palette, lines = self.look.palette, []
        kind = cause.exception.partition(": ")[0]
        for text in self._traceback:
            style = palette.critical if kind and text.lstrip(" |+").startswith(kind) else palette.ink
            lines.append(self.line().put(" ").put(shifted(text, self.side) if self.side else text, style))
        return lines

    def _cause_lines(self, cause: RootCauseRow) -> list[Line]:
        """Return the failed rank and its place, the key for the traceback, and the exception."""
        palette, width = self.look.palette, self.size.width
        hint = self.ui.keymap.hint("root_cause", "log lines" if self.shows_traceback else "traceback")
        if self.shows_traceback and not self.side and self._num_hidden > 0:
            hint = "   ".join(filter(None, (self.ui.keymap.hint("right", LONG_LINES), hint)))
        who = f"launcher on {cause.node}" if cause.rank is None else f"rank {cause.rank} on {cause.node}"
        heading = self.line().put(" ROOT CAUSE  ", palette.heading)
        about = f"{who}, {cause.where}" if cause.where else who
        if cause.is_consequence:
            about = f"not known; {who} was the first to lose another"
        room = max(0, width - heading.width - len(hint) - 3)
        heading.cell(about, min(room, cell_len(self.look.shown(about))), palette.heading)
        heading.pad(width - len(hint) - 1, palette.heading).put(hint, palette.heading)
        end = cause.text if _is_hang(cause) and not self.shows_traceback else cause.end
        what = f"{cause.exception} (then {cause.outer})" if cause.outer else cause.exception or end
        return [heading, self.line().put(" ").cell(what, width - 1, palette.critical)]

    def _title(self) -> Line:
        palette, logs = self.look.palette, self.ui.logs
        shown = "" if self._listed is None else f"{self.num_rows:,} of "
        num_lines = len(logs)
        if self._collapsed is not None and self._collapsed.num_lines < num_lines:
            shown, num_lines = f"{shown}the latest ", self._collapsed.num_lines
        line = self.line().put(f" LOGS  {shown}{num_lines:,} lines", palette.heading)
        if logs.first and self._matches is None:
            line.put(f", {logs.first:,} older dropped", palette.heading)
        if self.ui.job_of_logs:
            line.put(f", those of job {clean_name(self.ui.job_of_logs)}", palette.heading)
        self.put_wish(line)
        if num_unsearched := self._num_unsearched:
            line.put(f"  {num_unsearched:,} not searched yet", palette.heading)
        if self.is_collapsing:
            each = self.ui.keymap.hint("collapse", "each line", head="  ")
            line.put(each if self._collapsed is not None else "  not collapsed yet", palette.heading)
        if self.side:
            line.put(f"  {self.look.glyphs.arrow} from column {self.side}", palette.heading)
        unseen = logs.end - self._seen
        follows = f"{key} follows" if (key := self.ui.keymap.first("last")) else "standing still"
        state = "following" if self.is_following else f"{unseen:,} new below, {follows}" if unseen else follows
        if num_errors := len(self.ui.errors):
            key = self.ui.keymap.first("next_error")
            errors = f"{num_errors:,} error{'' if num_errors == 1 else 's'}{': ' if key else ''}{key}   "
            state = errors + state if line.width + len(errors + state) + 2 < self.size.width else state
        if not self.side and self._num_hidden > 0 and (rest := self.ui.keymap.hint("right", LONG_LINES, head="  ")):
            line.put(rest if line.width + len(rest + state) + 2 < self.size.width else "", palette.heading)
        line.pad(self.size.width - len(state) - 1, palette.heading).put(state, palette.heading)
        return line


def _is_hang(cause: RootCauseRow) -> bool:
    """Return whether a verdict's sentence is the cause, and no process's end: `kept the others waiting`."""
    return cause.end not in cause.text
