"""Whether the steps in a rank's lines are the steps that it counts. Pure.

The number in "step 20 loss 0.63" may be a step of the job, of an epoch, since a checkpoint, or a micro-batch. A line is
read some tenths of a second after it was printed, and the count is as old: the two are compared over a time.

A line agrees if its step lies within what the rank has counted in the last `LAG_S`, or as much ahead of the latest
count. A step is taken once lines have agreed for `TRUSTED_S` and none has gone back. Whatever the number means, what is
taken is thus at most the steps of about twice `LAG_S` off. A step that restarts with each epoch is not taken from
`LAG_S` behind the first epoch on.
"""

from __future__ import annotations

from collections import deque

LAG_S = 2.0
"""Seconds between a line and the reading of it, at most: ten reads of the files, on a machine that is busy."""
TRUSTED_S = 2 * LAG_S
"""Seconds for which lines agree before a step is taken: an epoch of less time goes back within it."""
MIN_LINES = 3
"""Lines with a new step that agree before a step is taken."""
AHEAD = 2
"""Steps of a line beyond the count: it is printed before its optimizer step, and the report before was made earlier."""


class LineSteps:
    """The steps of one rank: counted, and in its lines."""

    def __init__(self) -> None:
        self._counted: deque[tuple[float, int]] = deque()
        """When the rank had counted how many steps, oldest first: the first is the latest that is `LAG_S` old."""
        self._line_step = -1
        self._num_agreed = 0
        self._agreed_since_s = 0.0

    def count(self, step: int, now_s: float) -> None:
        """Take the step that the rank reports; a count that goes back is a restart."""
        if self._counted and step < self._counted[-1][1]:
            self._counted.clear()
            self._num_agreed, self._line_step = 0, -1
        self._counted.append((now_s, step))
        self._forget(now_s)

    def own_step(self, line_step: int | None, now_s: float) -> int | None:
        """Take the step in the line that was read last; return it if it is the rank's own, as far as lines show."""
        before, self._line_step = self._line_step, -1 if line_step is None else line_step
        if line_step is None or line_step < before or not self._agrees(line_step, now_s):
            self._num_agreed = 0
            return None
        if not self._num_agreed:
            self._agreed_since_s = now_s
        self._num_agreed += line_step > before
        is_trusted = self._num_agreed >= MIN_LINES and now_s - self._agreed_since_s >= TRUSTED_S
        return line_step if is_trusted else None

    def _agrees(self, line_step: int, now_s: float) -> bool:
        self._forget(now_s)
        if not self._counted or self._counted[0][0] > now_s - LAG_S:
            return False
        first, latest = self._counted[0][1], self._counted[-1][1]
        return first - 1 <= line_step <= latest + (latest - first) + AHEAD

    def _forget(self, now_s: float) -> None:
        while len(self._counted) > 1 and self._counted[1][0] <= now_s - LAG_S:
            self._counted.popleft()
