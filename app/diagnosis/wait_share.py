"""Who waits least: the share of time that each rank spends waiting, over a sliding window.

Collectives make all ranks equally fast, so a rank that is slow does not show in its steps: it shows as the one that
never waits while all others do. Time in which something else explains the waiting (a checkpoint, a frozen rank) is left
out.

Shares are sampled, a few times a second, and ranks that share cores wait unevenly: alone they tell only a rank that is
slower by far. One that is a little slower is told by two things together: it comes last to nearly every collective,
which its node knows exactly, and it waits less than the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.cost_trend import CostTrend
from app.diagnosis.rank_pace import PHASES, RankPace, chance_frac, rank_pace
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.model.job_model import JobModel

SLOT_S = 1.0
"""Clean time in a slot, gathered in pieces."""
PIECE_S = 0.2
SETTLE_S = 0.4
"""What is told is up to a probe's tick and a node's report old."""
SLOT_STEPS = 2
"""A slot holds at least as many steps, where steps are told: a window of less than some steps tells nothing."""
MAX_SLOT_S = 120.0
STALE_PACE_S = 10.0
"""What the pace told is not repeated when nothing has borne it out for so long."""
NUM_SLOTS = 12
"""A window of 12 s of clean time: a slowed rank is named within 15 s while steps take less than about 1.5 s, and one
hiccup does not fill it."""
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
LATE_SLOTS = 5
"""The part of the window in which the order of arrival is looked at: it is exact, and needs less time."""
MIN_COMPARED = 40
"""Collectives in the window: fewer may have the same last rank by chance. Those of one step have one reason: where
steps are not told, there may be some eight to each."""
MIN_COMPARED_STEPLESS = 160
CALLS_OF_A_STEP = 8
CHANCE_SIGMAS = 5.0
"""Beyond chance: there are many windows in a night, and many ranks in a job."""
MIN_LAST = 0.75
"""Share of the compared collectives to which a straggler comes last. Of four healthy gloo ranks on two busy cores none
came last to more than half of them, in 116 windows of 5 s; one that takes 20 % longer does so to 0.8 and more."""
MIN_COST = 0.08
"""Less of the step time is not worth a verdict, and within what sampling makes uncertain."""
KEEP_LAST = 0.6
KEEP_COST = 0.03
MIN_HABIT = 0.05
"""Less of a straggler's time beyond what others spend says nothing of why it is slow."""
TINY = 1e-3
"""Beyond what rounding does to a share."""
MIN_INPUT = 0.5
KEEP_INPUT = 0.4
"""Of all ranks' time: from here on the input decides how fast the job is."""
MIN_WAITS = 2.5
"""The window must hold this many times its longest single wait: one long hiccup is not a habit."""


class Laggards(msgspec.Struct, frozen=True):
    """Ranks that wait far less than all others."""

    ranks: tuple[int, ...]
    wait_frac: float
    """The highest share among them."""
    cost_frac: float
    """The part of the step time that all others lose to them: what even the second least busy waits more than they, or,
    of one that is a little slower, what the others wait more in the middle."""
    last_frac: float | None = None
    """Share of the collectives to which it came last, where that is known and told it."""


class Habit(msgspec.Struct, frozen=True):
    """What ranks spend their time with."""

    phase: Phase
    frac: float
    """Of their time."""
    others_frac: float
    """Of the others' time, in the middle."""


class _Mark(NamedTuple):
    """The counters at one moment."""

    at_s: float
    counters: NDArray[np.float64]
    step: int | None
    beside: NDArray[np.int64]
    """How many ranks of the job are on each rank's node, itself among them."""

    @classmethod
    def of(cls, job: JobModel, now_s: float) -> _Mark:
        told = (job.observed_s, job.waited_s, job.num_compared, job.num_last, job.worked_s)
        owners = np.maximum(job.node_of, 0)
        return cls(now_s, np.vstack(told), job.lowest_step(), np.bincount(owners)[owners])


class WaitShare:
    """The sliding window of one job."""

    def __init__(self, world_size: int) -> None:
        self._window = np.zeros((4 + len(Phase), NUM_SLOTS, world_size), np.float32)
        """Seconds observed and waited, collectives compared and come last to, seconds worked in each phase: by slot and
        rank."""
        self._longest = np.zeros(NUM_SLOTS)
        self._steps = np.zeros(NUM_SLOTS)
        self._has_steps = False
        self._held_s = -np.inf
        """Until when what was judged last has been borne out by clean time."""
        self._num_filled = 0
        self._slot_s = 0.0
        """Clean time in the slot that is being filled."""
        self._slot_steps = 0
        self._mark: _Mark | None = None
        """The end of the last clean piece, None while there is none."""
        self._clean_since_s: float | None = None
        self._longest_wait_s = 0.0
        self._followed = np.zeros((2, world_size))
        self._followed_s = -np.inf
        self._laggards: Laggards | None = None
        self.trend = CostTrend()
        """Of what the laggards cost."""
        self.habit: Habit | None = None
        """What the laggards do more than the others."""
        self.input_frac: float | None = None
        """The share of their time that the ranks spend with input, while it decides how fast they are."""
        self.recent_frac: NDArray[np.float64] = np.full(world_size, np.nan)
        """Smoothed share of the last seconds that each rank spent waiting, clean or not; NaN when unknown."""

    @property
    def laggards(self) -> Laggards | None:
        """The persistent stragglers, None while there are none."""
        return self._laggards

    def is_fresh(self, now_s: float) -> bool:
        """Return whether what was judged last may still be said: clean time has gone on since, without a long gap."""
        return now_s - self._held_s <= STALE_PACE_S

    def pace(self) -> RankPace:
        """Return how each rank spent the window."""
        return rank_pace(self._window.sum(axis=1), min(self._num_filled, NUM_SLOTS) * SLOT_S + self._slot_s)

    def sample(self, job: JobModel, longest_wait_s: float, now_s: float, *, is_clean: bool) -> None:
        """Look at the counters; once a slot is full, judge anew.

        Args:
            job: Whose counters.
            longest_wait_s: The longest single wait now.
            now_s: Now.
            is_clean: Whether nothing but slowness can explain waiting now.
        """
        if now_s - self._followed_s >= SLOT_S:
            self._follow(job, now_s)
        if not is_clean:
            self._clean_since_s, self._mark = None, None
            return
        if self._clean_since_s is None:
            self._clean_since_s = now_s
        # Counters are as old as reports: the first ones still tell of what was not clean.
        is_settled = now_s - self._clean_since_s >= SETTLE_S
        if is_settled:
            self._longest_wait_s = max(self._longest_wait_s, longest_wait_s)
        if is_settled and (self._mark is None or now_s - self._mark.at_s >= PIECE_S):
            self._take(_Mark.of(job, now_s))

    def _follow(self, job: JobModel, now_s: float) -> None:
        """Bring the share of the last seconds up to date."""
        observed = job.observed_s - self._followed[0]
        waited = np.clip(job.waited_s - self._followed[1], 0.0, np.clip(observed, 0.0, None))
        if self._followed_s != -np.inf:
            share = np.divide(waited, observed, out=np.full(len(observed), np.nan), where=observed > 0.0)
            before = np.where(np.isnan(self.recent_frac), share, self.recent_frac)
            self.recent_frac = before + SMOOTHING * (share - before)
        self._followed, self._followed_s = np.stack((job.observed_s, job.waited_s)), now_s

    def _take(self, mark: _Mark) -> None:
        """Add a clean piece of time to the slot that is being filled."""
        before, self._mark = self._mark, mark
        if before is None:
            return
        grown = mark.counters - before.counters
        np.maximum(grown, 0.0, out=grown)
        grown[1] = np.minimum(grown[1], grown[0])
        slot = self._num_filled % NUM_SLOTS
        if self._slot_s == 0.0:
            self._window[:, slot] = 0.0
        self._window[:, slot] += grown
        self._slot_s += mark.at_s - before.at_s
        if self.is_fresh(mark.at_s):
            self._held_s = mark.at_s
        if mark.step is not None and before.step is not None:
            self._slot_steps += max(0, mark.step - before.step)
        is_short = mark.step is not None and self._slot_steps < SLOT_STEPS
        if self._slot_s < (MAX_SLOT_S if is_short else SLOT_S) - PIECE_S / 2:
            return
        self._longest[slot], self._steps[slot] = self._longest_wait_s, self._slot_steps
        self._slot_s, self._slot_steps, self._longest_wait_s = 0.0, 0, 0.0
        self._num_filled += 1
        self._has_steps, self._held_s = mark.step is not None, mark.at_s
        self._judge(mark.beside)
        if self._laggards is not None:
            self.trend.note(self._laggards.ranks, self._laggards.cost_frac, mark.at_s)

    def forget(self) -> None:
        """Drop the verdict and the window: what they told of is over."""
        self._laggards = self.habit = self.input_frac = None
        self.trend.forget()
        self._num_filled, self._slot_s, self._slot_steps = 0, 0.0, 0
        self._window[:] = 0.0
        self._longest[:] = 0.0

    @property
    def _min_compared(self) -> int:
        return MIN_COMPARED if self._has_steps else MIN_COMPARED_STEPLESS

    def _least_last(
        self, recent: NDArray[np.float32], beside: NDArray[np.int64], num_slots: int
    ) -> NDArray[np.float64]:
        """Return the share of collectives to which each rank would have to come last, beyond what chance may do.

        The collectives of one step have one reason, so steps count; with two ranks, chance does much.
        """
        steps = self._steps[self._newest(num_slots)].sum() if self._has_steps else recent[2] / CALLS_OF_A_STEP
        by_chance = 1.0 / np.maximum(beside, 2)
        spread = np.sqrt(by_chance * (1.0 - by_chance) / np.maximum(steps, 1.0))
        least: NDArray[np.float64] = np.maximum(MIN_LAST, by_chance + CHANCE_SIGMAS * spread)
        return least

    def _recent(self, num_slots: int) -> NDArray[np.float32]:
        """Return the sums over the newest slots, but for the phases."""
        total: NDArray[np.float32] = self._window[:4, self._newest(num_slots)].sum(axis=1)
        return total

    def _newest(self, num_slots: int) -> list[int]:
        """Return the places of the newest filled slots."""
        return [index % NUM_SLOTS for index in range(max(0, self._num_filled - num_slots), self._num_filled)]

    def _judge(self, beside: NDArray[np.int64]) -> None:
        whole = self._window[:4].sum(axis=1)
        self._judge_pace(whole, beside)
        self._judge_input(whole[0])
        self.habit = None if self._laggards is None else _habit(self._window.sum(axis=1), self._laggards.ranks)

    def _judge_input(self, observed: NDArray[np.float32]) -> None:
        """See whether the input decides the pace, slot by slot: one long pause for it is not a habit."""
        judged = observed >= MIN_OBSERVED_S
        least = KEEP_INPUT if self.input_frac else MIN_INPUT
        self.input_frac = None
        if not self._has_steps or self._num_filled < LATE_SLOTS or judged.sum() < 0.9 * len(judged):
            return
        filled = min(self._num_filled, NUM_SLOTS)
        at_input = self._window[4 + PHASES.index(Phase.DATA), :filled][:, judged]
        of_all = self._window[0, :filled][:, judged]
        # Half of the shares must be as large for the median to be; to count them is cheap.
        if 2 * np.count_nonzero(at_input >= (least - TINY) * of_all) < at_input.size:
            return
        frac = float(np.median(_shares(at_input, of_all)))
        self.input_frac = frac if frac >= least else None

    def _is_still_slow(self, named: Laggards) -> bool:
        """Return whether the last seconds bear out what was said, one way or the other."""
        recent = self._recent(NUM_RECENT_SLOTS)
        by_share = find_laggards(recent[1], recent[0], MIN_OBSERVED_S / 4, (KEEP_GAP, 1.0, 0.0))
        if by_share is not None and set(by_share.ranks) == set(named.ranks):
            return True
        if named.last_frac is None:
            return False
        # The order of arrival is exact and tells of a cure at once; a cost that is sampled takes the whole window.
        by_order = find_latecomers(recent, MIN_COMPARED / 4, (np.full(recent.shape[1], KEEP_LAST), -1.0))
        # Of other ranks, less is asked here than of a new verdict: that they meet it too says nothing.
        if by_order is None or not set(named.ranks) <= set(by_order.ranks):
            return False
        observed, waited = self._window[:2].sum(axis=1)
        others = observed > 0.0
        others[list(named.ranks)] = False
        if not others.any():
            return False
        share = _shares(waited, observed)
        cost = float(np.median(share[others])) - float(share[list(named.ranks)].max())
        return cost >= KEEP_COST

    def _judge_pace(self, whole: NDArray[np.float32], beside: NDArray[np.int64]) -> None:
        if self._laggards is not None and not self._is_still_slow(self._laggards):
            self.forget()
            return
        found = find_laggards(whole[1], whole[0], MIN_OBSERVED_S, (MIN_GAP, MAX_LOW, MIN_HIGH))
        if found is not None and float(whole[1].max()) >= MIN_WAITS * float(self._longest.max()):
            self._laggards = found
        elif self._num_filled >= LATE_SLOTS:
            num_slots = LATE_SLOTS if self._has_steps else NUM_SLOTS
            recent = self._recent(num_slots)
            late = find_latecomers(recent, self._min_compared, (self._least_last(recent, beside, num_slots), MIN_COST))
            self._laggards = late or self._laggards


def _shares(seconds: NDArray[np.float32], observed: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return parts of the observed time, 0 where nothing was observed."""
    return np.divide(seconds, observed, out=np.zeros_like(seconds), where=observed > 0.0)


def _habit(whole: NDArray[np.float32], ranks: Sequence[int]) -> Habit | None:
    """Return the phase in which some ranks spend the most time beyond what others do; None where none stands out."""
    share = _shares(whole[4:], whole[0])
    is_asked = np.zeros(share.shape[1], np.bool_)
    is_asked[list(ranks)] = True
    others = ~is_asked & (whole[0] > 0.0)
    if not others.any():
        return None
    own, usual = np.median(share[:, is_asked], axis=1), np.median(share[:, others], axis=1)
    most = int((own - usual).argmax())
    chance = float(chance_frac(usual[most], float(whole[0, is_asked].sum())))
    if own[most] - usual[most] < max(MIN_HABIT, chance):
        return None
    return Habit(PHASES[most], float(own[most]), float(usual[most]))


def find_latecomers(
    window: NDArray[np.float32], min_compared: float, limits: tuple[NDArray[np.float64], float]
) -> Laggards | None:
    """Return the ranks that come last on their nodes nearly always, and wait less than the others.

    Args:
        window: Seconds observed and waited, collectives compared and come last to, and more: (4 or more, ranks).
        min_compared: Below it a rank is not judged.
        limits: The least share of collectives to which each rank would have to come last, and the least that it costs.
    """
    min_last, min_cost = limits
    observed, waited, compared, last = window[:4]
    is_observed = observed > 0.0
    is_late = (compared >= min_compared) & is_observed & (last >= min_last * compared)
    others = is_observed & ~is_late
    if not is_late.any() or not others.any():
        return None
    share = _shares(waited, observed)
    cost = float(np.median(share[others])) - share
    late = np.flatnonzero(is_late & (cost >= min_cost))
    if not len(late):
        return None
    return Laggards(
        tuple(late.tolist()),
        float(share[late].max()),
        float(cost[late].min()),
        float((last[late] / compared[late]).min()),
    )


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
