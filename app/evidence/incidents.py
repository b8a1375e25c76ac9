"""Which verdicts are worth evidence, and when. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from app.rows import Severity
from app.wording.verdict_words import sentence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from app.diagnosis.verdicts import Verdict
    from app.rows import Cause

SETTLE_S = 1.0
"""A verdict that stands for less is not worth a file, and more ranks may be found in what follows."""
AGAIN_S = 600.0
"""Between two incidents of one kind and job."""
MAX_INCIDENTS = 20
"""Of one session."""


class Incident(NamedTuple):
    """A hang, a bad end, a lost node: what somebody will want to look at later."""

    job_id: str
    attempt: int
    cause: Cause
    text: str
    """The verdict in words."""


class Incidents:
    """Follows what is said."""

    def __init__(self) -> None:
        self._since_s: dict[tuple[str, int, Cause], float] = {}
        self._kept_at_s: dict[tuple[str, int, Cause], float] = {}
        self._seen_alive: set[tuple[str, int]] = set()
        self._num_begun = 0

    def see_alive(self, attempts: Iterable[tuple[str, int]]) -> None:
        """Take which attempts of jobs have not ended: of one that ended unseen nothing is left to keep."""
        self._seen_alive.update(attempts)

    def begun(self, verdicts: Iterable[Verdict], now_s: float) -> list[Incident]:
        """Take what is said now; return the incidents that have just become certain."""
        critical = {
            (verdict.job, verdict.attempt, verdict.cause): verdict
            for verdict in verdicts
            if verdict.severity is Severity.CRITICAL and (verdict.job, verdict.attempt) in self._seen_alive
        }
        self._since_s = {key: self._since_s.get(key, now_s) for key in critical}
        found = []
        for key, verdict in critical.items():
            is_new = now_s - self._kept_at_s.get(key, float("-inf")) >= AGAIN_S
            if is_new and now_s - self._since_s[key] >= SETTLE_S and self._num_begun < MAX_INCIDENTS:
                self._kept_at_s[key] = now_s
                self._num_begun += 1
                found.append(Incident(*key, sentence(verdict)))
            elif not is_new:
                self._kept_at_s[key] = now_s  # one that lasts is one
        return found
