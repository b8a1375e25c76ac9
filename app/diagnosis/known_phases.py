"""How long checkpoints and evaluations take in this job: one that takes its usual time is no fault."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.model.job_model import PHASE_CODE, which_phases
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from app.model.job_model import JobModel

LEARNED = (Phase.CHECKPOINT, Phase.EVAL)
USUAL_FACTOR = 2.0
"""Multiple of the longest one so far that is still usual: data sets and disks vary."""
SHORT_DIVISOR = 10
"""Divisor of the patience for a first one; a phase no longer than the result is always usual."""
_IS_LEARNED = which_phases(*LEARNED)


class RankPlaces:
    """Lines at which ranks that others wait for stand, and since when."""

    def __init__(self) -> None:
        self._stood: dict[int, tuple[int, float]] = {}

    def watch(self, job: JobModel, ranks: Iterable[int], now_s: float) -> None:
        """Sample the ranks that others wait for now; the others are forgotten.

        One that was not watched before, as by a console that has just attached, stands as long as its probe reports.
        """
        before, self._stood = self._stood, {}
        for rank in ranks:
            place = int(job.place[rank])
            known = before.get(rank)
            if known is None:
                stood_s = float(job.stood_s[rank])
                self._stood[rank] = (place, min(now_s, float(job.report_at_s[rank]) - stood_s) if stood_s else now_s)
            else:
                self._stood[rank] = known if known[0] == place else (place, now_s)

    def stood_s(self, rank: int, now_s: float) -> float:
        """Return how long a rank has been seen at its present line; 0 for one that no other waits for."""
        return now_s - self._stood[rank][1] if rank in self._stood else 0.0


class KnownPhases:
    """The durations of one attempt's known phases, the longest of each kind.

    Only phases that others waited for count: a rank that passes through one while another rank saves shows no duration.
    """

    def __init__(self, world_size: int, patience_s: float) -> None:
        """`patience_s` is for the first one of a job."""
        self._patience_s = patience_s
        self._phase = np.full(world_size, -1, np.int8)
        self._lasted_s = np.zeros(world_size)
        self._is_awaited = np.zeros(world_size, np.bool_)
        self._longest_s: dict[Phase, float] = {}
        self._left_s = np.full(world_size, -np.inf)
        """When each rank was first seen outside such a phase."""

    def watch(self, job: JobModel, awaited: Iterable[int]) -> None:
        """Sample the phases; one that a rank has left, and in which others waited for it, is learned."""
        has_changed = self._phase != job.phase
        is_left = _IS_LEARNED[self._phase] & has_changed
        self._left_s[is_left] = job.report_at_s[is_left]
        is_left &= self._is_awaited
        self._is_awaited[has_changed] = False
        self._is_awaited[list(awaited)] = True
        for phase in LEARNED:
            lasted_s = self._lasted_s[is_left & (self._phase == PHASE_CODE[phase])]
            if len(lasted_s):
                self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), float(lasted_s.max()))
        np.copyto(self._phase, job.phase)
        np.subtract(job.report_at_s, job.phase_since_s, out=self._lasted_s)

    def have_just_left(self, job: JobModel, since_s: float) -> NDArray[np.bool_]:
        """Return which ranks have left such a phase since some moment, and may be on their way to the others now."""
        return (self._left_s > since_s) & ~_IS_LEARNED[job.phase]

    def usual_s(self, phase: Phase) -> float | None:
        """Return the longest that such a phase has taken; None before the first has ended."""
        return self._longest_s.get(phase)

    def is_usual(self, phase: Phase, lasts_s: float) -> bool:
        """Return whether a phase that has lasted so long is still usual."""
        usual_s = self._longest_s.get(phase)
        first_s = self._patience_s
        return lasts_s <= (first_s if usual_s is None else max(USUAL_FACTOR * usual_s, first_s / SHORT_DIVISOR))
