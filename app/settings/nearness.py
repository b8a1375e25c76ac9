"""What was perhaps meant: the nearest of the words that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_COMPARED = 60
"""Characters of a wrong word: comparing takes time that grows with their square."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return which of some words was perhaps meant, empty where none is near."""
    from difflib import get_close_matches  # noqa: PLC0415 - only who has mistyped pays for it

    return next(iter(get_close_matches(word[:MAX_COMPARED], known, 1)), "")


def nearest_text(word: str, known: Sequence[str]) -> str:
    """Return `; the nearest is X`, or nothing where none is near."""
    near = nearest(word, known)
    return f"; the nearest is {near}" if near else ""
