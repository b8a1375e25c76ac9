"""The log lines that are wanted, found a piece at a time: new ones as they come, old ones from the newest back.

A line that is wanted stays so, and its number never changes: nothing is looked at twice.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np

from app.filters.lines import lines_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.filters.lines import LineWish
    from app.tui.log_store import LogStore

FIRST_PIECE_BYTES = 4096
MAX_PIECE_BYTES = 2**20
PIECE_S = 0.003
"""Of RE2 that has given up its automaton: it takes up to 6 us a byte then, else less than 1 ns. What a piece takes is
known only afterwards, so that sizes are felt for."""


class LogMatches:
    """Numbers of the wanted lines that are kept, the oldest first.

    Attributes:
        wish: What is wanted.
        logs: Where it is looked for.
        piece_bytes: How much is looked at in one go, give or take a line.
    """

    def __init__(self, wish: LineWish, logs: LogStore) -> None:
        self.wish = wish
        self.logs = logs
        self.piece_bytes = FIRST_PIECE_BYTES
        self._older: list[int] = []
        """Found on the way back, the newest first."""
        self._newer: list[int] = []
        self._low = self._high = logs.end
        """What lies between has been looked at."""

    def __len__(self) -> int:
        return len(self._older) + len(self._newer)

    @property
    def has_all_old(self) -> bool:
        """Whether nothing older is still to be looked at."""
        return self._low <= self.logs.first

    @property
    def num_unsearched(self) -> int:
        """Lines that have not been looked at yet."""
        return max(0, self._low - self.logs.first) + self.logs.end - max(self._high, self.logs.first)

    def number(self, place: int) -> int:
        """Return the number of the line at a place."""
        return self._older[-1 - place] if place < len(self._older) else self._newer[place - len(self._older)]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """The numbers of all of them."""
        return np.array([*reversed(self._older), *self._newer], np.int64)

    def place_of(self, number: int) -> int:
        """Return the place of the first wanted line that is not before a line."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.number(middle) < number:
                low = middle + 1
            else:
                high = middle
        return low

    def forget_dropped(self) -> None:
        """Let go of lines that are no longer kept."""
        first = self.logs.first
        while self._older and self._older[-1] < first:
            self._older.pop()
        if not self._older:
            del self._newer[: bisect_left(self._newer, first)]
        self._low, self._high = max(self._low, first), max(self._high, first)

    def search(self) -> bool:
        """Look at one more piece: of what is new, else of what is old; return whether there was any."""
        self.forget_dropped()
        logs = self.logs
        if self._high < logs.end:
            piece = logs.piece(self._high, self.piece_bytes)
            self._newer += (lines_of(piece, self.wish) + self._high).tolist()
            self._high += len(piece.ends)
            return True
        if self.has_all_old:
            return False
        self._look_back()
        return True

    def _look_back(self) -> None:
        """Look at the piece that ends where what has been looked at begins."""
        piece = self.logs.piece_before(self._low, self.piece_bytes)
        self._take_old(self._low - len(piece.ends), lines_of(piece, self.wish))

    def _take_old(self, low: int, places: NDArray[np.int64]) -> None:
        """Take what was found in the piece that begins at `low`, up to where what has been looked at begins.

        Lines of it that have been dropped since then are left out.
        """
        numbers = places + low
        self._low = max(low, self.logs.first)
        self._older += numbers[numbers >= self._low][::-1].tolist()

    def pace(self, took_s: float) -> None:
        """Take how long the last go has taken: the next one is larger, or smaller."""
        if took_s < PIECE_S:
            self.piece_bytes = min(MAX_PIECE_BYTES, 2 * self.piece_bytes)
        elif took_s > 2 * PIECE_S:
            self.piece_bytes = max(1, self.piece_bytes // 2)
