"""Log lines of which those that several ranks print alike, and close together, are one row: `ranks 1-7`.

Rows keep their order and their places: a line that repeats one of the last rows joins it, whoever printed it meanwhile.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.tui.log_matches import LogMatches
    from app.tui.log_store import LogStore, StoredLine

MAX_LINES = 50_000
"""Lines back from the newest that are collapsed: reading one takes 2 us."""
NEAR_ROWS = 500
"""A line joins a row that is at most so far back: ranks print the same within moments."""
PIECE_LINES = 1000
_OWN_PREFIX = re.compile(r"\[(?:rank|default)\d+\]: ?")
"""What torch and torchrun put before a rank's lines, which tells them apart."""


class CollapsedLines:
    """Rows by the number of their first line, the oldest first.

    Attributes:
        logs: The lines.
        matches: Those of them that are wanted; None for all.
    """

    def __init__(self, logs: LogStore, matches: LogMatches | None) -> None:
        """Begin; of wanted lines, only once all old ones have been found."""
        self.logs = logs
        self.matches = matches
        self._numbers: list[int] = []
        self._ranks: list[set[int]] = []
        self._row_of: dict[tuple[str, bool], int] = {}
        """By text: how many rows there had ever been when it came, up to its own."""
        self._num_dropped = 0
        newest = logs.end if matches is None else len(matches)
        begin = logs.first if matches is None else 0
        oldest = max(begin, newest - MAX_LINES)
        self._next = oldest if matches is None or oldest >= newest else matches.number(oldest)
        self._oldest = logs.first if oldest == begin else self._next

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, place: int) -> int:
        """Return the number of the first line of a row."""
        return self._numbers[place]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of the first lines of all rows."""
        return np.array(self._numbers, np.int64)

    @property
    def num_lines(self) -> int:
        """How many of the newest lines are, where they are wanted, in rows."""
        return self.logs.end - max(self._oldest, self.logs.first)

    def place_of(self, number: int) -> int:
        """Return the place of the first row that does not begin before a line."""
        return bisect_left(self._numbers, number)

    def ranks(self, place: int) -> set[int]:
        """Return who has printed the line."""
        return self._ranks[place]

    def search(self) -> bool:
        """Take some more lines; return whether there were any."""
        self._forget_dropped()
        numbers = self._piece()
        for number in numbers:
            self._take(number, self.logs.line(number))
        if numbers:
            self._next = numbers[-1] + 1
        return bool(numbers)

    def pace(self, took_s: float) -> None:
        """Do nothing: what a line takes does not depend on what is looked for."""

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
