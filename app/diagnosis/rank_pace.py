"""How the ranks of a job have spent the last seconds: waiting, in which phase, and who came last. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ddpcore.wire import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

PHASES = tuple(Phase)

MIN_OBSERVED_S = 3.0
"""Less observed time of a rank says nothing of how it spends it: a dozen samples."""
MIN_COMPARED = 20
"""Fewer collectives may have the same last rank by chance."""
SAMPLES_HZ = 4.0
"""A probe looks about so often."""
CHANCE_SIGMAS = 3.0
COST_BUCKET = 0.05
"""Ranks are ordered by cost in steps of this: sampling moves the figures by a little, and rows should stay in place."""


class RankPace(msgspec.Struct, frozen=True, eq=False):
    """Shares of time by rank, NaN where a rank has not been observed long enough."""

    window_s: float
    """Undisturbed time that was looked at: none in which a rank was frozen, gone, or at a checkpoint."""
    observed_s: NDArray[np.float64]
    """Of each rank."""
    wait_frac: NDArray[np.float64]
    cost_frac: NDArray[np.float64]
    """How much less it waits than the others in the middle: what they lose to it; 0 of most."""
    last_frac: NDArray[np.float64]
    """Of the collectives that its node has compared, those to which it came last; NaN where few were."""
    phase_frac: NDArray[np.float64]
    """(phases, ranks): time that it worked, by what it did."""

    @property
    def usual_frac(self) -> NDArray[np.float64]:
        """Return the share of each phase in the middle of the ranks."""
        known = self.phase_frac[:, ~np.isnan(self.wait_frac)]
        return np.median(known, axis=1) if known.shape[1] else np.zeros(len(PHASES))

    def slowest_first(self) -> NDArray[np.int64]:
        """Return the ranks that were observed, the costliest first, equals by number."""
        known = np.flatnonzero(~np.isnan(self.cost_frac))
        buckets = np.floor(self.cost_frac[known] / COST_BUCKET + 0.5)
        order: NDArray[np.int64] = known[np.lexsort((known, -buckets))]
        return order


def chance_frac(usual_frac: NDArray[np.float64], observed_s: float) -> NDArray[np.float64]:
    """Return how far shares of a rank's time may lie from what is usual, by chance: they are counts of samples."""
    num_samples = max(1.0, SAMPLES_HZ * observed_s)
    spread: NDArray[np.float64] = np.sqrt(usual_frac * (1.0 - usual_frac) / num_samples)
    return CHANCE_SIGMAS * spread


def rank_pace(window: NDArray[np.float32], window_s: float) -> RankPace:
    """Return how ranks spent a window.

    Args:
        window: Seconds observed and waited, collectives compared and come last to, seconds worked in each phase:
            (4 + phases, ranks).
        window_s: How long it is.
    """
    observed, waited, compared, last = window[:4].astype(np.float64)
    is_known = observed >= MIN_OBSERVED_S
    wait_frac = _divided(waited, observed, is_known)
    cost_frac = np.full(len(observed), np.nan)
    known = np.flatnonzero(is_known)
    if len(known) > 1:
        # The median of all others: of everybody with one of the two in the middle left out, as in a sorted row.
        share = wait_frac[known]
        ordered, place = np.sort(share), np.empty(len(share), np.int64)
        place[np.argsort(share, kind="stable")] = np.arange(len(share))
        low, high = (len(share) - 2) // 2, (len(share) - 1) // 2
        others = (ordered[low + (place <= low)] + ordered[high + (place <= high)]) / 2
        cost_frac[known] = np.clip(others - share, 0.0, None)
    phases = window[4:].astype(np.float64)
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
