"""The figures of a job over time and over its steps, in bounded memory.

`History` holds every second of the last minutes, coarser the longer ago, bounded for weeks. It is fed with every view
of the model, live or of a recording.

`Trend` holds a figure over the steps: when full, neighbours are merged into their mean.
"""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from app.recording.wait_history import MIN_WAIT_S, WaitHistory
from app.view.rows import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.view.rows import JobRow
    from app.view.view import View

BUCKET_S = 1.0
"""Seconds of the finest bucket; figures are sampled once in it: they change as seldom, or are smoothed over seconds."""
FACTOR = 4
NUM_LEVELS = 7
NUM_BUCKETS = 512
"""Number of buckets per level, each `FACTOR` times as long as those of the level before: 8 min of seconds, 34 min of
4 s, ... 24 days of 68 min. A figure takes 43 kB."""
MAX_SERIES = 16
MAX_JOBS = 4
"""Limit of jobs whose history is kept: a console shows one at a time, and may come back to another."""
MAX_ATTEMPTS = 256
_MAX_VALUE = 3e38
"""Largest value that is stored: a float of 32 bits holds no more."""
_WIDTHS_S = BUCKET_S * FACTOR ** np.arange(NUM_LEVELS)


class Window(NamedTuple):
    """A figure over a span of time.

    Attributes:
        at_s: Moments, growing.
        mean: Mean of the figure about each of them; NaN is not known, and so below.
        low: The lowest.
        high: The highest.
    """

    at_s: NDArray[np.float64]
    mean: NDArray[np.float32]
    low: NDArray[np.float32]
    high: NDArray[np.float32]


class Rings:
    """Several figures over the same time, each in a ring of buckets per level."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._latest = np.full(NUM_LEVELS, -1, np.int64)
        """Number of the bucket that is being filled, by level."""
        self._places: dict[str, int] = {}
        self._values = np.empty((0, 3, NUM_LEVELS, NUM_BUCKETS), np.float32)
        """Mean, lowest and highest of each figure, level and bucket."""
        self._counts = np.empty((0, NUM_LEVELS), np.int32)
        """Number of known values in the bucket that is being filled."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory used."""
        return self._values.nbytes + self._counts.nbytes

    def is_due(self, now_s: float) -> bool:
        """Return whether the finest bucket of this moment holds nothing yet."""
        return self._begin_s is None or int((now_s - self._begin_s) / BUCKET_S) > self._latest[0]

    def put(self, now_s: float, figures: Sequence[Figure]) -> None:
        """Add figures; new ones beyond `MAX_SERIES` are not kept."""
        if self._begin_s is None:
            self._begin_s = now_s
        for figure in figures:
            if figure.key not in self._places and len(self._places) < MAX_SERIES:
                self._add(figure.key)
        values = np.full((len(self._places), 3, 1), np.nan, np.float32)
        for figure in figures:
            place = self._places.get(figure.key)
            if place is not None:
                values[place, :, 0] = [_storable(value) for value in (figure.value, figure.low, figure.high)]
        numbers = ((now_s - self._begin_s) / _WIDTHS_S).astype(np.int64)
        for level in np.flatnonzero(numbers > self._latest).tolist():
            first = max(self._latest[level] + 1, numbers[level] - NUM_BUCKETS + 1)
            self._values[:, :, level, np.arange(first, numbers[level] + 1) % NUM_BUCKETS] = np.nan
            self._counts[:, level] = 0
        self._latest = numbers
        self._fold(values)

    def go_on_with(self, newer: Rings, after_s: float, now_s: float) -> None:
        """Take the figures of another one for each of its last seconds after a moment; here nothing is that late.

        The bucket that it is filling reaches beyond its `now_s`: its figures were sampled until then.
        """
        if newer._begin_s is None:
            return
        last = int(newer._latest[0])
        for number in range(max(0, last - NUM_BUCKETS + 1), last + 1):
            at_s = min(newer._begin_s + (number + 0.5) * BUCKET_S, now_s)
            if at_s > after_s:
                held = newer._values[:, :, 0, number % NUM_BUCKETS].tolist()
                self.put(at_s, [Figure(key, *held[place]) for key, place in newer._places.items()])

    def window(self, key: str, begin_s: float, end_s: float) -> Window:
        """Return a figure between two moments, as finely as it is kept so far back."""
        place, begun_s = self._places.get(key), self._begin_s
        if place is None or begun_s is None:
            nothing = np.empty(0, np.float32)
            return Window(np.empty(0), nothing, nothing, nothing)
        firsts = (max(0.0, begin_s - begun_s) / _WIDTHS_S).astype(np.int64)
        oldest = self._latest - NUM_BUCKETS + 1
        level = min(int((firsts < oldest).sum()), NUM_LEVELS - 1)
        width_s = float(_WIDTHS_S[level])
        numbers = np.arange(max(0, oldest[level], firsts[level]), self._latest[level] + 1)
        # The bucket that is being filled reaches beyond the end.
        at_s = np.minimum(begun_s + (numbers + 0.5) * width_s, end_s)
        is_within = at_s >= begin_s
        kept = self._values[place, :, level, numbers[is_within] % NUM_BUCKETS]
        return Window(at_s[is_within], kept[:, 0], kept[:, 1], kept[:, 2])

    def _add(self, key: str) -> None:
        self._places[key] = len(self._places)
        self._values = np.concatenate([self._values, np.full((1, *self._values.shape[1:]), np.nan, np.float32)])
        self._counts = np.concatenate([self._counts, np.zeros((1, NUM_LEVELS), np.int32)])

    def _fold(self, values: NDArray[np.float32]) -> None:
        """Add figures to the latest bucket of every level."""
        levels, buckets = np.arange(NUM_LEVELS), self._latest % NUM_BUCKETS
        kept = self._values[:, :, levels, buckets]
        is_known = ~np.isnan(values[:, 0])
        self._counts += is_known
        mean = np.where(np.isnan(kept[:, 0]), values[:, 0], kept[:, 0])
        # Halves: of two values at the ends of what is storable the difference is not.
        mean += np.where(is_known, 2 * ((values[:, 0] / 2 - mean / 2) / np.maximum(self._counts, 1)), np.float32(0.0))
        low, high = np.fmin(kept[:, 1], values[:, 1]), np.fmax(kept[:, 2], values[:, 2])
        self._values[:, :, levels, buckets] = np.stack([mean, low, high], axis=1)


class JobHistory:
    """One job, over its attempts.

    Attributes:
        loss: Mean loss over the steps of the latest attempt that has one.
        is_loss_dated: Whether the latest loss is of its very step, not only of about the job's step when it was seen.
        waits: Waits that are over.
        figures: Latest figures.
        begun_s: When the job was seen first.
        now_s: When it was sampled last; its end, once it is over.
        is_over: Whether it has ended.
        attempts: When each attempt that was seen beginning began, and its number.
        num_looks: Count of changes that can be shown.
    """

    def __init__(self, min_wait_s: float = MIN_WAIT_S) -> None:
        self.loss, self.is_loss_dated = Trend(), True
        self._loss_step, self._loss_after, self._loss_attempt = -1, -1, -1
        self._is_dated, self._loss = True, math.nan
        self.waits = WaitHistory(min_wait_s)
        self.figures: Sequence[Figure] = ()
        self.begun_s: float | None = None
        self.now_s = 0.0
        self.is_over = False
        self.attempts: deque[tuple[float, int]] = deque(maxlen=MAX_ATTEMPTS)
        self.num_looks = 0
        self._attempt: int | None = None
        self._shown_attempt = -1
        self._rings = Rings()

    @property
    def loss_curve(self) -> Sequence[tuple[float, float]]:
        """Points (step, loss) of the attempt that is shown; none where the latest loss is of an earlier attempt."""
        return self.loss.curve if self._loss_attempt == self._shown_attempt else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of memory used by the figures."""
        return self._rings.num_bytes

    def observe(self, view: View, job: JobRow) -> None:
        """Sample the job once more, and keep what is new."""
        self.waits.observe(view, job.job_id)
        self._shown_attempt = job.attempt
        step = job.step if job.loss_step is None else job.loss_step
        if step is not None and job.loss is not None:
            self._put_loss(step, job.loss, job)
        figures = view.figures() if self._rings.is_due(view.now_s) else None
        if figures is None:
            return
        self.num_looks += bool(figures) or not self.is_over
        self.is_over = not figures
        if self.is_over:
            return
        if self.begun_s is None:
            self.begun_s = view.now_s
        if self._attempt is not None and job.attempt != self._attempt:
            self.attempts.append((view.now_s, job.attempt))
        self._attempt, self.now_s, self.figures = job.attempt, view.now_s, figures
        self._rings.put(view.now_s, figures)

    def _put_loss(self, step: int, loss: float, job: JobRow) -> None:
        """Add a loss; after a change from about right steps to exact ones, or back, only once it is past the others."""
        is_dated = job.loss_step is not None
        if job.attempt != self._loss_attempt:
            self._loss_attempt, self._loss_after = job.attempt, -1
        elif not is_dated and loss == self._loss:
            return  # of about the step at which it came, not of those at which it is still the latest
        elif is_dated != self._is_dated:
            self._loss_after = self._loss_step
        elif step < self._loss_step:
            self._loss_after = -1  # the steps restart
        self._is_dated, self._loss, self._loss_step = is_dated, loss, step
        if step > self._loss_after:
            self.loss.add(step, loss)
            self.is_loss_dated = is_dated

    def reach_back(self, past: JobHistory, end_s: float) -> None:
        """Take the job's history up to a moment; of what came later, what was seen here prevails."""
        self.waits.reach_back(past.waits)
        if past.begun_s is None:
            return
        if self._attempt in (None, past._attempt) and self._loss_attempt <= past._loss_attempt:
            past.loss.go_on_with(self.loss)
            self.loss, self._loss_attempt = past.loss, past._loss_attempt
        if self.begun_s is None:
            self.figures, self._attempt = past.figures, past._attempt
        self.begun_s = past.begun_s
        later = (mark for mark in self.attempts if mark[0] > end_s)
        self.attempts = deque((*past.attempts, *later), maxlen=MAX_ATTEMPTS)
        past._rings.go_on_with(self._rings, end_s, self.now_s)
        self._rings, self.now_s = past._rings, max(self.now_s, past.now_s)
        self.num_looks += 1

    def window(self, key: str, begin_s: float) -> Window:
        """Return a figure from a moment until now."""
        return self._rings.window(key, begin_s, self.now_s)


class History:
    """The jobs that one session has shown, or a recording up to one moment.

    Attributes:
        shown: The job that is shown; None while there is none.
    """

    def __init__(self, min_wait_s: float = MIN_WAIT_S) -> None:
        """`min_wait_s` is as for `WaitHistory`."""
        self.shown: JobHistory | None = None
        self._min_wait_s = min_wait_s
        self._jobs: dict[str, JobHistory] = {}
        """Histories by job; the one that was shown last is the last."""

    def still(self) -> History:
        """Return a copy of the history of the job that is shown, to which nothing will be added."""
        copied = History()
        copied.shown = deepcopy(self.shown)
        return copied

    def observe(self, view: View) -> None:
        """Sample the view once more, and keep what is new of the job that is shown."""
        job = view.job()
        if job is None:
            self.shown = None
            return
        self.shown = self._jobs.pop(job.job_id, None) or JobHistory(self._min_wait_s)
        self._jobs[job.job_id] = self.shown
        if len(self._jobs) > MAX_JOBS:
            del self._jobs[next(iter(self._jobs))]
        self.shown.observe(view, job)

    def reach_back(self, past: History, end_s: float) -> None:
        """Take the past of the jobs that were shown here, up to a moment; `past` is used up."""
        for job_id, job in self._jobs.items():
            if (before := past._jobs.get(job_id)) is not None:
                job.reach_back(before, end_s)


def _storable(value: float | None) -> float:
    return value if value is not None and abs(value) <= _MAX_VALUE else math.nan


class Trend:
    """Points (x, y) with growing x; at most `max_points`, always over the whole run."""

    def __init__(self, max_points: int = 2048) -> None:
        self._max_points = max_points
        self._stride = 1
        self._pending: list[tuple[float, float]] = []
        self.points: list[tuple[float, float]] = []
        self._last: tuple[float, float] | None = None

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The points up to the latest one, which is as it came: those that are not merged yet are left out."""
        return [] if self._last is None else [*(one for one in self.points if one[0] < self._last[0]), self._last]

    def add(self, x: float, y: float) -> None:
        """Add a point; one at the latest x replaces it, one that goes back starts afresh (a new attempt)."""
        if not math.isfinite(y):
            return
        last_x = -math.inf if self._last is None else self._last[0]
        self._last = (x, y)
        if x == last_x:
            if self._pending:
                self._pending[-1] = self._last
            elif self._stride == 1:
                self.points[-1] = self._last
            return
        if x < last_x:
            self._stride = 1
            self._pending.clear()
            self.points.clear()
        self._pending.append((x, y))
        if len(self._pending) < self._stride:
            return
        self.points.append(_mean(self._pending))
        self._pending.clear()
        if len(self.points) >= self._max_points:
            self.points = [_mean(self.points[i : i + 2]) for i in range(0, len(self.points), 2)]
            self._stride *= 2

    def go_on_with(self, newer: Trend) -> None:
        """Take the points of another one that are further on."""
        last_x = -math.inf if self._last is None else self._last[0]
        for x, y in (*newer.points, *newer._pending, *newer.curve[-1:]):
            if x > last_x:
                self.add(x, y)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    # The last x, so that x keeps growing and the latest point stands at the right edge.
    return points[-1][0], sum(y for _, y in points) / len(points)
