"""When a note about a job is reported: once, and complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTE_SETTLES_S = 1.5
"""Seconds until a note is complete: ranks come one by one, agents report twice a second at most."""


class NoteWatch:
    """Reports each note of a job once, with the ranks that have come together: not again for one that joins later."""

    def __init__(self) -> None:
        self._standing: dict[str, tuple[str, float]] = {}
        self._noted: set[str] = set()

    def news(self, notes: Mapping[str, str], now_s: float) -> list[str]:
        """Return the notes to report now, out of those that stand, given by what they are about."""
        self._noted &= notes.keys()
        self._standing = {
            about: before if (before := self._standing.get(about)) and before[0] == note else (note, now_s)
            for about, note in notes.items()
        }
        news = {
            about: note
            for about, (note, since_s) in self._standing.items()
            if about not in self._noted and now_s - since_s >= NOTE_SETTLES_S
        }
        self._noted.update(news)
        return list(news.values())
