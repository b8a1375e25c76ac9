"""The screen as plain text, and texts kept to compare with.

`RANKDECK_UPDATE_SNAPSHOTS=1` writes what has changed and fails the tests concerned at their end all the same: a
picture passes only against a file that was there before, and that somebody can have looked at.
"""

from __future__ import annotations

import asyncio
import difflib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from textual.css.stylesheet import Stylesheet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from textual.app import App
    from textual.css.model import RuleSet
    from textual.strip import Strip

SNAPSHOTS = Path(__file__).parents[1] / "tui" / "snapshots"

QUIET_TURNS = 3
"""Of the event loop: what a paint gives rise to is ready in the turn after it."""

_parsed: dict[object, list[RuleSet]] = {}
"""Rules of style sheets, by all that they are made of."""
_written: list[str] = []
"""Differences of the pictures that the present test has written anew."""


async def until_at_rest(app: App[Any]) -> None:
    """Let an app do and paint all that it can do by itself, without a thread, a child or a clock.

    Textual's `Pilot` waits until the process takes no CPU time for 20 ms, or for a second: one that is not let run has
    done nothing by then, and the next key finds what the last one has left.

    Source: `_ready` of `asyncio.base_events.BaseEventLoop` is what the loop runs before it waits for anything.
    """
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    num_quiet = 0
    while num_quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        if ready:
            num_quiet = 0
            continue
        num_quiet += 1
        if app.is_running:
            await app.animator.wait_until_complete()
        if app.is_running and app.screen_stack:
            # The next ticks of its two clocks: one tells of a new size, one paints and calls whoever waits for that.
            if app._resize_timer is not None:
                app._check_resize()
            app.screen._on_timer_update()


async def until_the_loop_rests(_min_sleep_s: float = 0.0, _max_sleep_s: float = 0.0) -> None:
    """Let what is ready run: in place of Textual's `wait_for_idle`, which sleeps for 20 ms twice a key, and longer.

    Whoever presses a key waits until the app is at rest besides, which is exact (`until_at_rest`).
    """
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    num_quiet = 0
    while num_quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        num_quiet = 0 if ready else num_quiet + 1


def screen_strips(app: App[Any]) -> list[Strip]:
    """Return the painted lines of the screen on top, notifications included."""
    return app.screen._compositor.render_strips()


def screen_lines(app: App[Any]) -> list[str]:
    """Return the screen's text, line by line, without blanks at the ends."""
    return [strip.text.rstrip() for strip in screen_strips(app)]


def assert_looks_as_before(name: str, lines: list[str], directory: Path | None = None) -> None:
    """Compare lines with the kept ones of that name; those of screens lie beside the tests of the console."""
    path = (directory or SNAPSHOTS) / f"{name}.txt"
    before = path.read_text().splitlines() if path.exists() else []
    if lines == before:
        return
    difference = "\n".join(difflib.unified_diff(before, lines, "before", "now", lineterm="", n=1))
    if os.environ.get("RANKDECK_UPDATE_SNAPSHOTS") == "1" and not os.environ.get("CI"):
        path.write_text("\n".join(lines) + "\n")
        _written.append(f"{path.name} is written anew; look at it, and run again without the update:\n{difference}")
        return
    pytest.fail(f"it is not as in {path.name} (RANKDECK_UPDATE_SNAPSHOTS=1 writes it anew):\n{difference}")


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


@pytest.fixture(autouse=True)
def style_sheets_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each app have the rules that another one has parsed: each has the same 60 sheets, and parsing is slow.

    Source: `Stylesheet._parse_rules` keeps them likewise, for one app.
    """
    parse = Stylesheet._parse_rules

    def parse_once(sheet: Stylesheet, *args: Any, **options: Any) -> list[RuleSet]:
        key = (args, *sorted(options.items()), *sheet._variables.items())
        if key not in _parsed:
            _parsed[key] = parse(sheet, *args, **options)
        return _parsed[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_once)
