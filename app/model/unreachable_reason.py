"""Why a node cannot be reached, as far as this console knows: no connection, no agent, or no report of it. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class UnreachableKind(StrEnum):
    """What is missing; the value is text that a node's name follows."""

    CONNECTION = "no connection to"
    ANSWER = "no answer from the agent on"
    AGENT = "no agent on"
    FITTING_AGENT = "no agent that fits on"
    REPORT = "no report that can be read from"


class UnreachableReason(NamedTuple):
    """What is missing, and why; the reason may come from a host, and is not safe to show."""

    why: str
    unreachable_kind: UnreachableKind = UnreachableKind.CONNECTION

    @property
    def beside_name(self) -> str:
        """Text for the row of the node, which already shows its name."""
        return f"no agent: {self.why}" if self.unreachable_kind is UnreachableKind.AGENT else self.why
