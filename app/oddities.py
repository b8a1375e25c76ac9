"""What is odd about a job's ranks and limits what can be seen of them: kept by rank, said once for the job.

A rank without a probe is watched from outside, by its process and its output; others run under settings that blind the
probe or slow training down. None of it is a fault, and none of it is to go unsaid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.words import ranks_text
from ddpcore.wire import Oddity

if TYPE_CHECKING:
    from ddpcore.wire import RankReport

PROBE_PATIENCE_S = 60.0
"""How long a rank may take to import torch before it is said that it has no probe; it may have one later."""
GROUPLESS_STEPS = 10
"""Steps without any collective after which a rank trains on its own."""

RECORDER_MISSING = "recorder_missing"
GROUPLESS = "groupless"
UNPROBED = "unprobed"

_WORDS = {
    RECORDER_MISSING: "this torch has no flight recorder (2.8 and newer have): collectives are not seen, lines are",
    Oddity.RECORDER_OFF: "the flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0): collectives are not seen, "
    "lines are",
    Oddity.DEBUG_DETAIL: "TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares every collective among the ranks first, which "
    "takes time",
    Oddity.OWN_RANKS: "has started ranks of its own (torchrun or spawn), which are not watched",
    GROUPLESS: "trains without a process group, on its own",
}


class Oddities:
    """Of one attempt of a job."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, ...]] = {}
        self._ranks: dict[str, set[int]] = {}

    def put(self, rank: int, report: RankReport | None, *, is_unprobed: bool) -> None:
        """Take what is known of a rank now."""
        found = (UNPROBED,) if is_unprobed else () if report is None else _of_report(report)
        before = self._of.get(rank, ())
        if found == before:
            return
        self._of[rank] = found
        for word in before:
            self._ranks[word].discard(rank)
        for word in found:
            self._ranks.setdefault(word, set()).add(rank)

    def of_rank(self, rank: int) -> list[str]:
        """Return what is odd about a rank, in words; not that it has no probe."""
        return [_WORDS[word] for word in self._of.get(rank, ()) if word in _WORDS]

    def notes(self, why_unprobed: str) -> list[str]:
        """Return a sentence for each oddity, with the ranks that it is true of."""
        told = {word: sorted(ranks) for word, ranks in sorted(self._ranks.items()) if ranks}
        notes = []
        if unprobed := told.pop(UNPROBED, []):
            have = "has" if len(unprobed) == 1 else "have"
            because = why_unprobed or "torch not imported, or one that loads no probe"
            notes.append(
                f"{ranks_text(unprobed)} {have} no probe ({because}): watched from outside, by process and output"
            )
        return notes + [f"{ranks_text(ranks)}: {_WORDS[word]}" for word, ranks in told.items()]


def _of_report(report: RankReport) -> tuple[str, ...]:
    if not (report.oddities or report.recorder_missing or report.step is not None):
        return ()
    found: list[str] = [RECORDER_MISSING] if report.recorder_missing else []
    found += dict.fromkeys(report.oddities)
    is_blind = report.recorder_missing or Oddity.RECORDER_OFF in report.oddities
    is_alone = not report.groups and report.steps_done >= GROUPLESS_STEPS and report.world_size > 1
    return (*found, GROUPLESS) if is_alone and not is_blind else tuple(found)
