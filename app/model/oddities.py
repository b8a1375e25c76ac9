"""What is odd about a job's ranks and limits what can be seen of them: kept by rank, said once for the job.

A rank without a probe is watched from outside, by its process and its output; others run under settings that blind the
probe or slow training down. None of it is a fault, and none of it is to go unsaid.
"""

from __future__ import annotations

from agent.wire.digest import ODDITIES, RECORDER_MISSING_BIT
from app.words import ranks_text
from ddpcore.wire import Oddity

PROBE_PATIENCE_S = 60.0
"""How long a rank may take to import torch before it is said that it has no probe; it may have one later."""

RECORDER_MISSING = "recorder_missing"
UNPROBED = "unprobed"
UNPROBED_BIT = 1 << 8

_WORDS = {
    RECORDER_MISSING: "this torch has no flight recorder (2.8 and newer have): collectives are not seen, lines are",
    Oddity.RECORDER_OFF: "the flight recorder is switched off (TORCH_FR_BUFFER_SIZE=0): collectives are not seen, "
    "lines are",
    Oddity.DEBUG_DETAIL: "TORCH_DISTRIBUTED_DEBUG=DETAIL: collectives take longer and are not seen, lines are; with "
    "INFO they are",
    Oddity.OWN_RANKS: "own ranks started (by a launcher, spawn or multiprocessing), which are not watched; what they "
    "print is seen",
    Oddity.GROUPLESS: "training without a process group, each on its own",
}


class Oddities:
    """Of one attempt of a job."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[str, ...]] = {}
        self._ranks: dict[str, set[int]] = {}

    def put(self, rank: int, bits: int) -> None:
        """Take what is known of a rank now: the bits of its record (`agent.wire.digest`), and `UNPROBED_BIT`."""
        found = (UNPROBED,) if bits & UNPROBED_BIT else _words(bits)
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

    def ranks_with(self, word: str) -> set[int]:
        """Return the ranks of which an oddity is true."""
        return set(self._ranks.get(word, ()))

    def notes(self, why_unprobed: str) -> dict[str, str]:
        """Return a sentence for each oddity, with the ranks that it is true of, by the oddity."""
        told = {word: sorted(ranks) for word, ranks in sorted(self._ranks.items()) if ranks}
        notes = {}
        if unprobed := told.pop(UNPROBED, []):
            have = "has" if len(unprobed) == 1 else "have"
            because = why_unprobed or "torch not imported, or one that loads no probe"
            outside = "watched from outside, by process and output"
            notes[UNPROBED] = f"{ranks_text(unprobed)} {have} no probe ({because}): {outside}"
        return notes | {word: f"{ranks_text(ranks)}: {_WORDS[word]}" for word, ranks in told.items()}


def _words(bits: int) -> tuple[str, ...]:
    found = [RECORDER_MISSING] if bits & RECORDER_MISSING_BIT else []
    return (*found, *(oddity for place, oddity in enumerate(ODDITIES) if bits & 1 << place))
