"""Who holds control of a node: a console claims it under a generation, and commands of an older one are refused.

Two consoles may look at a node at once, and only the one that claimed last steers: what the other asks after that does
not happen. The console chooses the generation, one above the highest of its nodes, so that it is the
same on all of them.
"""

from __future__ import annotations

import msgspec

from agent.wire.commands import (
    Abort,
    CleanLeftovers,
    Command,
    Commit,
    InjectFault,
    Kill,
    Prepare,
    PrepareAgain,
    RefusalReason,
    Refused,
    Shutdown,
    Stop,
)
from agent.wire.reports import ControlReport

_STEERING = Prepare | PrepareAgain | Commit | Abort | Stop | Kill | InjectFault | CleanLeftovers | Shutdown


class Holder(msgspec.Struct, frozen=True):
    """A claim; `generation` 0 is nobody's. Outlives the agent."""

    generation: int = 0
    name: str = ""


class ControlLease:
    """The latest claim on a node."""

    def __init__(self, holder: Holder, now_s: float) -> None:
        self.holder = holder
        self._since_s = now_s

    def claim(self, generation: int, name: str, now_s: float) -> Refused | None:
        """Take control; return why not, or None. Asked twice it changes nothing."""
        wanted = Holder(generation, name)
        if wanted == self.holder:
            return None
        if generation <= self.holder.generation:
            return Refused(
                RefusalReason.OLD_GENERATION,
                f"generation {generation} is not above {self.holder.generation}, under which "
                f"{self._refusal_text(now_s)}: claim a higher one",
            )
        self.holder, self._since_s = wanted, now_s
        return None

    def refusal(self, command: Command, now_s: float) -> Refused | None:
        """Return why a command does not count any more, or None. One of generation 0 is a user's own."""
        if not isinstance(command, _STEERING):
            return None
        generation = command.generation
        if generation in {0, self.holder.generation}:
            return None
        return Refused(
            RefusalReason.OLD_GENERATION,
            f"the command is of generation {generation}, {self._refusal_text(now_s)} under generation "
            f"{self.holder.generation}: claim control again",
        )

    def report(self, now_s: float) -> ControlReport | None:
        """Return who holds control, None if nobody has ever claimed it."""
        if not self.holder.generation:
            return None
        return ControlReport(self.holder.generation, self.holder.name, max(0.0, now_s - self._since_s))

    def _refusal_text(self, now_s: float) -> str:
        if not self.holder.generation:
            return "nobody holds control"
        return f"{self.holder.name} has held control for {now_s - self._since_s:.0f} s"
