"""Keys that come together, typed ahead or over a link that stutters: they do what they do one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from textual.events import Key, Paste
from textual.screen import ModalScreen
from textual.widgets import Input

from app.tui.widgets.line_view import FilterBar
from tests.support.consoles import desk, frozen_source
from tests.support.screens import until_at_rest
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from textual.events import Event

    from app.tui.key_order import KeyDone
    from tests.support.consoles import Desk

NAMED = {
    "\r": "enter",
    "\x1b": "escape",
    "\x7f": "backspace",
    "/": "slash",
    ":": "colon",
    "=": "equals_sign",
    "?": "question_mark",
}


def keys(text: str) -> list[Event]:
    return [Key(NAMED.get(char, char), char if char.isprintable() else None) for char in text]


async def give(console: Desk, *events: Event) -> None:
    """Give the app what is typed all at once."""
    for event in events:
        console.console.post_message(event)
    await until_at_rest(console.console)


async def test_a_filter_typed_at_once_is_the_filter_and_the_key_behind_it_changes_the_view() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await give(console, *keys("/rank=2x\x7f\r6"))

        assert console.console.active == "logs"
        await console.show("ranks")
        assert "rank=2" in console.text()
        assert not console.console.query_one(FilterBar).display


async def test_a_pasted_filter_goes_into_the_line_that_the_key_before_it_opens() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await give(console, *keys("/"), Paste("rank=3"), *keys("\r"))

        assert "rank=3" in console.text()


async def test_what_is_typed_behind_the_key_of_the_palette_is_looked_for_there() -> None:
    async with desk(frozen_source()) as console:
        await give(console, *keys(":xsk"))

        assert console.console.screen.query_one(Input).value == "xsk"


@pytest.mark.parametrize("burst", ["?\x1b2", ":\x1b2", "/\x1b2", "x\x1b2", "?\x1b:\x1b/\x1b62"])
async def test_what_opens_and_closes_at_once_loses_no_key(burst: str) -> None:
    async with desk(frozen_source()) as console:
        await give(console, *keys(burst))

        await until_async(lambda: console.console.active == "ranks", 10, "the last key has changed the view")
        assert len(console.console.screen_stack) == 1


class Deaf(ModalScreen[None]):
    """Lets no mark come up, as one that closes."""

    def on_key_done(self, mark: KeyDone) -> None:
        mark.stop()


async def test_a_mark_that_is_lost_holds_keys_up_for_a_moment_only() -> None:
    async with desk(frozen_source()) as console:
        await console.console.push_screen(Deaf())
        await give(console, *keys("a"))
        console.console.pop_screen()
        await give(console, *keys("2"))

        await until_async(lambda: console.console.active == "ranks", 10, "the key behind it is done")
