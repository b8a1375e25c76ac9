"""What is known of ranks without their reports: by their processes, by their output, and by anomalies of the job.

`Output` and `outside_text` are for a rank without a probe, which is watched by its process and by what it prints.

`AnomalyRanks` holds the anomalies that limit what can be seen of a job's ranks: kept by rank, reported once for the
job. Some ranks have no probe; others run under settings that blind the probe or slow training down. None of it is a
fault, and all of it is reported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agent.wire.digest import ANOMALIES, RECORDER_MISSING_BIT
from app.text import ranks_text, seconds_text
from ddpcore.wire import Anomaly

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agent.wire.reports import WorkerReport

LONG_QUIET_S = 60.0
LEAST_GAP_S = 1.0
"""Seconds between two outputs below which a job has no usual interval."""
QUIET_FACTOR = 3.0
"""Multiple of the longest interval so far. An unprobed job is quiet when no rank has printed for longer than that, and
than `LONG_QUIET_S`."""


class Output:
    """When the ranks of a job print.

    Attributes:
        last_s: When any of them printed last; None before the first output.
    """

    def __init__(self) -> None:
        self.last_s: float | None = None
        self._longest_gap_s = 0.0

    def put(self, at_s: NDArray[np.float64]) -> None:
        """Take when ranks last printed, as nodes report."""
        news = at_s if self.last_s is None else at_s[at_s > self.last_s]
        if not len(news):
            return
        if self.last_s is not None:
            gaps_s = np.diff(np.sort(news), prepend=self.last_s)
            self._longest_gap_s = max(self._longest_gap_s, float(gaps_s.max()))
        self.last_s = float(news.max())

    def is_too_quiet(self, now_s: float) -> bool:
        """Return whether the ranks have been quiet for longer than usual."""
        if self.last_s is None or self._longest_gap_s < LEAST_GAP_S:
            return False  # its usual interval is not known
        return now_s - self.last_s > max(LONG_QUIET_S, QUIET_FACTOR * self._longest_gap_s)


def outside_text(worker: WorkerReport, why_of_adopted: str | None = None) -> str:
    """Return `watched from outside: printed 3.2 s ago, 0.9 cores busy`.

    Args:
        worker: The rank.
        why_of_adopted: Why it has no probe, where no agent has launched it: then what it prints is not seen.
    """
    if why_of_adopted is not None:
        return f"no probe ({why_of_adopted or NO_PLUGIN}): {worker.cpu_cores:.1f} cores busy"
    if worker.quiet_s >= worker.seen_s:
        output = f"has printed nothing in {seconds_text(worker.seen_s)}"
    else:
        output = f"printed {seconds_text(worker.quiet_s)} ago"
    return f"watched from outside: {output}, {worker.cpu_cores:.1f} cores busy"


PROBE_PATIENCE_S = 60.0
"""Seconds a rank may take to import torch before it is reported as unprobed; it may get a probe later."""

RECORDER_MISSING = "recorder_missing"
UNPROBED = "unprobed"
UNPROBED_BIT = 1 << 8
NO_PLUGIN = "torch not imported, or one that loads no probe"

_TEXTS = {
    RECORDER_MISSING: "this torch has no flight recorder (2.8 and newer have): collectives are not seen, lines are",
    Anomaly.RECORDER_OFF: "the flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0): collectives are not seen, "
    "lines are",
    Anomaly.DEBUG_DETAIL: "TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives take longer and are not seen, lines are; with "
    "INFO they are",
    Anomaly.OWN_RANKS: "own ranks started (by a launcher, spawn or multiprocessing), which are not watched; what they "
    "print is seen",
    Anomaly.GROUPLESS: "training without a process group, each on its own",
}


class AnomalyRanks:
    """Anomalies of one attempt of a job."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, ...]] = {}
        self._ranks: dict[str, set[int]] = {}

    def put(self, rank: int, bits: int) -> None:
        """Take a rank's current anomalies: the bits of its record (`agent.wire.digest`), and `UNPROBED_BIT`."""
        found = (UNPROBED,) if bits & UNPROBED_BIT else _names(bits)
        before = self._of.get(rank, ())
        if found == before:
            return
        self._of[rank] = found
        for word in before:
            self._ranks[word].discard(rank)
        for word in found:
            self._ranks.setdefault(word, set()).add(rank)

    def of_rank(self, rank: int) -> list[str]:
        """Return the texts of a rank's anomalies; a missing probe is not among them."""
        return [_TEXTS[word] for word in self._of.get(rank, ()) if word in _TEXTS]

    def ranks_with(self, word: str) -> set[int]:
        """Return the ranks that have an anomaly."""
        return set(self._ranks.get(word, ()))

    def notes(self, why_unprobed: str, *, is_adopted: bool = False) -> dict[str, str]:
        """Return a sentence for each anomaly, with its ranks, by the anomaly."""
        shown = {word: sorted(ranks) for word, ranks in sorted(self._ranks.items()) if ranks}
        notes = {}
        if unprobed := shown.pop(UNPROBED, []):
            have = "has" if len(unprobed) == 1 else "have"
            because = why_unprobed or NO_PLUGIN
            outside = f"watched from outside, by process{'' if is_adopted else ' and output'}"
            notes[UNPROBED] = f"{ranks_text(unprobed)} {have} no probe ({because}): {outside}"
        return notes | {word: f"{ranks_text(ranks)}: {_TEXTS[word]}" for word, ranks in shown.items()}


def _names(bits: int) -> tuple[str, ...]:
    found = [RECORDER_MISSING] if bits & RECORDER_MISSING_BIT else []
    return (*found, *(anomaly for place, anomaly in enumerate(ANOMALIES) if bits & 1 << place))
