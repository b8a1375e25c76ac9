"""What is true of a program: who is at fault, and what must be said of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.corpus.reported.sources import SOURCES, Source

if TYPE_CHECKING:
    from app.diagnosis.causes import Cause

PROGRAMS = Path(__file__).parent / "programs"

EXIT_S = 2.0
"""For an exit, a stop or a mismatch to be named, from the moment of the fault."""
HANG_S = 12.0
"""For any other hang."""
SLOW_S = 30.0
"""For a rank that is slow: it must be so for a while."""


@dataclass(frozen=True)
class Program:
    """One program and the truth of it.

    Attributes:
        name: `file.mode`: a file in `programs/`, and its only argument.
        ranks: How many torchrun starts.
        causes: Of which one must be named; empty for a healthy program.
        culprits: Sets of ranks of which one must be named. The first is the truth; the others say no more than what can
            be known, as that all ranks differ. Whoever is blamed alone must be of the first one.
        is_reported: Regular expressions that the sentence, its hint or the root cause must contain; `{culprit}` and
            `{victims}` are the lines that the program marks by `# culprit: mode` and `# victims: mode`.
        within_s: From the moment of the fault to the verdict, on a quiet machine.
        ends_itself: The program's own time-out or an exit ends it; else `rankdeck kill` does.
        is_optional: Nothing can be known, or little: silence is right too, a wrong word is not.
        in_ci: It is in the default run of the tests, or slow.
    """

    name: str
    ranks: int
    causes: frozenset[Cause] = frozenset()
    culprits: tuple[tuple[int, ...], ...] = ()
    is_reported: tuple[str, ...] = ()
    within_s: float = HANG_S
    ends_itself: bool = False
    is_optional: bool = False
    in_ci: bool = False

    @property
    def source(self) -> Source:
        return SOURCES[self.name]

    @property
    def is_fault(self) -> bool:
        return bool(self.causes)

    @property
    def fault_class(self) -> str:
        return self.name.partition(".")[0]

    @property
    def path(self) -> Path:
        return PROGRAMS / f"{self.fault_class}.py"

    @property
    def mode(self) -> str:
        return self.name.partition(".")[2]

    def may_blame(self, ranks: tuple[int, ...]) -> bool:
        """Say whether nobody is blamed in vain."""
        return ranks in self.culprits or set(ranks) <= set(self.culprits[0])

    def patterns(self) -> list[re.Pattern[str]]:
        """Return what must be told, with the program's marked lines in it."""
        return [re.compile(self._with_lines(pattern)) for pattern in self.is_reported]

    def _with_lines(self, pattern: str) -> str:
        for marker in ("culprit", "victims"):
            if f"{{{marker}}}" in pattern:
                lines = "|".join(str(number) for number in self._marked_lines(marker))
                pattern = pattern.replace(f"{{{marker}}}", rf"{re.escape(self.path.name)}:(?:{lines})\b")
        return pattern

    def _marked_lines(self, marker: str) -> list[int]:
        wanted = re.compile(rf"# {marker}: .*\b{re.escape(self.mode)}\b")
        lines = self.path.read_text(encoding="utf-8").splitlines()
        found = [number for number, line in enumerate(lines, 1) if wanted.search(line)]
        assert found, f"{self.path.name} marks no line by `# {marker}: {self.mode}`"
        return found
