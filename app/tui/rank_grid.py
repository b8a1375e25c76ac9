"""A cell a rank: the states of thousands of ranks at one look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.diagnosis.rank_facts import STATES
from app.tui.drawing import Line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.tui.theme import Look

GRID_FROM = 256
"""Ranks from which a grid is what one wants to see first: more than fit as rows."""
GROUP = 8
"""Cells that stand together: the ranks of a usual node."""


class RankGrid:
    """Where the cells of some ranks stand in a window of some width, and how they look.

    Attributes:
        per_line: Cells of a line.
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
        """Lines of the whole grid."""
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
        """Return the place of the cell in a column of a line; None where there is none."""
        group, within = divmod(x - self._first_x, GROUP + 1)
        place = index * self.per_line + group * GROUP + within
        is_cell = x >= self._first_x and within < GROUP and group * GROUP < self.per_line
        return place if is_cell and place < len(self._ranks) else None

    def put_counts(self, line: Line, width: int) -> Line:
        """Add how many of the ranks are in which state, the rarest first, as far as there is room."""
        counts = np.bincount(self._states[self._ranks], minlength=len(STATES))
        for code in sorted(np.flatnonzero(counts).tolist(), key=lambda code: (counts[code], code)):
            state = STATES[code]
            text = f"{self._look.glyphs.states[state]} {counts[code]:,} {state}"
            if line.width + len(text) + 3 <= width:
                line.put("   ", self._look.palette.heading)
                line.put(text, self._look.state_style(state) + self._look.palette.raised)
        return line
