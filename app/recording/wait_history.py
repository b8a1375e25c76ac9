"""The past waits of a job: for each of the last ones which ranks waited, how long, and for which.

Fed with every view of the model, live or of a recording. A wait shorter than a few views is not seen, or not whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.causes import Severity
from app.text import clean_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.diagnosis.waits import Wait
    from app.view.ranks import BarrierRow
    from app.view.view import View

MIN_WAIT_S = 0.5
"""Least seconds of a wait that is kept: three views of the model, so that its length is known to a third."""
MAX_WAITS = 64
"""Limit of waits kept, the latest; of 16,384 ranks each takes 130 kB."""

_ORDER = (Severity.OK, Severity.QUIET, Severity.WARNING, Severity.CRITICAL)


class WaitKey(NamedTuple):
    """What distinguishes a wait from others of its job."""

    attempt: int
    group: str
    seq: int


class PastWait(msgspec.Struct, frozen=True, eq=False):
    """A wait as it was when it was seen last."""

    key: WaitKey
    row: BarrierRow
    """Row of the wait: `missing` has those that came last, as far as seen; `waiting` is empty: see `ranks`."""
    ranks: NDArray[np.int32]
    """Ranks that waited, ascending."""
    waited_s: NDArray[np.float32]
    """Seconds that each of them waited."""
    seen_s: float
    """When it was seen last: it ended shortly after."""

    @property
    def shown_row(self) -> BarrierRow:
        return msgspec.structs.replace(self.row, waiting=self.ranks.tolist())

    def is_missing(self, rank: int) -> bool:
        """Return whether the others waited for a rank."""
        missing = self.row.missing
        place = bisect_left(missing, rank)
        return place < len(missing) and missing[place] == rank

    def waited_by(self, rank: int) -> float:
        """Return how long a rank waited; 0 for one that did not."""
        place = int(np.searchsorted(self.ranks, rank))
        return float(self.waited_s[place]) if place < len(self.ranks) and self.ranks[place] == rank else 0.0


class WaitHistory:
    """The last waits of one job, over its attempts."""

    def __init__(self, min_wait_s: float = MIN_WAIT_S) -> None:
        """`min_wait_s` is the least of a wait that is kept; more where views are further apart."""
        self._min_wait_s = min_wait_s
        self._over: deque[PastWait] = deque(maxlen=MAX_WAITS)
        self._standing: dict[WaitKey, PastWait] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> WaitHistory:
        """Return a copy that will not grow with this one; the waits themselves do not change."""
        copied = WaitHistory(self._min_wait_s)
        copied._over, copied._standing = self._over.copy(), self._standing.copy()
        return copied

    @property
    def over(self) -> Sequence[PastWait]:
        """Waits that are over, the oldest first."""
        return self._over

    def observe(self, view: View, job_id: str) -> None:
        """Update the waits that stand, and keep those that no longer do."""
        standing: dict[WaitKey, PastWait] = {}
        for wait in view.waits:
            if wait.waited_s >= self._min_wait_s and clean_name(wait.job) == job_id:
                key = WaitKey(wait.attempt, wait.group, wait.seq)
                standing[key] = _grown(key, self._standing.get(key) or self._come_back(key), view, wait)
        self._over.extend(past for key, past in self._standing.items() if key not in standing)
        self._standing = standing

    def reach_back(self, past: WaitHistory) -> None:
        """Take the waits of before; of those that both have seen, what is seen here prevails."""
        own = {wait.key for wait in (*self._over, *self._standing.values())}
        before = [wait for wait in (*past.over, *past._standing.values()) if wait.key not in own]
        self._over = deque(sorted((*before, *self._over), key=lambda wait: wait.seen_s), maxlen=MAX_WAITS)

    def _come_back(self, key: WaitKey) -> PastWait | None:
        """Return a wait that seemed to be over, and stands again: a report was lost in transit."""
        for past in reversed(self._over):
            if past.key == key:
                self._over.remove(past)
                return past
        return None


def _grown(key: WaitKey, before: PastWait | None, view: View, wait: Wait) -> PastWait:
    """Return a wait with what is known of it now."""
    row, now_s = view.barrier_row(wait), view.now_s
    ranks, waited_s = wait.waiting, now_s - wait.since_s
    if before is not None:
        worst = max(row.severity, before.row.severity, key=_ORDER.index)
        last = row if row.missing or not before.row.missing else before.row
        row = msgspec.structs.replace(last, waited_s=row.waited_s, severity=worst)
        ranks, waited_s = np.concatenate([ranks, before.ranks]), np.concatenate([waited_s, before.waited_s])
    known, first = np.unique(ranks, return_index=True)
    # Who has waited here did not come last, though a report of another node, of a moment before, may say so.
    missing = np.setdiff1d(row.missing, known).tolist()
    where = row.missing_where if missing[:1] == row.missing[:1] else ""
    row = msgspec.structs.replace(row, waiting=[], missing=missing, missing_where=where)
    return PastWait(key, row, known.astype(np.int32), waited_s[first].astype(np.float32), now_s)
