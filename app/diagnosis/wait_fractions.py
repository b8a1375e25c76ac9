"""Which ranks wait least: the fraction of time that each rank loses to slower ones, over a sliding window.

Collectives make all ranks equally fast, so a slow rank does not show in its steps. It shows as the one that
loses no time while all others do. Time in which something else explains the waiting (a checkpoint, a frozen rank) is
left out.

What ranks lose is known exactly from when each has called what (`agent.node_state.waits`). A gap between those that
lose least and all others, beyond what chance does from step to step, names ranks that are a little slower, several that
are equally slow, and whole nodes. Where calls are not recorded there are only samples of which ranks wait: ranks that
share cores wait unevenly, so samples show only a rank that is slower by far.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from agent.wire.digest import LATENESS
from app.diagnosis.rank_pace import (
    NUM_SAMPLED_ROWS,
    PHASES,
    SAMPLES_HZ,
    Habit,
    RankPace,
    Recent,
    habit_of,
    lost_time,
    rank_pace,
    shares,
)
from app.diagnosis.slow_ranks import ANYBODY, KEEP, NEW, RARELY, Laggards, Limits, find_laggards, find_slow
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from app.model.job_model import JobModel

SLOT_S = 1.0
"""Seconds of clean time in a slot, gathered in pieces."""
PIECE_S = 0.2
SETTLE_S = 0.4
"""Seconds until counters are clean: they are up to a probe's tick and a node's report old."""
SLOT_STEPS = 1
"""Least number of steps in a slot, where steps are reported: a window of less than some steps shows nothing."""
MAX_BREAK_S = 3.0
"""Longest unclean break in seconds that exact figures span: they come every few seconds, for all time since."""
SAMPLED_ROWS = slice(NUM_SAMPLED_ROWS)
EXACT_ROWS = slice(NUM_SAMPLED_ROWS, NUM_SAMPLED_ROWS + len(LATENESS))
MAX_SLOT_S = 120.0
STALE_PACE_S = 10.0
"""Seconds without confirmation after which the last verdict on the pace is dropped."""
WINDOW_SLOTS = 12
"""Number of slots in the window, 12 s of clean time: a slowed rank is named within 15 s while steps take less than
about 1.5 s, and one hiccup does not fill it."""
LONG_LOOKS = (24, 36)
"""Numbers of slots in longer windows. Ranks that are slow in some steps only (one that logs in each tenth, two that
take turns of seconds) differ so much from step to step that it takes longer to exclude chance."""
NUM_SLOTS = LONG_LOOKS[-1]
NUM_RECENT_SLOTS = 3
"""Number of latest slots in which a cure must show."""
SMOOTHING = 0.4
"""Weight of the latest slot in the fraction that is shown: it follows within some seconds and does not jump."""
CORES_SMOOTHING = 0.2
"""Weight of the latest second in the cores kept busy: a rank that waits in a long step has worked in it."""
MIN_OBSERVED_S = 5.0
"""Least observed seconds from which a rank is judged."""

MIN_GAP = 0.45
"""Least gap between the ranks that wait least and all others. Four healthy gloo ranks on two cores wait 20 to 60 %,
unevenly: a gap of 0.4 at worst. A rank slowed 8x leaves the others waiting 85 % and more, one slowed 3x about 65 %."""
MAX_LOW = 0.25
MIN_HIGH = 0.55
KEEP_GAP = 0.25
"""Recent gap down to which a named straggler stays one."""
LOOKS = (3, 4, 5, 6, 8, WINDOW_SLOTS)
"""Numbers of latest slots that are judged, the fewest first: exact figures need less time."""
MANY_RANKS = 4096
"""Number of ranks above which one of `LOOKS` is judged at a time: a slot later each."""
LATE_SLOTS = 5
LATE_S = 5.0 - PIECE_S
TURN_S = 45.0
"""Seconds that ranks which are slow in turns stay named after their own turn, while another one is slow."""
STILL = 0.75
"""Fraction of the named cost that a longer window must find, which holds steps from before a cure, too."""
MAX_MISSES = 2
"""Number of slots without a slow rank from which that is a cure."""
TINY = 1e-3
"""Tolerance for the rounding of a fraction."""
MIN_INPUT = 0.5
KEEP_INPUT = 0.4
"""Fraction of all ranks' time from which the input still decides how fast the job is; `MIN_INPUT` names it first."""
MIN_WAITS = 2.5
"""Least window in multiples of its longest single wait: one long hiccup is not a habit."""
MAX_AGE_S = 300.0
MIN_AGE_S = 60.0
"""Least age in seconds of an earlier cost: one window must not be compared with itself."""
SPAN_S = 10.0
"""Seconds that the earlier cost is averaged over."""
MIN_CHANGE = 0.05
MIN_CHANGE_RATIO = 0.25
"""Least change relative to the earlier cost, beside `MIN_CHANGE` in points of the step time: less is noise."""


class EarlierCost(NamedTuple):
    """Cost of stragglers some time ago, where that was notably more or less."""

    frac: float
    """Fraction of the step time."""
    age_s: float


class CostTrend:
    """The costs of the present stragglers, over some minutes."""

    def __init__(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._costs: deque[tuple[float, float]] = deque()

    def note(self, ranks: Sequence[int], cost_frac: float, now_s: float) -> None:
        """Take the present cost of stragglers; other stragglers than before start a new history."""
        if tuple(ranks) != self._ranks:
            self._ranks = tuple(ranks)
            self._costs.clear()
        self._costs.append((now_s, cost_frac))
        while self._costs[0][0] < now_s - MAX_AGE_S:
            self._costs.popleft()

    def forget(self) -> None:
        self._ranks = ()
        self._costs.clear()

    def earlier(self, now_s: float) -> EarlierCost | None:
        """Return the earlier cost, None where it was much the same or too little time has gone by."""
        if not self._costs or now_s - self._costs[0][0] < MIN_AGE_S:
            return None
        first_s = self._costs[0][0]
        first = [cost for at_s, cost in self._costs if at_s < first_s + SPAN_S]
        before, after = sum(first) / len(first), self._costs[-1][1]
        if abs(after - before) < max(MIN_CHANGE, MIN_CHANGE_RATIO * before):
            return None
        return EarlierCost(before, now_s - first_s)


class _Mark(NamedTuple):
    """The counters at one moment."""

    at_s: float
    counters: NDArray[np.float64]
    step: int | None
    owners: NDArray[np.int64]
    """Index of each rank's node."""

    @classmethod
    def of(cls, job: JobModel, now_s: float) -> _Mark:
        figures = (job.observed_s, job.waited_s, job.num_compared, job.num_last, job.worked_s, job.lateness)
        return cls(now_s, np.vstack(figures), job.lowest_step(), np.maximum(job.node_of, 0))


class Turns:
    """The ranks that are named as slow.

    Those whose place others take are over with, until one is slow again: only then are they slow in turns, and stay
    named after their own turn.

    Attributes:
        slow_s: When each was last slow.
    """

    def __init__(self) -> None:
        self.slow_s: dict[int, float] = {}
        self._replaced_s: dict[int, float] = {}
        """The same of ranks whose place others have taken."""

    def take(self, ranks: Collection[int], now_s: float) -> None:
        """Name the ranks that are slow now."""
        if self.slow_s.keys().isdisjoint(ranks):
            is_return = not self._replaced_s.keys().isdisjoint(ranks)
            before, self._replaced_s = self._replaced_s, {} if is_return else self._replaced_s | self.slow_s
            self.slow_s = self.slow_s | before if is_return else {}
        self.slow_s |= dict.fromkeys(ranks, now_s)
        for known in (self.slow_s, self._replaced_s):
            for rank in [rank for rank, at_s in known.items() if now_s - at_s > TURN_S]:
                del known[rank]


class WaitFractions:
    """The sliding window of one job."""

    is_judged = False
    """Whether enough clean time has been seen, once, to name a slow rank."""

    def __init__(self, world_size: int) -> None:
        self._window = np.zeros((NUM_SAMPLED_ROWS + len(LATENESS), NUM_SLOTS, world_size), np.float32)
        """Seconds observed and waited, collectives compared and come last to, seconds worked in each phase, and the
        exact figures of the nodes: by slot and rank."""
        self._owners: NDArray[np.int64] = np.zeros(world_size, np.int64)
        self._longest = np.zeros(NUM_SLOTS)
        self._lengths = np.zeros(NUM_SLOTS)
        """Seconds of clean time in each slot."""
        self._has_steps = False
        self._has_exact = False
        """Whether nodes have compared calls."""
        self._held_s = -np.inf
        """Time up to which clean time has confirmed the last verdict."""
        self._num_filled = self._slot_steps = 0
        self._slot_s = 0.0
        """Seconds of clean time in the slot that is being filled."""
        self._is_slot_begun = False
        self._mark: _Mark | None = None
        """End of the last clean piece, None while there is none."""
        self._exact: _Mark | None = None
        """End of the last clean piece, None once a longer break has followed."""
        self._clean_since_s: float | None = None
        self._longest_wait_s = 0.0
        self._crowding = 1.0
        self._followed = np.zeros((2, world_size))
        self._followed_s = -np.inf
        self._laggards: Laggards | None = None
        self._turns = Turns()
        self._slow_slots = 0
        """Number of slots for which the same ranks have been slow."""
        self._misses = 0
        self.trend = CostTrend()
        """Trend of the laggards' cost."""
        self.habit: Habit | None = None
        """Phase in which the laggards spend more time than the others."""
        self.input_frac: float | None = None
        """Fraction of their time that the ranks spend on input, while it decides how fast they are."""
        self.recent_frac: NDArray[np.float64] = np.full(world_size, np.nan)
        """Smoothed fraction of the last seconds that each rank spent waiting, clean or not; NaN when unknown."""
        self.recent_cores: NDArray[np.float64] = np.zeros(world_size)
        """Smoothed cores that the process of each rank has kept busy."""

    @property
    def laggards(self) -> Laggards | None:
        """The persistent stragglers, None while there are none."""
        return self._laggards

    def is_fresh(self, now_s: float) -> bool:
        """Return whether the last verdict still holds: clean time has gone on since, without a long gap."""
        return now_s - self._held_s <= STALE_PACE_S

    def pace(self) -> RankPace:
        """Return how each rank spent the window."""
        filled = self._latest_slots(WINDOW_SLOTS)[: -1 if self._is_slot_begun else None]
        window_s = float(self._lengths[filled].sum()) + self._slot_s
        recent = self._recent(WINDOW_SLOTS)
        lost = lost_time(recent, self._owners)
        longest_wait_s = max(recent.longest_wait_s, self._longest_wait_s)
        pace = rank_pace(self._sums(slice(None)), window_s, lost)
        return msgspec.structs.replace(pace, longest_wait_s=longest_wait_s)

    def sample(
        self, job: JobModel, longest_wait_s: float, now_s: float, *, is_clean: bool, crowding: float = 1.0
    ) -> None:
        """Sample the counters; once a slot is full, judge again.

        Args:
            job: Job whose counters are sampled.
            longest_wait_s: The longest single wait now.
            now_s: Now.
            is_clean: Whether nothing but slowness can explain waiting now.
            crowding: Crowding of the most loaded node (`Cluster.crowding`).
        """
        self._crowding = crowding
        if now_s - self._followed_s >= SLOT_S:
            self._follow(job, now_s)
        if not is_clean:
            self._clean_since_s, self._mark = None, None
            if self._exact is not None and now_s - self._exact.at_s > MAX_BREAK_S:
                self._exact = None
            return
        if self._clean_since_s is None:
            self._clean_since_s = now_s
        # Counters are as old as reports: the first ones still hold time that was not clean.
        is_settled = now_s - self._clean_since_s >= SETTLE_S
        if is_settled:
            self._longest_wait_s = max(self._longest_wait_s, longest_wait_s)
        if is_settled and (self._mark is None or now_s - self._mark.at_s >= PIECE_S):
            self._take(_Mark.of(job, now_s))

    def _follow(self, job: JobModel, now_s: float) -> None:
        """Update the figures of the last seconds."""
        self.recent_cores += CORES_SMOOTHING * (job.cpu_cores - self.recent_cores)
        observed = job.observed_s - self._followed[0]
        waited = np.clip(job.waited_s - self._followed[1], 0.0, np.clip(observed, 0.0, None))
        if self._followed_s != -np.inf:
            waited_frac = np.divide(waited, observed, out=np.full(len(observed), np.nan), where=observed > 0.0)
            before = np.where(np.isnan(self.recent_frac), waited_frac, self.recent_frac)
            self.recent_frac = before + SMOOTHING * (waited_frac - before)
        self._followed, self._followed_s = np.stack((job.observed_s, job.waited_s)), now_s

    def _take(self, mark: _Mark) -> None:
        """Add a clean piece of time to the slot that is being filled."""
        before, self._mark = self._mark, mark
        exact, self._exact = self._exact, mark
        slot = self._num_filled % NUM_SLOTS
        if not self._is_slot_begun:
            self._is_slot_begun = True
            self._window[:, slot] = 0.0
            self._longest[slot] = 0.0
        if exact is not None:
            grown = np.maximum(mark.counters[EXACT_ROWS] - exact.counters[EXACT_ROWS], 0.0)
            if not self._has_exact and grown.any():
                # Until the first steps ranks wait for one that starts late: that is no pace.
                self._has_exact = True
                self._window[SAMPLED_ROWS] = 0.0
            self._window[EXACT_ROWS, slot] += grown
        if before is None:
            return
        grown = np.maximum(mark.counters[SAMPLED_ROWS] - before.counters[SAMPLED_ROWS], 0.0)
        grown[1] = np.minimum(grown[1], grown[0])
        self._window[SAMPLED_ROWS, slot] += grown
        self._slot_s += mark.at_s - before.at_s
        if self.is_fresh(mark.at_s):
            self._held_s = mark.at_s
        if mark.step is not None and before.step is not None:
            self._slot_steps += max(0, mark.step - before.step)
        is_short = mark.step is not None and self._slot_steps < SLOT_STEPS
        if self._slot_s < (MAX_SLOT_S if is_short else SLOT_S) - PIECE_S / 2:
            return
        self._longest[slot], self._lengths[slot] = self._longest_wait_s, self._slot_s
        self._slot_s, self._slot_steps, self._longest_wait_s = 0.0, 0, 0.0
        self._num_filled += 1
        self._is_slot_begun = False
        self._has_steps, self._held_s = mark.step is not None, mark.at_s
        self._owners = mark.owners
        self._judge(mark.at_s)
        self.is_judged |= self._num_filled >= LATE_SLOTS
        if self._laggards is not None:
            self.trend.note(self._laggards.ranks, self._laggards.cost_frac, mark.at_s)

    def forget(self) -> None:
        """Drop the verdict and the window: their time is over."""
        self._laggards = self.habit = self.input_frac = None
        self.trend.forget()
        self._turns = Turns()
        self._slow_slots = self._misses = 0
        self._num_filled, self._slot_s, self._slot_steps, self._is_slot_begun = 0, 0.0, 0, False
        self._window[:] = 0.0
        self._longest[:] = 0.0

    def _recent(self, num_slots: int) -> Recent:
        """Return the sums over the latest slots, but for the phases."""
        latest_slots = self._latest_slots(num_slots)
        total = np.zeros((4 + len(LATENESS), self._window.shape[2]), np.float32)
        for slot in latest_slots:
            total[:4] += self._window[:4, slot]
            total[4:] += self._window[EXACT_ROWS, slot]
        longest_s = float(self._longest[latest_slots].max(initial=0.0))
        return Recent(
            total,
            self._window[-2:, latest_slots],
            self._window[:2, latest_slots],
            longest_s,
            SAMPLES_HZ / self._crowding,
        )

    def _sums(self, rows: slice) -> NDArray[np.float32]:
        """Return the sums of some rows over the window."""
        sums: NDArray[np.float32] = self._window[rows, self._latest_slots(WINDOW_SLOTS)].sum(axis=1)
        return sums

    def _window_s(self, num_slots: int) -> float:
        """Return how much clean time the latest slots hold, 0 where there are fewer."""
        return float(self._lengths[self._latest_slots(num_slots)].sum()) if self._num_filled >= num_slots else 0.0

    def _latest_slots(self, num_slots: int) -> list[int]:
        """Return the places of the latest slots, with the one that is being filled."""
        end = self._num_filled + self._is_slot_begun
        return [index % NUM_SLOTS for index in range(max(0, end - num_slots), end)]

    def _judge(self, now_s: float) -> None:
        self._judge_pace(now_s)
        self._judge_input(self._sums(slice(1))[0])
        self.habit = None if self._laggards is None else habit_of(self._sums(slice(None)), self._laggards.ranks)

    def _judge_input(self, observed: NDArray[np.float32]) -> None:
        """Judge whether the input decides the pace, slot by slot: one long pause for it is not a habit."""
        judged = observed >= MIN_OBSERVED_S
        least = KEEP_INPUT if self.input_frac else MIN_INPUT
        self.input_frac = None
        if not self._has_steps or self._num_filled < LATE_SLOTS or judged.sum() < 0.9 * len(judged):
            return
        latest_slots = self._latest_slots(WINDOW_SLOTS)
        at_input = self._window[4 + PHASES.index(Phase.DATA), latest_slots][:, judged]
        of_all = self._window[0, latest_slots][:, judged]
        # Half of the fractions must be as large for the median to be; to count them is cheap.
        if 2 * np.count_nonzero(at_input >= (least - TINY) * of_all) < at_input.size:
            return
        frac = float(np.median(shares(at_input, of_all)))
        self.input_frac = frac if frac >= least else None

    def _judge_pace(self, now_s: float) -> None:
        if self._laggards is not None and not self._is_borne_out(self._laggards):
            self._misses += 1
            if self._misses >= MAX_MISSES:
                self.forget()
            return
        self._misses = 0
        found = self._find()
        if found is None or not self._is_sure_of(found):
            return
        is_same = self._laggards is not None and set(found.ranks) <= self._turns.slow_s.keys()
        self._slow_slots = self._slow_slots + 1 if is_same else 0
        self._turns.take(found.ranks, now_s)
        ranks = tuple(sorted(self._turns.slow_s))
        is_in_turns = found.is_in_turns or len(ranks) > len(found.ranks)
        self._laggards = msgspec.structs.replace(found, ranks=ranks, is_in_turns=is_in_turns)

    def _is_sure_of(self, found: Laggards) -> bool:
        """Return whether no rank is added to those that are named and still slow, or the whole window finds it too.

        A rank that waits for a slow one in a broadcast, and so comes late, seems slow while few samples show its wait.
        """
        ranks, named = set(found.ranks), self._turns.slow_s.keys()
        if ranks <= named or ranks.isdisjoint(named):
            return True
        whole = self._find_exact(WINDOW_SLOTS, NEW)
        return whole is not None and ranks - named <= set(whole.ranks)

    def _find(self) -> Laggards | None:
        """Return the ranks that are slow by the limits of a new verdict."""
        is_large = self._window.shape[2] > MANY_RANKS and self._laggards is None
        for num_slots in (LOOKS[self._num_filled % len(LOOKS)],) if is_large else LOOKS:
            if self._window_s(num_slots) >= LATE_S and (found := self._find_exact(num_slots, NEW)):
                # The longer ranks have been slow, the more is known of what they cost.
                longer = min(WINDOW_SLOTS, num_slots + self._slow_slots)
                better = self._find_exact(longer, KEEP) if longer > num_slots else None
                return better if better is not None and _is_more_of(better, found) else found
        # A long window on a rank that is slow without a pause would still find it after its cure.
        is_steady = self._laggards is not None and not self._laggards.is_at_times
        for num_slots in () if is_steady else LONG_LOOKS:
            if (
                self._window_s(num_slots)
                and (found := self._find_exact(num_slots, RARELY))
                and self._is_borne_out(found)
            ):
                return msgspec.structs.replace(found, is_at_times=True)
        whole = self._sums(slice(2))
        # On crowded machines the same time holds fewer samples.
        min_observed_s = MIN_OBSERVED_S * self._crowding
        by_frac = find_laggards(whole[1], whole[0], min_observed_s, (MIN_GAP, MAX_LOW, MIN_HIGH))
        longest_s = float(self._longest[self._latest_slots(WINDOW_SLOTS)].max(initial=0.0))
        is_habit = by_frac is not None and float(whole[1].max()) >= MIN_WAITS * longest_s
        return by_frac if is_habit else None

    def _find_exact(self, num_slots: int, limits: Limits) -> Laggards | None:
        recent = self._recent(num_slots)
        lost = lost_time(recent, self._owners)
        if lost is not None and limits is not NEW:
            # Samples alone do not end a verdict: those of some steps may be all alike.
            lost = lost._replace(frac=lost.by_calls)
        return None if lost is None else find_slow(recent.total, lost, self._owners, limits)

    def _is_borne_out(self, named: Laggards) -> bool:
        """Return whether any rank has been as slow as those named in the last seconds."""
        # At a change of turns no rank is slow for long enough to be named: it is enough that some rank costs as much.
        losses = {num: lost_time(self._recent(num), self._owners) for num in LOOKS}
        doubts = {num: lost.node_doubt for num, lost in losses.items() if lost is not None}
        if looks := list(doubts):
            # At a change of turns a window holds more of one than of the other, and one slow step or none: a longer
            # one, with some of each, decides.
            found = (
                self._find_exact(num, ANYBODY)
                for num in (looks if named.is_in_turns or named.is_at_times else looks[:1])
            )
            if any(anybody is not None and anybody.cost_frac >= named.cost_frac / 2 for anybody in found):
                return True
            # The shortest window may hold too few steps, and the next one too few of some node to judge whole nodes.
            is_of_nodes = named.last_frac is None
            known = (num for num in looks[1:] if num < WINDOW_SLOTS and (doubts[num] < np.inf or not is_of_nodes))
            longer = next(known, None)
            same = None if longer is None else self._find_exact(longer, KEEP)
            return same is not None and same.ranks == named.ranks and same.cost_frac >= STILL * named.cost_frac
        waited, observed = self._recent(NUM_RECENT_SLOTS).total[1::-1]
        recent = find_laggards(waited, observed, MIN_OBSERVED_S / 4, (KEEP_GAP, 1.0, 0.0))
        return recent is not None and set(recent.ranks) <= self._turns.slow_s.keys()


def _is_more_of(better: Laggards, found: Laggards) -> bool:
    """Return whether a longer window finds the same ranks, or those that are slow in turns with them."""
    return better.ranks == found.ranks or (better.is_in_turns and set(found.ranks) <= set(better.ranks))
