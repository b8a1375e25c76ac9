"""The log lines that match a filter, and a view that collapses lines that several ranks print alike.

`LogMatches` finds them in pieces: new lines as they come, old ones backwards from the latest. A match stays a match and
its number never changes: no line is searched twice.

`CollapsedLines` makes one row, `ranks 1-7`, of lines that several ranks print alike and close together. Rows keep their
order and their places: a line that repeats one of the last rows joins it, whichever ranks have printed in between.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from app.filters.lines import lines_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.filters.lines import LineWish
    from app.tui.logs.store import LogStore, StoredLine

FIRST_PIECE_BYTES = 4096
MAX_PIECE_BYTES = 2**20
PIECE_S = 0.003
"""Target seconds per piece. RE2 takes up to 6 us a byte when it has given up its automaton, else less than 1 ns. The
time of a piece is known only afterwards, so that its size is adjusted step by step."""


class LogMatches:
    """Numbers of the matching lines that are kept, the oldest first.

    Attributes:
        wish: What lines must match.
        logs: The lines.
        piece_bytes: Approximate bytes searched per call.
    """

    def __init__(self, wish: LineWish, logs: LogStore) -> None:
        self.wish = wish
        self.logs = logs
        self.piece_bytes = FIRST_PIECE_BYTES
        self._older: list[int] = []
        """Matches among old lines, the latest first."""
        self._newer: list[int] = []
        self._low = self._high = logs.end
        """Range of line numbers that has been searched."""

    def __len__(self) -> int:
        return len(self._older) + len(self._newer)

    @property
    def has_all_old(self) -> bool:
        """Whether all old lines have been searched."""
        return self._low <= self.logs.first

    @property
    def num_unsearched(self) -> int:
        """Number of lines that have not been searched yet."""
        return max(0, self._low - self.logs.first) + self.logs.end - max(self._high, self.logs.first)

    def number(self, place: int) -> int:
        return self._older[-1 - place] if place < len(self._older) else self._newer[place - len(self._older)]

    @property
    def numbers(self) -> NDArray[np.int64]:
        return np.array([*reversed(self._older), *self._newer], np.int64)

    def last(self, num_lines: int, first: int = 0) -> list[StoredLine]:
        """Return the latest matches, from a line on."""
        begin = max(self.place_of(first), len(self) - num_lines)
        return [self.logs.line(self.number(place)) for place in range(begin, len(self))]

    def place_of(self, number: int) -> int:
        """Return the place of the first match at or after a line."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.number(middle) < number:
                low = middle + 1
            else:
                high = middle
        return low

    def forget_dropped(self) -> None:
        """Forget lines that are no longer kept."""
        first = self.logs.first
        while self._older and self._older[-1] < first:
            self._older.pop()
        if not self._older:
            del self._newer[: bisect_left(self._newer, first)]
        self._low, self._high = max(self._low, first), max(self._high, first)

    def search(self) -> bool:
        """Search one more piece, new lines first; return whether there was any."""
        self.forget_dropped()
        logs = self.logs
        if self._high < logs.end:
            piece = logs.piece(self._high, self.piece_bytes)
            self._newer += (lines_of(piece, self.wish) + self._high).tolist()
            self._high += len(piece.ends)
            return True
        if self.has_all_old:
            return False
        self._search_before()
        return True

    def _search_before(self) -> None:
        """Search the piece just before the searched range."""
        piece = self.logs.piece_before(self._low, self.piece_bytes)
        self._take_old(self._low - len(piece.ends), lines_of(piece, self.wish))

    def _take_old(self, low: int, places: NDArray[np.int64]) -> None:
        """Add the matches of the piece that begins at `low` and ends where the searched range begins.

        Lines of it that have been dropped since are left out.
        """
        numbers = places + low
        self._low = max(low, self.logs.first)
        self._older += numbers[numbers >= self._low][::-1].tolist()

    def pace(self, took_s: float) -> None:
        """Adjust the size of the next piece to the time that the last one took."""
        if took_s < PIECE_S:
            self.piece_bytes = min(MAX_PIECE_BYTES, 2 * self.piece_bytes)
        elif took_s > 2 * PIECE_S:
            self.piece_bytes = max(1, self.piece_bytes // 2)


MAX_LINES = 50_000
"""Limit of latest lines that are collapsed: reading one takes 2 us."""
NEAR_ROWS = 500
"""Limit of rows between a line and the row that it joins: ranks print the same within moments."""
PIECE_LINES = 1000
_OWN_PREFIX = re.compile(r"\[(?:rank|default)\d+\]: ?")
"""Prefixes of torch and torchrun, by which the lines of ranks would differ."""


class CollapsedLines:
    """Collapsed rows, by the number of their first line, the oldest first.

    Attributes:
        logs: The lines.
        matches: The matching lines; None collapses all lines.
    """

    def __init__(self, logs: LogStore, matches: LogMatches | None) -> None:
        """Start collapsing; with `matches`, only once all old lines have been searched."""
        self.logs = logs
        self.matches = matches
        self._numbers: list[int] = []
        self._ranks: list[set[int]] = []
        self._row_of: dict[tuple[str, bool], int] = {}
        """Number of the row of each text, counted from the first row ever."""
        self._num_dropped = 0
        latest = logs.end if matches is None else len(matches)
        begin = logs.first if matches is None else 0
        oldest = max(begin, latest - MAX_LINES)
        self._next = oldest if matches is None or oldest >= latest else matches.number(oldest)
        self._oldest = logs.first if oldest == begin else self._next

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, place: int) -> int:
        """Return the number of the first line of a row."""
        return self._numbers[place]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Line numbers of the first lines of all rows."""
        return np.array(self._numbers, np.int64)

    @property
    def num_lines(self) -> int:
        """Number of latest lines that the rows cover."""
        return self.logs.end - max(self._oldest, self.logs.first)

    def place_of(self, number: int) -> int:
        """Return the place of the first row at or after a line."""
        return bisect_left(self._numbers, number)

    def ranks(self, place: int) -> set[int]:
        """Return the ranks that have printed the line."""
        return self._ranks[place]

    def search(self) -> bool:
        """Collapse some more lines; return whether there were any."""
        self._forget_dropped()
        numbers = self._piece()
        for number in numbers:
            self._take(number, self.logs.line(number))
        if numbers:
            self._next = numbers[-1] + 1
        return bool(numbers)

    def pace(self, took_s: float) -> None:
        """Do nothing: the time of a line does not depend on the filter."""

    def _piece(self) -> list[int]:
        first = max(self._next, self.logs.first)
        if self.matches is None:
            return list(range(first, min(self.logs.end, first + PIECE_LINES)))
        place = self.matches.place_of(first)
        return [self.matches.number(at) for at in range(place, min(len(self.matches), place + PIECE_LINES))]

    def _take(self, number: int, stored: StoredLine) -> None:
        key = (_OWN_PREFIX.sub("", stored.text, count=1), stored.is_stderr)
        row = self._row_of.get(key, -1) - self._num_dropped
        is_near = row >= max(0, len(self._numbers) - NEAR_ROWS)
        if is_near and stored.rank >= 0 and stored.rank not in self._ranks[row]:
            self._ranks[row].add(stored.rank)
            return
        if stored.rank >= 0:
            self._row_of[key] = self._num_dropped + len(self._numbers)
        self._numbers.append(number)
        self._ranks.append({stored.rank})
        if len(self._row_of) > 4 * NEAR_ROWS:
            near = self._num_dropped + len(self._numbers) - NEAR_ROWS
            self._row_of = {text: at for text, at in self._row_of.items() if at >= near}

    def _forget_dropped(self) -> None:
        num_gone = bisect_left(self._numbers, self.logs.first)
        del self._numbers[:num_gone], self._ranks[:num_gone]
        self._num_dropped += num_gone
