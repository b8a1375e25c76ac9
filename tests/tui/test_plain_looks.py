"""Without colour, and without UTF-8, every state is still a word and a glyph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.rows import RankState, Severity
from app.tui.actions import VIEW_NAMES
from app.tui.theme import ASCII_GLYPHS, UNICODE_GLYPHS, Glyphs, Look
from tests.support.consoles import desk, frozen_source
from tests.support.screens import screen_lines, screen_strips

if TYPE_CHECKING:
    from rich.color import Color

    from app.tui.console import Console


@pytest.mark.parametrize("number", range(1, len(VIEW_NAMES) + 1))
async def test_an_ascii_look_paints_ascii_only_and_says_all(number: int) -> None:
    async with desk(frozen_source(), (80, 24), Look(is_ascii=True)) as console:
        await console.press(str(number))
        text = console.text()

        assert text.isascii()
        assert "X CRITICAL  rank 2 on demo-1 is frozen (SIGSTOP)" in text
        if number <= 3:
            assert "# frozen" in text
            assert text.count("o waiting") == 3


@pytest.mark.parametrize("key", ["question_mark", "F", "x"])
@pytest.mark.parametrize("height", [24, 40])
async def test_the_dialogs_of_an_ascii_look_are_ascii_too(key: str, height: int) -> None:
    async with desk(frozen_source(), (80, height), Look(is_ascii=True)) as console:
        await console.press(key)

        assert console.text().isascii()


async def test_no_color_is_honoured_by_every_view_and_dialog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with desk(frozen_source(), (80, 24), Look.from_environment({"NO_COLOR": "1"})) as console:
        for key in (*"1234567", "question_mark", "escape", "F", "escape", "x", "escape", "ctrl+p"):
            await console.press(key)
            assert {colour.name for colour in colours(console.console)} <= {"default"}, key
            assert key in {"question_mark", "F", "x", "ctrl+p"} or "CRITICAL" in console.text()


async def test_without_colour_the_focus_of_a_dialog_is_still_seen() -> None:
    async with desk(frozen_source(), (80, 24), Look(has_colour=False)) as console:
        await console.press("F")
        marked = [
            segment.text.strip()
            for strip in screen_strips(console.console)
            for segment in strip
            if segment.text.strip() and segment.style is not None and segment.style.underline and segment.style.bold
        ]

        assert marked == ["Thaw"]


def colours(console: Console) -> set[Color]:
    styles = [segment.style for strip in screen_strips(console) for segment in strip if segment.style is not None]
    return {colour for style in styles for colour in (style.color, style.bgcolor) if colour is not None}


@pytest.mark.parametrize("glyphs", [UNICODE_GLYPHS, ASCII_GLYPHS])
def test_every_state_and_severity_has_a_glyph_of_its_own_of_one_cell(glyphs: Glyphs) -> None:
    for kinds, table in ((RankState, glyphs.states), (Severity, glyphs.severities)):
        assert set(table) == set(kinds)
        assert len(set(table.values())) == len(table)
        assert all(len(glyph) == 1 for glyph in table.values())


@pytest.mark.parametrize(
    ("environ", "has_colour", "is_ascii"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"RANKDECK_ASCII": "1"}, True, True),
    ],
)
def test_the_look_is_chosen_by_the_environment(
    environ: dict[str, str], has_colour: bool, is_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.__stderr__", None)
    monkeypatch.setattr("locale.getpreferredencoding", lambda: "UTF-8")

    look = Look.from_environment(environ)

    assert (look.has_colour, look.is_ascii) == (has_colour, is_ascii)


async def test_stock_strips_paint_the_same_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(frozen_source()) as console:
        ours = screen_lines(console.console)
    monkeypatch.setattr("app.tui.strips.HAS_STOCK_STRIPS", True)
    async with desk(frozen_source()) as console:
        stock = screen_lines(console.console)

    assert stock == ours
