"""Who asks the person at the console; what a terminal is, others know."""

from __future__ import annotations

from typing import Protocol

ANSWER_WITHIN_S = 120.0
"""So long sshd waits as a rule (LoginGraceTime)."""


class Prompter(Protocol):
    """Asks one question at a time, from whichever thread. All text that it is given is safe to show."""

    def can_ask(self) -> bool:
        """Say whether somebody is there to be asked."""
        ...

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return what a person types; blocks, within bounds. None when nobody answers.

        Args:
            text: The question, which may have several lines.
            is_shown: Let the answer be seen while it is typed.
        """
        ...

    def tell(self, text: str) -> None:
        """Say something that wants no answer."""
        ...


class Nobody:
    """Nobody is there to be asked or told."""

    def can_ask(self) -> bool:
        """Return False."""
        return False

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        """Return None."""

    def tell(self, text: str) -> None:
        """Say it to nobody."""
