"""Which ranks are slow, from what each loses to the others. Pure.

They lose least of all, by a gap that is beyond chance, come last to collectives and are not themselves seen waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.rank_pace import MIN_COMPARED, MIN_OBSERVED_S, shares

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.diagnosis.rank_pace import Habit, LostTime
    from app.model.job_model import JobModel
    from ddpcore.wire import Phase, Place, RankReport

MIN_COST = 0.1
"""Least cost, as a fraction of the step time, for a verdict: the work of healthy ranks differs by some percent."""
KEEP_COST = 0.04
MIN_NODE_COST = 0.16
"""Least cost of a whole node: nodes may differ by a little, and a job is as fast as the slowest."""
MIN_EARLY_NODE_COST = 0.2
MIN_NODE_SPANNED_S = 4.0
"""Seconds of steps below which the higher cost applies: where calls are many, a window holds few of them."""
MIN_LAST = 0.75
"""Fraction of the compared collectives to which stragglers of a node come last, all together. Of four healthy gloo
ranks on two busy cores none came last to more than half of them, in 116 windows of 5 s; one that takes 20 % longer does
so to 0.8 and more."""
MIN_LAST_AWAITED = 0.3
HARDLY = 0.05
OFTEN = 0.15
"""Fraction of time that others wait while slow ranks wait `HARDLY`; `MIN_LAST_AWAITED` is enough then. To a broadcast,
which not all wait for, and to what follows it, others than the slow rank may come last."""
ALWAYS = 0.95
"""Fraction of the collectives; a rank that comes last to as many does not do so by chance, however much the steps vary.
They do while ranks are slow in turns of some seconds."""
MAX_SEEN_WAITING = 0.8
"""Fraction of its time; a rank that is seen waiting more often is not the slow one, whatever its calls show. Ranks of
NCCL that queue steps ahead always wait, and the times of their calls do not show what their GPUs do."""
MIN_SURE_GAP = 0.16
MAX_CHANCE = 1e-4
MIN_HABIT_PIECES = 5.0
MIN_HABIT_FRAC = 1 / 12
"""Number of pieces, or fraction of few, at which others lose their time: a rank that saves for seconds now and then is
not slow, but one whose loss is read in each tenth step may be. The first loss and the last one may have less than their
distance between them: one does not count. k equal losses have a squared sum of k times their sum of squares."""
SPANNED, WAITED, SQUARED, PIECES = 4, 5, 6, 7
"""Rows of a window: seconds compared, those waited, the squares of those waited at each piece, and pieces: steps, or
several short ones."""
MIN_SPREAD = 1 / 3
"""Least gap, as a fraction of the cost, between stragglers and the one of the others that loses least."""
MIN_BESIDE = 0.5
"""Fraction of a rank's cost that the ranks beside it lose more than it does, at least. A difference only between nodes
is not its doing: it passes on the broadcasts of a slow rank elsewhere, and comes last to what follows them."""
SEEN_WAITING_TOO = 0.4
"""Fraction of a rank's cost; beside another slow rank, samples show at most so much more waiting than its calls."""
IN_TURNS = 0.25
"""Fraction of what others lose; ranks that lose less at the same time are slow together."""
MAX_IN_TURNS = 1.25
"""Multiple of what others lose that ranks which are slow in turns cost together, at most."""
MAJORITY_IN_TURNS = 0.4
MIN_LOOKS = 4
"""Reports that show a line before it is named as the usual one."""
MAX_LOOKS = 120
"""Reports after which older ones count half."""
MAX_PEERS = 8
"""Limit of other ranks whose lines are compared."""
MIN_OFTEN = 0.25
"""Least fraction of its time that a slow rank is at a line that is named."""
MIN_MORE = 0.05
"""Least fraction of its time that a slow rank is at a line beyond what its peers are."""
MAJORITY_LAST = 0.95


class Laggards(msgspec.Struct, frozen=True):
    """Ranks that wait far less than all others."""

    ranks: tuple[int, ...]
    wait_frac: float
    """Highest fraction of time waited among them."""
    cost_frac: float
    """Fraction of the step time that the others lose to them."""
    last_frac: float | None = None
    """Fraction of the collectives to which they came last, together; None where unknown, or for a whole node."""
    is_in_turns: bool = False
    """Whether they are slow at different times."""
    is_at_times: bool = False
    """Whether they are slow in some steps only, as far as a longer window shows."""


class _Places:
    """The lines at which some ranks were seen at work, out of all looks at them."""

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()
        self.num_looks = 0
        self._latest: dict[int, RankReport] = {}

    def take(self, report: RankReport, phase: Phase | None) -> None:
        """Take a report, if it is new and of the phase; a rank that waits is at no line."""
        if self._latest.get(report.rank) is report or phase not in (None, report.phase):
            return
        self._latest[report.rank] = report
        self.num_looks += 1
        if report.place is not None and not any(group.is_waiting for group in report.groups):
            self.counts[report.place] += 1
        if self.num_looks > MAX_LOOKS * len(self._latest):
            self.num_looks //= 2
            self.counts = Counter({place: count // 2 for place, count in self.counts.items() if count > 1})

    def frac(self, place: Place) -> float:
        """Return the fraction of the looks that have shown a line."""
        return self.counts[place] / max(1, self.num_looks)


class UsualPlace:
    """The line at which slow ranks are seen more often than their peers while they do what makes them slow."""

    def __init__(self) -> None:
        self._of: tuple[tuple[int, ...], Phase | None] = ((), None)
        self._own, self._peers = _Places(), _Places()

    def observe(self, job: JobModel, ranks: tuple[int, ...], habit: Habit | None) -> Place | None:
        """Look at the first slow rank and a few others of a job; return the line as `take` does."""
        others = np.setdiff1d(np.arange(job.world_size), ranks)
        sample = others[:: -(-max(1, len(others)) // MAX_PEERS)].tolist()
        seen = {one.rank: one.report for one in job.workers([ranks[0], *sample]) if one.report is not None}
        own = seen.pop(ranks[0], None)
        return self.take(ranks, own, list(seen.values()), habit)

    def take(
        self, ranks: tuple[int, ...], own: RankReport | None, peers: Sequence[RankReport], habit: Habit | None
    ) -> Place | None:
        """Take the latest reports; return the line, None where there is none, and until it has been seen a few times.

        Args:
            ranks: The slow ranks.
            own: The report of the first of them.
            peers: Reports of others.
            habit: The phase in which they spend more time than others, of which lines are compared then: others may
                wait there. None where that is not known.
        """
        phase = None if habit is None else habit.phase
        if self._of != (ranks, phase):
            self._of = ranks, phase
            self._own, self._peers = _Places(), _Places()
        if own is not None:
            self._own.take(own, phase)
        for report in peers:
            self._peers.take(report, phase)
        counts = self._own.counts
        often = [place for place in counts if counts[place] >= MIN_LOOKS and self._own.frac(place) >= MIN_OFTEN]
        more = {place: self._more_frac(place, habit) for place in often}
        most = max(often, key=lambda place: more[place], default=None)
        return most if most is not None and more[most] > 0.0 else None

    def _more_frac(self, place: Place, habit: Habit | None) -> float:
        """Return by how much more of its time than its peers a slow rank is at a line, beyond what may be chance."""
        own_part, peers_part = (1.0, 1.0) if habit is None else (habit.frac, habit.others_frac)
        usual = peers_part * self._peers.frac(place)
        chance = 2 * math.sqrt(usual * (1.0 - usual) / max(1, self._own.num_looks))
        return own_part * self._own.frac(place) - usual - max(MIN_MORE, chance)


class Limits(NamedTuple):
    """Limits from which ranks are named."""

    cost: float
    node_cost: float
    last: float
    doubt: float
    """Multiple of the error by chance."""
    seen_waiting: float = MAX_SEEN_WAITING
    seen_gap: float = 0.0
    """Fraction of the gap between slow ranks and others of their nodes that samples must show as well."""


NEW = Limits(MIN_COST, MIN_NODE_COST, MIN_LAST, 1.0)
RARELY = Limits(MIN_SURE_GAP, MIN_NODE_COST, 0.01, 1.0, seen_gap=0.5)
"""For ranks that are slow in some steps: any rank may come last to the calls of the other steps."""
KEEP = Limits(KEEP_COST, MIN_NODE_COST / 2, 0.5, 0.3)
ANYBODY = Limits(KEEP_COST, MIN_NODE_COST / 4, 0.0, 0.0, 1.0)


def find_slow(
    window: NDArray[np.float32], lost: LostTime, owners: NDArray[np.int64], limits: Limits
) -> Laggards | None:
    """Return the ranks below the widest gap in what ranks lose, if it is beyond chance and worth a verdict.

    Args:
        window: Seconds observed and waited, collectives compared and come last to, and the exact figures: (10, ranks).
        lost: What each loses.
        owners: Index of each rank's node.
        limits: Limits from which ranks are named.
    """
    known = np.flatnonzero(~np.isnan(lost.frac))
    if float(np.ptp(lost.frac[known])) < limits.cost:
        return None
    order = known[np.argsort(lost.frac[known], kind="stable")]
    gaps = np.diff(lost.frac[order])
    few, some = 1 + int(gaps[: len(known) // 2].argmax()), 1 + int(gaps.argmax())
    found = _judge_split(window, lost, owners, (order[:few], order[few:]), limits)
    if found is not None or 2 * some <= len(known):
        return found
    # More than half are the usual ones, unless they are slow in turns: then the few others always wait.
    if limits.last > 0.0:
        if lost.frac[order[0]] < MAJORITY_IN_TURNS * np.median(lost.frac[order[some:]]):
            return None
        limits = limits._replace(last=MAJORITY_LAST)
    return _judge_split(window, lost, owners, (order[:some], order[some:]), limits)


def _judge_split(
    window: NDArray[np.float32],
    lost: LostTime,
    owners: NDArray[np.int64],
    ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
    limits: Limits,
) -> Laggards | None:
    """Return the slow ones of slow and other ranks, if they exceed the limits."""
    slow, others = ranks
    usual = float(np.median(lost.frac[others]))
    waits = lost.frac[slow]
    is_held_up = waits - waits.min() > IN_TURNS * usual
    if is_held_up.any() and float((usual - waits).sum()) > MAX_IN_TURNS * usual:
        # They are not slow in turns, or what each costs would add up to what the others lose: some wait as well.
        slow, others = slow[~is_held_up], np.append(slow[is_held_up], others)
        usual = float(np.median(lost.frac[others]))
    if limits.last > 0.0:
        is_held_up = _are_held_up(lost, owners, (slow, others), usual, limits.doubt)
        is_held_up |= _are_seen_waiting(window, lost, (slow, others), usual)
        slow, others = slow[~is_held_up], np.append(slow[is_held_up], others)
        if not len(slow):
            return None
    # Samples clear those that wait: what others lose is known from calls alone.
    usual = float(np.median(lost.by_calls[others]))
    costs = usual - lost.frac[slow]
    gap = float(lost.frac[others].min() - lost.frac[slow].max())
    if costs.min() < limits.cost or gap < MIN_SPREAD * costs.max():
        return None
    wait_frac = float(shares(window[1, slow], window[0, slow]).max())
    if wait_frac > limits.seen_waiting:
        return None
    last_frac = _last_frac(window, lost, owners, (slow, others), limits)
    if last_frac is None:
        return None
    is_in_turns = len(slow) > 1 and float(lost.frac[slow].min()) > IN_TURNS * usual
    # Ranks that are slow in turns wait for each other: what they cost adds up. It is never more than others wait.
    costs = usual - lost.by_calls[slow]
    cost = float(min(costs.sum(), usual)) if is_in_turns else _cost(lost, owners, (slow, others), costs)
    if cost < limits.cost:
        return None
    return Laggards(tuple(np.sort(slow).tolist()), wait_frac, cost, None if last_frac < 0.0 else last_frac, is_in_turns)


def _are_held_up(
    lost: LostTime,
    owners: NDArray[np.int64],
    ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
    usual: float,
    doubt: float,
) -> NDArray[np.bool_]:
    """Return which of the slow ranks lose less than the others mainly by a difference between their nodes.

    Where that is uncertain, those of all nodes but the one with the widest gap count too: a rank may lead on its node,
    and wait for another one.
    """
    slow, others = ranks
    own, usual_beside = lost.frac[slow], np.full(len(slow), np.nan)
    for node in np.unique(owners[slow]).tolist():
        is_here, beside = owners[slow] == node, others[owners[others] == node]
        if len(beside):
            usual_beside[is_here] = lost.by_calls[beside].min()
    gaps = usual_beside - own
    found: NDArray[np.bool_] = gaps < MIN_BESIDE * (usual - own)
    is_doubtful = gaps < doubt * lost.node_doubt
    if is_doubtful.any():
        found |= is_doubtful & (owners[slow] != _widest_node(lost, owners))
    return found


def _widest_node(lost: LostTime, owners: NDArray[np.int64]) -> int:
    """Return the index of the node whose first few ranks lose less than the others there by most."""
    known = np.flatnonzero(~np.isnan(lost.frac))
    order = known[np.lexsort((lost.by_calls[known], owners[known]))]
    nodes, begins, counts = np.unique(owners[order], return_index=True, return_counts=True)
    places = np.arange(len(order)) - np.repeat(begins, counts)
    gaps = np.diff(lost.by_calls[order])
    gaps[places[:-1] >= np.repeat(counts, counts)[:-1] // 2] = 0.0
    return int(np.repeat(nodes, counts)[gaps.argmax()])


def _are_seen_waiting(
    window: NDArray[np.float32], lost: LostTime, ranks: tuple[NDArray[np.int64], NDArray[np.int64]], usual: float
) -> NDArray[np.bool_]:
    """Return which of the slow ranks wait by samples, though by their calls they do not.

    The parent of a slow rank in a broadcast's tree is held up by it, and comes late to what follows: it is seen waiting
    more than the slow one, or as much as another one that loses less, or whose loss is not known.
    """
    slow, others = ranks
    waits = shares(window[1], window[0])
    by_calls = lost.by_calls
    unseen = waits[slow] - by_calls[slow]
    found = unseen - unseen.min() > SEEN_WAITING_TOO * (usual - by_calls[slow])
    # The least wait of any of the others that lose less than a slow one.
    others = others[np.argsort(by_calls[others])]
    least = np.minimum.accumulate(np.append(np.inf, waits[others]))
    found |= waits[slow] >= least[np.searchsorted(by_calls[others], by_calls[slow])]
    unknown = np.isnan(lost.frac) & (window[2] > 0) & (window[3] >= MIN_LAST * window[2])
    seen: NDArray[np.bool_] = found | (waits[slow] > waits[unknown].min(initial=1.0))
    return seen


def _cost(
    lost: LostTime,
    owners: NDArray[np.int64],
    ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
    costs: NDArray[np.float64],
) -> float:
    """Return the cost of ranks slow at the same time: the exact difference within a node, where it is plausible."""
    slow, others = ranks
    place = int(costs.argmax())
    beside = others[owners[others] == owners[slow[place]]]
    cost = float(costs[place])
    if not len(beside):
        return cost
    exact = float(np.median(lost.by_calls[beside]) - lost.by_calls[slow[place]])
    return exact if abs(exact - cost) <= lost.node_doubt else cost


def _last_frac(
    window: NDArray[np.float32],
    lost: LostTime,
    owners: NDArray[np.int64],
    ranks: tuple[NDArray[np.int64], NDArray[np.int64]],
    limits: Limits,
) -> float | None:
    """Return how often slow ranks come last on their nodes, -1 for whole nodes; None where it may be chance."""
    slow, others = ranks
    lowest = 1.0
    for node in np.unique(owners[slow]).tolist():
        here, beside = slow[owners[slow] == node], others[owners[others] == node]
        if not len(beside):
            costs = np.median(lost.by_calls[others]) - lost.frac[here]
            doubts = limits.doubt * np.hypot(lost.node_doubt, lost.doubt[here]) if limits.doubt else 0.0
            is_early = window[SPANNED, here] < MIN_NODE_SPANNED_S
            least = np.where(is_early & (limits.doubt >= 1.0), MIN_EARLY_NODE_COST, limits.node_cost)
            if (costs < np.maximum(least, doubts)).any():
                return None
            lowest = -1.0
            continue
        highest, least = here[lost.frac[here].argmax()], beside[lost.by_calls[beside].argmin()]
        doubt = float(np.hypot(lost.doubt[highest], lost.doubt[least]))
        compared, last = window[2:4, here]
        least_last = min(limits.last, MIN_LAST_AWAITED) if _is_awaited(window, here, beside) else limits.last
        gap, num_last = lost.by_calls[least] - lost.frac[highest], float(last.sum())
        is_habit = gap >= MIN_SURE_GAP and _is_habit(window, int(least), float(gap))
        is_always_last = is_habit and _are_always_last(window, here, len(beside))
        if (
            gap < MIN_SPREAD * limits.cost
            or (limits.seen_gap and _seen_gap(window, here, beside) < limits.seen_gap * gap)
            or (gap < limits.doubt * doubt and not is_always_last)
            or num_last < least_last * compared.max()
        ):
            return None
        lowest = min(lowest, float(last.sum() / max(compared.max(), 1.0)))
    return lowest


def _are_always_last(window: NDArray[np.float32], slow: NDArray[np.int64], num_others: int) -> bool:
    """Return whether some ranks of a node come last so often, together, that it cannot be chance."""
    compared, last = window[2:4, slow]
    by_chance = (len(slow) / (len(slow) + num_others)) ** float(window[PIECES, slow].min())
    return bool(last.sum() >= ALWAYS * compared.max() >= ALWAYS * MIN_COMPARED and by_chance <= MAX_CHANCE)


def _is_habit(window: NDArray[np.float32], rank: int, gap: float) -> bool:
    """Return whether a rank has lost its time at many pieces: few long pauses are no habit."""
    spanned, waited, squared, pieces = window[[SPANNED, WAITED, SQUARED, PIECES], rank].astype(np.float64)
    is_often = waited**2 >= min(MIN_HABIT_PIECES, 1.0 + MIN_HABIT_FRAC * pieces) * squared
    longest_frac = math.sqrt(squared) / max(spanned, 1e-9)
    return bool(is_often and gap - longest_frac >= MIN_SURE_GAP / 2)


def _is_awaited(window: NDArray[np.float32], slow: NDArray[np.int64], others: NDArray[np.int64]) -> bool:
    """Return whether some ranks have hardly ever been seen waiting, and all others of their node often."""
    if window[0, slow].min() < MIN_OBSERVED_S:
        return False
    waits = shares(window[1], window[0])
    return bool(waits[slow].max() <= HARDLY and waits[others].min() >= OFTEN)


def _seen_gap(window: NDArray[np.float32], slow: NDArray[np.int64], others: NDArray[np.int64]) -> float:
    """Return how much more of their time others are seen waiting, by samples, than the slow ranks of their node."""
    waits = shares(window[1], window[0])
    return float(waits[others].min() - waits[slow].max())


def find_laggards(
    waited: NDArray[np.float32],
    observed: NDArray[np.float32],
    min_observed_s: float,
    limits: tuple[float, float, float],
) -> Laggards | None:
    """Return the ranks below the widest gap in the fractions waited, if it is wide enough.

    Args:
        waited: Seconds waited, by rank.
        observed: Seconds observed, by rank.
        min_observed_s: Seconds below which a rank is not judged; no rank is while a tenth of the ranks is not.
        limits: The least gap, the most that a laggard waits, the least that all others wait.
    """
    min_gap, max_low, min_high = limits
    judged = np.flatnonzero(observed >= min_observed_s)
    if len(judged) < 2 or len(judged) < 0.9 * len(observed):
        return None
    waited_frac = waited[judged] / observed[judged]
    ordered = np.sort(waited_frac)
    gaps = np.diff(ordered)[: len(judged) // 2]
    widest = int(gaps.argmax())
    low, high = float(ordered[widest]), float(ordered[widest + 1])
    if high - low < min_gap or low > max_low or high < min_high:
        return None
    return Laggards(tuple(judged[waited_frac <= low].tolist()), low, high - low)
