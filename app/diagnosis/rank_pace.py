"""How the ranks of a job have spent the last seconds: waiting, in which phase, and which came last. Pure.

What a rank loses to others is known exactly: its node compares when each rank has called what. Only what a whole node
loses to others is sampled where no rank reports steps, from the average wait of all its ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PHASES = tuple(Phase)

NUM_SAMPLED_ROWS = 4 + len(PHASES)
"""Number of a window's sampled rows; the exact figures follow, in the order of `agent.wire.digest.LATENESS`."""

MIN_OBSERVED_S = 3.0
"""Least observed seconds from which a rank's use of time is judged: a dozen samples."""
MIN_COMPARED = 20
"""Least number of compared collectives: fewer may have the same last rank by chance."""
SAMPLES_HZ = 4.0
"""Samples of a probe per second, roughly."""
CHANCE_SIGMAS = 3.0
MIN_SPANNED_S = 1.0
"""Least seconds between calls: with hundreds of calls a second, a report holds those of few steps."""
MIN_PIECES = 5
"""Least number of steps, or quarters of a second: fewer may differ by chance."""
MIN_LONG_PIECES = 3
MIN_LONG_S = 8.0
"""Least seconds of `MIN_LONG_PIECES` steps of some seconds each."""
SURE_SIGMAS = 4.5
UNSEEN_SIGMAS = 3.0
"""Standard errors from which samples show more waiting than the calls do: a rank that waits is not the slow one."""
MIN_UNSEEN = 0.2
"""Least fraction of time for that: samples of a step about as long as a probe's tick are not independent."""
MIN_VARIANCE = 0.05
"""Least variance of a sample: the error of samples that are all alike is not zero."""
FEW_SIGMAS = 40.0
"""Standard errors added for one piece, fewer for more. There are many windows in a night, and many ranks in a job, and
a standard error of n pieces is itself uncertain: with 5, 12 and 60 of them 12.5, 7.8 and 5.2 of it are exceeded by
chance once in 8,000 to 1,000,000 windows (Student's t)."""
MIN_KNOWN = 0.9
MIN_SAMPLED_S = 4.5
"""Least sampled seconds from which nodes are distinguished."""
MIN_STEPPED = 0.5
"""Least fraction of the time between calls with steps in which the time behind the last call is known."""
MIN_SEEN = 1 / 3
"""Least fraction of a node's time behind its last calls that samples must show as waiting, or none of it is."""
MIN_FULL_SLOTS = 3
MIN_HABIT = 0.05
"""Least fraction of a straggler's time beyond the others' that explains why it is slow."""
COST_BUCKET = 0.05
"""Step of cost by which ranks are ordered: sampling moves the figures a little, and rows should stay in place."""


class Recent(NamedTuple):
    """Figures of some seconds."""

    total: NDArray[np.float32]
    """Seconds observed and waited, collectives compared and come last to, and the exact figures in the order of
    `agent.wire.digest.LATENESS`: (4 + 6, ranks)."""
    steps: NDArray[np.float32]
    """The last two of these by slot: (2, slots, ranks)."""
    samples: NDArray[np.float32]
    """The first two of them by slot: (2, slots, ranks)."""
    longest_wait_s: float = 0.0
    """Longest single wait in seconds."""
    samples_hz: float = SAMPLES_HZ
    """Samples of probes per second: fewer where nodes are overloaded."""


class LostTime(NamedTuple):
    """Time that ranks lose to slower ones, as fractions; NaN where that is not known."""

    frac: NDArray[np.float64]
    doubt: NDArray[np.float64]
    """How far fractions of ranks of one node may differ by chance."""
    node_doubt: float
    """How far those of two nodes may."""
    by_calls: NDArray[np.float64]
    """Fraction known from the times of calls: less than `frac` where ranks wait for others than those that come last,
    as the ranks do that pass on a broadcast."""


class Habit(msgspec.Struct, frozen=True):
    """The phase in which ranks spend more time than others."""

    phase: Phase
    frac: float
    """Fraction of their time."""
    others_frac: float
    """Median fraction of the others' time."""


class RankPace(msgspec.Struct, frozen=True, eq=False):
    """Fractions of time by rank, NaN where a rank has not been observed long enough."""

    window_s: float
    """Seconds of undisturbed time: without any in which a rank was frozen, gone, or at a checkpoint."""
    observed_s: NDArray[np.float64]
    """Seconds observed of each rank."""
    wait_frac: NDArray[np.float64]
    cost_frac: NDArray[np.float64]
    """How much less it waits than the median of the others: what they lose to it; 0 for most."""
    last_frac: NDArray[np.float64]
    """Fraction of the collectives compared by its node to which it came last; NaN where few were."""
    phase_frac: NDArray[np.float64]
    """(phases, ranks): time that it worked, by phase."""
    longest_wait_s: float = 0.0
    """Longest single wait in the window."""

    @property
    def usual_frac(self) -> NDArray[np.float64]:
        """Median fraction of each phase over the ranks."""
        known = self.phase_frac[:, ~np.isnan(self.wait_frac)]
        return np.median(known, axis=1) if known.shape[1] else np.zeros(len(PHASES))

    def slowest_first(self) -> NDArray[np.int64]:
        """Return the ranks that were observed, the costliest first, equals by number."""
        known = np.flatnonzero(~np.isnan(self.cost_frac))
        buckets = np.floor(self.cost_frac[known] / COST_BUCKET + 0.5)
        order: NDArray[np.int64] = known[np.lexsort((known, -buckets))]
        return order


def lost_time(recent: Recent, owners: NDArray[np.int64]) -> LostTime | None:
    """Return what ranks lose to slower ones of the job; None while too few of them are known.

    Args:
        recent: Figures of the ranks.
        owners: Index of each rank's node.
    """
    total = recent.total.astype(np.float64)
    spanned, waited, squared, num = total[4:8]
    is_known = (num >= MIN_PIECES) & (spanned >= MIN_SPANNED_S) | (num >= MIN_LONG_PIECES) & (spanned >= MIN_LONG_S)
    if is_known.sum() < max(2, MIN_KNOWN * len(is_known)):
        return None
    frac, doubt = np.full((2, len(is_known)), np.nan)
    frac[is_known] = waited[is_known] / spanned[is_known]
    variance = np.clip(squared - waited**2 / np.maximum(num, 1.0), 0.0, None) * num / np.maximum(num - 1.0, 1.0)
    doubt[is_known] = (_num_sigmas(num) * np.sqrt(variance))[is_known] / spanned[is_known]
    known = np.flatnonzero(is_known)
    by_calls = frac.copy()
    node_doubt = 0.0
    observed = np.maximum(total[0, known], 1e-9)
    sampled = np.clip(total[1, known] / observed, 0.0, 1.0)
    if (owners[known] != owners[known[0]]).any():
        if float(observed.mean()) < MIN_SAMPLED_S:
            return None
        by_node, node_doubt = _between_nodes(recent, frac, owners, known)
        # Time that every node spends so is no waiting.
        by_calls[known] += by_node[owners[known]] - by_node[owners[known]].min()
    # A collective itself takes time on all ranks: what some ranks wait beyond that does not show in their calls.
    unseen = sampled - by_calls[known]
    unseen -= unseen.min()
    error = np.sqrt(np.maximum(sampled * (1.0 - sampled), MIN_VARIANCE) / np.maximum(recent.samples_hz * observed, 1.0))
    is_sure = unseen > np.maximum(MIN_UNSEEN, UNSEEN_SIGMAS * error)
    # No rank waits more than its samples show, also where samples happen to miss what others wait.
    most = np.maximum(sampled - by_calls[known], 0.0)
    frac[known] = by_calls[known] + np.where(is_sure, np.minimum(unseen - error, most), 0.0)
    return LostTime(frac, doubt, node_doubt, by_calls)


def _between_nodes(
    recent: Recent, frac: NDArray[np.float64], owners: NDArray[np.int64], known: NDArray[np.int64]
) -> tuple[NDArray[np.float64], float]:
    """Return the fraction of their time that the ranks of each node wait for other nodes, and its error by chance.

    Args:
        recent: Figures of the ranks.
        frac: What each loses to ranks of its own node.
        owners: Index of each rank's node.
        known: Ranks for which that is known.
    """
    total = recent.total.astype(np.float64)
    observed = np.maximum(total[0, known], 1e-9)
    observed_s = float(observed.mean())
    num_ranks = np.maximum(np.bincount(owners[known]), 1)
    by_samples = np.bincount(owners[known], np.clip(total[1, known] / observed - frac[known], 0.0, 1.0)) / num_ranks
    num_samples = recent.samples_hz * observed_s * num_ranks[owners[known]].min()
    middle = float(np.clip(by_samples.max(), 0.1, 0.5))
    # Samples of one wait count as one: it may be long, and there may be several such.
    _, error, _ = _node_means(recent.samples[:, :, known], owners[known])
    by_chance = max(error, math.sqrt(middle * (1.0 - middle) / num_samples))
    samples_doubt = SURE_SIGMAS * by_chance + recent.longest_wait_s / observed_s
    if (total[8, known] < MIN_STEPPED * total[4, known]).mean() > 1.0 - MIN_KNOWN:
        return by_samples, samples_doubt
    by_steps, error, num_slots = _node_means(recent.steps[:, :, known], owners[known])
    by_steps -= by_steps[owners[known]].min()
    seen = by_samples - by_samples[owners[known]].min()
    is_less = by_steps < seen - UNSEEN_SIGMAS * by_chance
    is_more = (by_steps > seen + UNSEEN_SIGMAS * by_chance) & (seen < MIN_SEEN * by_steps)
    if (is_less | is_more).any():
        # They wait for other nodes elsewhere than at the end of a step, or do something else there.
        return by_samples, samples_doubt
    return by_steps, float(_num_sigmas(np.float64(max(num_slots, 1)))) * error


def _node_means(rows: NDArray[np.float32], owners: NDArray[np.int64]) -> tuple[NDArray[np.float64], float, int]:
    """Return each node's fraction of its ranks' time, the highest standard error of one, and the number of slots.

    A slot that is longer than others weighs more in the fraction, and also in the error: one long step is one step.
    Slots are joined until each node has some time in them, where that leaves more of them than leaving some out does:
    steps are reported several at a time.

    Args:
        rows: Seconds, and those that count: (2, slots, ranks).
        owners: Index of each rank's node.
    """
    if (np.diff(owners) >= 0).all():
        starts = np.flatnonzero(np.diff(owners, prepend=-1))
        whole, part = np.zeros((2, rows.shape[1], int(owners[-1]) + 1))
        whole[:, owners[starts]], part[:, owners[starts]] = np.add.reduceat(rows, starts, axis=2)
    else:
        whole, part = np.array([[np.bincount(owners, row) for row in slots] for slots in rows])
    whole_s = whole.sum(axis=0)
    means: NDArray[np.float64] = _ratio(part.sum(axis=0), whole_s)
    has_some = (whole > 0.0)[:, whole_s > 0.0]
    is_full, bounds = has_some.all(axis=1), _bounds_of_joined(has_some)
    # What is joined counts as one fewer: errors of few slots are themselves uncertain.
    num = max(int(is_full.sum()), len(bounds) - 2)
    if num < MIN_FULL_SLOTS:
        return means, math.inf, num
    if num == is_full.sum():
        whole, part = whole[is_full], part[is_full]
    else:
        whole, part = (np.add.reduceat(each[: bounds[-1]], bounds[:-1], axis=0) for each in (whole, part))
    squares = ((part - means * whole) ** 2).sum(axis=0)
    errors = _ratio(np.sqrt(squares * len(whole) / (len(whole) - 1)), whole.sum(axis=0))
    return means, float(errors.max()), num


def _bounds_of_joined(has_some: NDArray[np.bool_]) -> list[int]:
    """Return where slots begin that are joined until each node has some time in them, and where the last one ends."""
    bounds, seen = [0], np.zeros(has_some.shape[1], np.bool_)
    for place, slot in enumerate(has_some):
        seen |= slot
        if seen.all():
            bounds.append(place + 1)
            seen[:] = False
    return bounds


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0.0)


def _num_sigmas(num: NDArray[np.float64] | np.float64) -> NDArray[np.float64]:
    """Return how many standard errors are beyond chance: more where the error itself is uncertain."""
    found: NDArray[np.float64] = SURE_SIGMAS + FEW_SIGMAS / np.maximum(num, 1.0)
    return found


def chance_frac(usual_frac: NDArray[np.float64], observed_s: float) -> NDArray[np.float64]:
    """Return how far fractions of a rank's time may lie from the usual by chance: they are counts of samples.

    What few samples have not seen at all is still no zero (Laplace's rule): two of 24 in a phase are no habit.
    """
    num_samples = max(1.0, SAMPLES_HZ * observed_s)
    likely_frac = (usual_frac * num_samples + 1.0) / (num_samples + 2.0)
    spread: NDArray[np.float64] = np.sqrt(likely_frac * (1.0 - likely_frac) / num_samples)
    return CHANCE_SIGMAS * spread


def rank_pace(window: NDArray[np.float32], window_s: float, lost: LostTime | None = None) -> RankPace:
    """Return how ranks spent a window.

    Args:
        window: Seconds observed and waited, collectives compared and come last to, seconds worked in each phase:
            (4 + phases or more, ranks).
        window_s: Length of the window in seconds.
        lost: What the ranks lose, where that is known exactly: costs are differences of it.
    """
    observed, waited, compared, last = window[:4].astype(np.float64)
    is_known = observed >= MIN_OBSERVED_S
    wait_frac = _divided(waited, observed, is_known)
    cost_frac = np.full(len(observed), np.nan)
    of_cost = wait_frac if lost is None else lost.frac
    known = np.flatnonzero(is_known & ~np.isnan(of_cost))
    if len(known) > 1:
        # The median of all others: of all ranks with one of the two in the middle left out, as in a sorted row.
        fractions = of_cost[known]
        ordered, place = np.sort(fractions), np.empty(len(fractions), np.int64)
        place[np.argsort(fractions, kind="stable")] = np.arange(len(fractions))
        low, high = (len(fractions) - 2) // 2, (len(fractions) - 1) // 2
        others = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
        cost_frac[known] = np.clip(others - fractions, 0.0, None)
    phases = window[4:NUM_SAMPLED_ROWS].astype(np.float64)
    return RankPace(
        window_s=window_s,
        observed_s=observed,
        wait_frac=wait_frac,
        cost_frac=cost_frac,
        last_frac=_divided(last, compared, is_known & (compared >= MIN_COMPARED)),
        phase_frac=np.stack([_divided(phase, observed, is_known) for phase in phases]),
    )


def _divided(part: NDArray[np.float64], whole: NDArray[np.float64], is_known: NDArray[np.bool_]) -> NDArray[np.float64]:
    found = np.full(len(whole), np.nan)
    found[is_known] = np.clip(part[is_known] / whole[is_known], 0.0, 1.0)
    return found


def shares(seconds: NDArray[np.float32], observed: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return fractions of the observed time, 0 where nothing was observed."""
    return np.divide(seconds, observed, out=np.zeros_like(seconds), where=observed > 0.0)


def habit_of(whole: NDArray[np.float32], ranks: Sequence[int]) -> Habit | None:
    """Return the phase in which some ranks spend the most time beyond what others do; None where none stands out."""
    fractions = shares(whole[4:NUM_SAMPLED_ROWS], whole[0])
    is_asked = np.zeros(fractions.shape[1], np.bool_)
    is_asked[list(ranks)] = True
    others = ~is_asked & (whole[0] > 0.0)
    if not others.any():
        return None
    own, usual = np.median(fractions[:, is_asked], axis=1), np.median(fractions[:, others], axis=1)
    most = int((own - usual).argmax())
    chance = float(chance_frac(usual[most], float(whole[0, is_asked].sum())))
    if own[most] - usual[most] < max(MIN_HABIT, chance):
        return None
    return Habit(PHASES[most], float(own[most]), float(usual[most]))
