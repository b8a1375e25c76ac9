"""A person at the console, for tests: asked through the `Prompter` that a terminal offers, too."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class LocalUser:
    """Gives answers in their order, then no more.

    Attributes:
        asked: All questions; of those whose answer may be seen, in `shown`.
        notes: What was said besides.
    """

    def __init__(self, answers: Sequence[str] = (), *, is_there: bool = True) -> None:
        self.asked: list[str] = []
        self.shown: list[str] = []
        self.notes: list[str] = []
        self._answers = list(answers)
        self._is_there = is_there
        self._lock = threading.Lock()

    def can_ask(self) -> bool:
        return self._is_there

    def ask(self, text: str, *, is_shown: bool = False) -> str | None:
        with self._lock:
            self.asked.append(text)
            if is_shown:
                self.shown.append(text)
            return self._answers.pop(0) if self._answers else None

    def show(self, text: str) -> None:
        self.notes.append(text)
