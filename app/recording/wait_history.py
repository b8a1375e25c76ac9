"""The waits of a job that are over: who waited how long, and for whom, at each of the last ones.

Fed with every look at the model, live or of a recording. What lasts shorter than a few looks is not seen, or not whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.causes import Severity
from app.text import clean_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.diagnosis.waits import Wait
    from app.view.rows import BarrierRow
    from app.view.view import View

MIN_WAIT_S = 0.5
"""Of a wait that is kept: three looks at the model, so that its length is known to a third."""
MAX_WAITS = 64
"""The newest; of 16,384 ranks each takes 130 kB."""

_ORDER = (Severity.OK, Severity.QUIET, Severity.WARNING, Severity.CRITICAL)
Key = tuple[int, str, int]


class PastWait(msgspec.Struct, frozen=True, eq=False):
    """A wait as it was when it was seen last."""

    key: Key
    """What tells it from other waits of its job."""
    row: BarrierRow
    """`missing` has those that came last, as far as that was seen; `waiting` has nobody: see `ranks`."""
    ranks: NDArray[np.int32]
    """Who waited, ascending."""
    waited_s: NDArray[np.float32]
    """How long each of them did."""
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
        """`min_wait_s` is the least of a wait that is kept; more where looks are further apart."""
        self._min_wait_s = min_wait_s
        self._over: deque[PastWait] = deque(maxlen=MAX_WAITS)
        self._standing: dict[Key, PastWait] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> WaitHistory:
        """Return what will not grow with this one; the waits themselves do not change."""
        copied = WaitHistory(self._min_wait_s)
        copied._over, copied._standing = self._over.copy(), self._standing.copy()
        return copied

    @property
    def over(self) -> Sequence[PastWait]:
        """Those that are over, the oldest first."""
        return self._over

    def observe(self, view: View, job_id: str) -> None:
        """Look at the model once more: keep what waits stand, and which do no longer."""
        standing: dict[Key, PastWait] = {}
        for wait in view.waits:
            if wait.waited_s >= self._min_wait_s and clean_name(wait.job) == job_id:
                key = (wait.attempt, wait.group, wait.seq)
                standing[key] = _grown(key, self._standing.get(key) or self._come_back(key), view, wait)
        self._over.extend(past for key, past in self._standing.items() if key not in standing)
        self._standing = standing

    def reach_back(self, past: WaitHistory) -> None:
        """Take the waits of before; of those that both have seen, what is seen here lasts."""
        own = {wait.key for wait in (*self._over, *self._standing.values())}
        before = [wait for wait in (*past.over, *past._standing.values()) if wait.key not in own]
        self._over = deque(sorted((*before, *self._over), key=lambda wait: wait.seen_s), maxlen=MAX_WAITS)

    def _come_back(self, key: Key) -> PastWait | None:
        """Return a wait that seemed to be over, and stands again: a report was lost on its way."""
        for past in reversed(self._over):
            if past.key == key:
                self._over.remove(past)
                return past
        return None


def _grown(key: Key, before: PastWait | None, view: View, wait: Wait) -> PastWait:
    """Return a wait with what is known of it now."""
    row, now_s = view.barrier_row(wait), view.now_s
    ranks, waited_s = wait.waiting, now_s - wait.since_s
    if before is not None:
        worst = max(row.severity, before.row.severity, key=_ORDER.index)
        last = row if row.missing or not before.row.missing else before.row
        row = msgspec.structs.replace(last, waited_s=row.waited_s, severity=worst)
        ranks, waited_s = np.concatenate([ranks, before.ranks]), np.concatenate([waited_s, before.waited_s])
    known, first = np.unique(ranks, return_index=True)
    row = msgspec.structs.replace(row, waiting=[])
    return PastWait(key, row, known.astype(np.int32), waited_s[first].astype(np.float32), now_s)
