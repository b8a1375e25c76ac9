"""Why a node is not heard, as far as that is known from here: no way there, or a way and no agent at its end. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class UnreachableKind(StrEnum):
    """What there is not; in words that a node's name follows."""

    CONNECTION = "no connection to"
    ANSWER = "no answer from the agent on"
    AGENT = "no agent on"
    FITTING_AGENT = "no agent that fits on"


class UnreachableReason(NamedTuple):
    """What there is not, and why; the reason may come from a host, and is not safe to show."""

    why: str
    unreachable_kind: UnreachableKind = UnreachableKind.CONNECTION

    @property
    def beside_name(self) -> str:
        """The words for the row of the node, where its name stands already."""
        return f"no agent: {self.why}" if self.unreachable_kind is UnreachableKind.AGENT else self.why
