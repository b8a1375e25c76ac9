"""The screen as plain text, and texts kept to compare with.

`RANKDECK_UPDATE_SNAPSHOTS=1` writes what has changed and fails the tests concerned at their end all the same: a
picture passes only against a file that was there before, and that somebody can have looked at.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from textual.app import App
    from textual.strip import Strip

SNAPSHOTS = Path(__file__).parents[1] / "tui" / "snapshots"

_written: list[str] = []
"""Differences of the pictures that the present test has written anew."""


def screen_strips(app: App[Any]) -> list[Strip]:
    """Return the painted lines of the screen on top, notifications included."""
    return app.screen._compositor.render_strips()


def screen_lines(app: App[Any]) -> list[str]:
    """Return the screen's text, line by line, without blanks at the ends."""
    return [strip.text.rstrip() for strip in screen_strips(app)]


def assert_looks_as_before(name: str, lines: list[str]) -> None:
    """Compare lines with the kept ones of that name."""
    path = SNAPSHOTS / f"{name}.txt"
    before = path.read_text().splitlines() if path.exists() else []
    if lines == before:
        return
    difference = "\n".join(difflib.unified_diff(before, lines, "before", "now", lineterm="", n=1))
    if os.environ.get("RANKDECK_UPDATE_SNAPSHOTS") == "1" and not os.environ.get("CI"):
        path.write_text("\n".join(lines) + "\n")
        _written.append(f"{path.name} is written anew; look at it, and run again without the update:\n{difference}")
        return
    pytest.fail(f"the screen is not as in {path.name} (RANKDECK_UPDATE_SNAPSHOTS=1 writes it anew):\n{difference}")


def fail_if_written() -> None:
    """Fail once for all the pictures that were written."""
    written = "\n\n".join(_written)
    _written.clear()
    if written:
        pytest.fail(written)


@pytest.fixture(autouse=True)
def fail_what_is_written_anew() -> Iterator[None]:
    """Fail a test that has written pictures, once it has written all of them."""
    yield
    fail_if_written()
