"""How many steps a second a rank makes, by its node's clock.

Reports are late at times: on a slow road, or where the console itself was stopped. How long the node has known the
process comes with each of them, so the rate does not depend on when they arrive.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf

HISTORY_S = 5.0
"""The rate is taken over this long: enough to smooth a slow epoch's end."""
MIN_MARKS = 4
"""Where steps take long, over as many of them."""
MIN_SPAN_S = 1.0
"""Less says little: when a step was done is known to half a second."""
STILL_FACTOR = 3.0
"""A rank that takes so many times as long for a step as for those before stands."""


class StepRate:
    """Fed with how far one rank has come, twice a second."""

    def __init__(self, step_s: float | None = None) -> None:
        """Begin a history; `step_s` is what a step has taken another rank of the job, None where nobody knows."""
        self._step_s = step_s
        """What a step has taken lately, also before a pause."""
        self._clock_s = self._moved_s = 0.0
        """Of the newest look, and of the newest step, or of the first look before there was one."""
        self._step: int | None = None
        self._begun = (0.0, 0)
        """The first look."""
        self._marks: deque[tuple[float, int]] = deque()
        """Steps and when each was seen first, oldest first."""
        self._shortest_step_s = inf

    def put(self, clock_s: float, step: int) -> None:
        """Take the newest step, at `clock_s` of the node's clock; one that goes back begins a new history."""
        if self._step is None or clock_s < self._clock_s or step < self._step:
            self._marks.clear()
            self._moved_s, self._begun = clock_s, (clock_s, step)
        elif step > self._step:
            if self.per_s() == 0.0:
                self._marks.clear()  # a pace from before it stood says nothing of the one from now on
            self._marks.append((clock_s, step))
            self._moved_s = clock_s
        self._clock_s, self._step = clock_s, step
        while len(self._marks) > MIN_MARKS and clock_s - self._marks[1][0] >= HISTORY_S:
            self._marks.popleft()
        if self._span_s >= MIN_SPAN_S:
            self._step_s = self._span_s / (self._marks[-1][1] - self._marks[0][1])
            self._shortest_step_s = min(self._shortest_step_s, self._step_s)

    @property
    def step_s(self) -> float | None:
        """Return what a step has taken lately, also before a pause; roughly, where there were few; None of none."""
        begun_s, first = self._begun
        done = 0 if self._step is None else self._step - first
        return self._step_s if self._step_s is not None or not done else (self._moved_s - begun_s) / done

    def per_s(self) -> float | None:
        """Return the steps a second, 0 while the rank stands; None before it is known."""
        step_s = self.step_s
        if step_s is None:
            return None
        stood_s = self._clock_s - self._moved_s
        if stood_s > max(HISTORY_S, STILL_FACTOR * step_s):
            return 0.0
        if self._span_s < MIN_SPAN_S:
            return None
        # A step that takes longer than the others did counts against the rate before it is done.
        return (self._marks[-1][1] - self._marks[0][1]) / (self._span_s + max(0.0, stood_s - step_s))

    def is_ahead_of(self, step: int, age_s: float) -> bool:
        """Return whether the rank is further than another whose report is up to `age_s` old can be as well."""
        if self._step is None or self.step_s is None:
            return False
        return (self._step - step - 1) * min(self._shortest_step_s, self.step_s) > age_s

    @property
    def _span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def validate(self) -> None:
        """State the invariants."""
        marks = list(self._marks)
        assert all(before[0] <= after[0] for before, after in pairwise(marks))
        assert all(before[1] < after[1] for before, after in pairwise(marks))
