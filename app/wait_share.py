"""Who waits least: the share of time that each rank spends waiting, over a sliding window.

Collectives make all ranks equally fast, so a rank that is slow does not show in its steps: it shows as the one that
never waits while all others do. Time in which something else explains the waiting (a checkpoint, a frozen rank) is left
out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.job_model import JobModel

SLOT_S = 1.0
NUM_SLOTS = 12
"""A window of 12 s of clean time: a slowed rank is named within 15 s, and one hiccup does not fill it."""
NUM_RECENT_SLOTS = 4
"""The part in which a cure must show."""
SMOOTHING = 0.4
"""Weight of the newest slot in the share that is shown: it follows within some seconds and does not jump."""
MIN_OBSERVED_S = 5.0
"""Less observed time of a rank says nothing."""

MIN_GAP = 0.45
"""Between those who wait least and all others. Four healthy gloo ranks on two cores wait 20 to 60 %, unevenly: a gap of
0.4 at worst. A rank slowed 8x leaves the others waiting 85 % and more, one slowed 3x about 65 %."""
MAX_LOW = 0.25
MIN_HIGH = 0.55
KEEP_GAP = 0.25
"""A named straggler stays one until the recent gap falls below this."""
MIN_WAITS = 2.5
"""The window must hold this many times its longest single wait: one long hiccup is not a habit."""


class Laggards(msgspec.Struct, frozen=True):
    """Ranks that wait far less than all others."""

    ranks: tuple[int, ...]
    wait_frac: float
    """The highest share among them."""
    cost_frac: float
    """The part of the step time that all others lose to them: what even the second least busy waits more than they."""


class WaitShare:
    """The sliding window of one job."""

    def __init__(self, world_size: int) -> None:
        self._observed = np.zeros((NUM_SLOTS, world_size), np.float32)
        self._waited = np.zeros((NUM_SLOTS, world_size), np.float32)
        self._longest = np.zeros(NUM_SLOTS)
        self._num_filled = 0
        self._last_observed = np.zeros(world_size)
        self._last_waited = np.zeros(world_size)
        self._last_s = -np.inf
        self._is_clean = True
        self._longest_wait_s = 0.0
        self._laggards: Laggards | None = None
        self.recent_frac: NDArray[np.float64] = np.full(world_size, np.nan)
        """Smoothed share of the last seconds that each rank spent waiting, clean or not; NaN when unknown."""

    @property
    def laggards(self) -> Laggards | None:
        """The persistent stragglers, None while there are none."""
        return self._laggards

    def sample(self, job: JobModel, longest_wait_s: float, now_s: float, *, is_clean: bool) -> None:
        """Look at the counters; once a slot is full, judge anew.

        Args:
            job: Whose counters.
            longest_wait_s: The longest single wait now.
            now_s: Now.
            is_clean: Whether nothing but slowness can explain waiting now.
        """
        self._is_clean = self._is_clean and is_clean
        self._longest_wait_s = max(self._longest_wait_s, longest_wait_s)
        if now_s - self._last_s < SLOT_S:
            return
        observed = job.observed_s - self._last_observed
        waited = np.clip(job.waited_s - self._last_waited, 0.0, None)
        is_first = self._last_s == -np.inf
        np.copyto(self._last_observed, job.observed_s)
        np.copyto(self._last_waited, job.waited_s)
        self._last_s = now_s
        is_known = observed > 0.0
        if not is_first:
            share = np.divide(waited, observed, out=np.full(len(observed), np.nan), where=is_known).clip(0.0, 1.0)
            before = np.where(np.isnan(self.recent_frac), share, self.recent_frac)
            self.recent_frac = before + SMOOTHING * (share - before)
        if self._is_clean and not is_first:
            slot = self._num_filled % NUM_SLOTS
            self._observed[slot] = np.where(is_known, observed, 0.0)
            self._waited[slot] = np.where(is_known, np.minimum(waited, observed), 0.0)
            self._longest[slot] = self._longest_wait_s
            self._num_filled += 1
            self._judge()
        self._is_clean, self._longest_wait_s = True, 0.0

    def forget(self) -> None:
        """Drop the verdict and the window: what they told of is over."""
        self._laggards = None
        self._num_filled = 0
        for ring in (self._observed, self._waited, self._longest):
            ring[:] = 0.0

    def _judge(self) -> None:
        if self._laggards is not None:
            first = max(0, self._num_filled - NUM_RECENT_SLOTS)
            recent = [index % NUM_SLOTS for index in range(first, self._num_filled)]
            waited, observed = self._waited[recent].sum(axis=0), self._observed[recent].sum(axis=0)
            still = find_laggards(waited, observed, MIN_OBSERVED_S / 4, (KEEP_GAP, 1.0, 0.0))
            if still is None or still.ranks != self._laggards.ranks:
                self.forget()
                return
        waited, observed = self._waited.sum(axis=0), self._observed.sum(axis=0)
        found = find_laggards(waited, observed, MIN_OBSERVED_S, (MIN_GAP, MAX_LOW, MIN_HIGH))
        if found is not None and float(waited.max()) >= MIN_WAITS * float(self._longest.max()):
            self._laggards = found


def find_laggards(
    waited: NDArray[np.float32],
    observed: NDArray[np.float32],
    min_observed_s: float,
    limits: tuple[float, float, float],
) -> Laggards | None:
    """Return the ranks below the widest gap in the waiting shares, if it is wide enough.

    Args:
        waited: Seconds waited, by rank.
        observed: Seconds observed, by rank.
        min_observed_s: Below it a rank is not judged; nobody is while a tenth of the ranks is not.
        limits: The least gap, the most that a laggard waits, the least that all others wait.
    """
    min_gap, max_low, min_high = limits
    judged = np.flatnonzero(observed >= min_observed_s)
    if len(judged) < 2 or len(judged) < 0.9 * len(observed):
        return None
    share = waited[judged] / observed[judged]
    ordered = np.sort(share)
    gaps = np.diff(ordered)[: len(judged) // 2]
    widest = int(gaps.argmax())
    low, high = float(ordered[widest]), float(ordered[widest + 1])
    if high - low < min_gap or low > max_low or high < min_high:
        return None
    return Laggards(tuple(judged[share <= low].tolist()), low, high - low)
