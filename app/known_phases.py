"""How long checkpoints and evaluations take in this job: one that takes its usual time is no trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.job_model import PHASE_CODE
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from app.job_model import JobModel

LEARNED = (Phase.CHECKPOINT, Phase.EVAL)
FIRST_PATIENCE_S = 300.0
"""For the first one of a job, of which nobody knows how long it takes."""
USUAL_FACTOR = 2.0
"""The longest one so far, this many times over, is still nothing to speak of: data sets and disks vary."""
_CODES = np.array([PHASE_CODE[phase] for phase in LEARNED], np.int8)


class KnownPhases:
    """The durations of one attempt's known phases, the longest of each kind."""

    def __init__(self, world_size: int) -> None:
        self._phase = np.full(world_size, -1, np.int8)
        self._lasted_s = np.zeros(world_size)
        self._longest_s: dict[Phase, float] = {}

    def watch(self, job: JobModel) -> None:
        """Look at the phases; one that a rank has left is learned."""
        is_left = np.isin(self._phase, _CODES) & (self._phase != job.phase)
        for phase, code in zip(LEARNED, _CODES.tolist(), strict=True):
            lasted_s = self._lasted_s[is_left & (self._phase == code)]
            if len(lasted_s):
                self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), float(lasted_s.max()))
        np.copyto(self._phase, job.phase)
        np.subtract(job.report_at_s, job.phase_since_s, out=self._lasted_s)

    def usual_s(self, phase: Phase) -> float | None:
        """Return the longest that such a phase has taken; None before the first has ended."""
        return self._longest_s.get(phase)

    def is_usual(self, phase: Phase, lasts_s: float) -> bool:
        """Return whether one that has lasted so long is nothing to speak of."""
        usual_s = self._longest_s.get(phase)
        return lasts_s <= (FIRST_PATIENCE_S if usual_s is None else max(USUAL_FACTOR * usual_s, FIRST_PATIENCE_S / 10))
