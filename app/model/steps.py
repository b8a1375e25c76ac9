"""Steps of the ranks, though their reports are of different moments and come late at times.

Each report carries how long the node has known the process, and so its moment by the node's clock, however long it was
under way.

`StepRate` is how many steps a second a rank makes.

`StepsTogether` has the steps of all ranks as of one moment. Ranks that train together are at most one step apart, and
a fast job makes several steps between two reports of a rank: the latest steps reported, side by side, would show an
order of the ranks that never was. So each rank reports when its latest steps ended, and is shown as it was when the
least current of the reports was made.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from agent.wire.digest import IS_ENDING, NO_AGE_MS, NUM_AGES
from app.model.rank_batch import SECOND

if TYPE_CHECKING:
    from numpy.typing import NDArray

HISTORY_S = 5.0
"""Seconds that the rate is taken over: enough to smooth a slow epoch's end."""
MIN_MARKS = 4
"""Least number of steps that the rate is taken over, where steps take long."""
MIN_SPAN_S = 1.0
"""Least seconds that the rate is taken over: a step is dated to half a second."""
STILL_FACTOR = 3.0
"""A rank stands when it takes this many times as long for a step as for those before."""


class StepRate:
    """Step rate of one rank, from a sample of its step twice a second."""

    def __init__(self, step_s: float | None = None) -> None:
        """Begin a history; `step_s` is the step time of another rank of the job, None where it is not known."""
        self._step_s = step_s
        """Recent step time in seconds, also from before a pause."""
        self._clock_s = self._moved_s = 0.0
        """Clock of the latest sample, and of the latest step (of the first sample before any step)."""
        self._step: int | None = None
        self._begun = (0.0, 0)
        """The first sample."""
        self._marks: deque[tuple[float, int]] = deque()
        """Steps and when each was seen first, oldest first."""
        self._shortest_step_s = inf

    def put(self, clock_s: float, step: int) -> None:
        """Take the latest step, at `clock_s` of the node's clock; one that goes back begins a new history."""
        if self._step is None or clock_s < self._clock_s or step < self._step:
            self._marks.clear()
            self._moved_s, self._begun = clock_s, (clock_s, step)
        elif step > self._step:
            if self.per_s() == 0.0:
                self._marks.clear()  # the pace from before it stood does not apply from now on
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
        """Recent step time, also from before a pause; a rough one after few steps; None before any."""
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
        """Return whether the rank is further ahead of another than a report of up to `age_s` can explain."""
        if self._step is None or self.step_s is None:
            return False
        return (self._step - step - 1) * min(self._shortest_step_s, self.step_s) > age_s

    @property
    def _span_s(self) -> float:
        return self._marks[-1][0] - self._marks[0][0] if self._marks else 0.0

    def validate(self) -> None:
        marks = list(self._marks)
        assert all(before[0] <= after[0] for before, after in pairwise(marks))
        assert all(before[1] < after[1] for before, after in pairwise(marks))


APART_S = 2.0
"""Seconds between the latest and the oldest of the reports that are compared; an older one shows its rank's last known
step."""
FROZEN_APART_S = 0.6
"""The same for a frozen rank: two reports of a rank are half as far apart."""
DRIFT_FRAC = 0.003
"""Seconds a second by which a node's clock may fall behind the console's: a report that was under way for long then
counts for little against quick ones, and a node whose clock stood is followed again."""


class StepsTogether:
    """When the ranks' latest steps ended, by the console's clock."""

    def __init__(self, world_size: int) -> None:
        self._gap_s = np.full(world_size, np.nan)
        """Console's clock minus the time for which the node has known the process, by the quickest reports."""
        self._received_s, self._seen_s = np.zeros((2, world_size))
        self._made_s = np.full(world_size, np.nan)
        """When each rank's latest report was made; NaN before the first."""
        self._ended_s = np.full((world_size, NUM_AGES), np.nan)
        """When its latest steps ended, the latest first; NaN is not known."""
        self._stride = np.ones(world_size, np.int64)
        self._has_ended = np.zeros(world_size, np.bool_)
        """Whether its report is its last: its step is final."""

    def put(
        self,
        ranks: NDArray[np.int64],
        records: NDArray[np.void],
        at_s: NDArray[np.float64],
        is_new: NDArray[np.bool_],
    ) -> None:
        """Take records of ranks (`agent.wire.digest`), and when each came; `is_new` are those with a new report."""
        seen_s = records["seconds"][:, SECOND["seen_s"]]
        gap_s, known_s = at_s - seen_s, self._gap_s[ranks] + DRIFT_FRAC * (at_s - self._received_s[ranks])
        self._gap_s[ranks] = np.where(seen_s < self._seen_s[ranks], gap_s, np.fmin(gap_s, known_s))
        self._received_s[ranks], self._seen_s[ranks] = at_s, seen_s
        new = ranks[is_new]
        self._made_s[new] = self._gap_s[new] + seen_s[is_new] - records["seconds"][is_new, SECOND["report_age_s"]]
        self._has_ended[new] = records["flags"][is_new] & IS_ENDING != 0
        self._ended_s[new] = np.nan

    def put_ages(self, ranks: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Take how long ago steps ended (`agent.wire.digest.PROGRESS_FIELDS`), of ranks whose report was new."""
        ages_ms = records["ages_ms"]
        ended_s = self._made_s[ranks, np.newaxis] - ages_ms / 1e3
        self._ended_s[ranks] = np.where(ages_ms == NO_AGE_MS, np.nan, ended_s)
        self._stride[ranks] = records["stride"]

    def ages_s(self, ranks: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how long before each rank's report its latest steps ended, shape (ranks, `NUM_AGES`), NaN unknown."""
        ages_s: NDArray[np.float64] = self._made_s[ranks, np.newaxis] - self._ended_s[ranks]
        return ages_s

    def at_one_moment(
        self, latest: NDArray[np.int64], is_frozen: NDArray[np.bool_], is_dead: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Return the ranks' steps when the least current report was made.

        Ranks whose report is their last one, or much older than the latest of all, keep their steps and hold nobody
        back.

        Args:
            latest: Latest reported steps; -1 is none.
            is_frozen: Which ranks are frozen.
            is_dead: Whose process has ended.
        """
        is_compared = ~np.isnan(self._made_s) & ~self._has_ended & ~is_dead & (latest >= 0)
        if not is_compared.any():
            return latest
        is_compared &= self._made_s >= self._made_s[is_compared].max() - np.where(is_frozen, FROZEN_APART_S, APART_S)
        moment_s = self._made_s[is_compared].min()
        num_later = ((self._ended_s > moment_s) & is_compared[:, np.newaxis]).sum(axis=1)
        return np.where(num_later > 0, np.maximum(latest - num_later * self._stride, 0), latest)
