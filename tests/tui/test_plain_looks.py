"""Without colour, and without UTF-8, every state is still a word and a glyph."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.diagnosis.causes import RankState, Severity
from app.settings.loading import load
from app.tui.actions import ACTIONS, VIEW_NAMES
from app.tui.theme import ASCII_GLYPHS, UNICODE_GLYPHS, Glyphs, Look
from tests.support.consoles import TalkingSource, desk, frozen_source
from tests.support.screens import screen_lines, screen_strips
from tests.support.sim import SimCluster
from tests.support.waiting import until_async

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


@pytest.mark.parametrize("key", ["question_mark", "F", "x", "ctrl+p"])
@pytest.mark.parametrize("height", [24, 40])
async def test_the_dialogs_of_an_ascii_look_are_ascii_too(key: str, height: int) -> None:
    async with desk(frozen_source(), (80, height), Look(is_ascii=True)) as console:
        await console.press(key)

        assert console.text().isascii()


async def test_no_color_is_honoured_by_every_view_and_dialog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    settings = load(ACTIONS, has_files=False).settings().console
    async with desk(frozen_source(), (80, 24), Look.chosen(settings)) as console:
        for key in (*"1234567", "question_mark", "escape", "F", "escape", "x", "escape", "ctrl+p"):
            await console.press(key)
            assert {colour.name for colour in colours(console.console)} <= {"default"}, key
            assert key in {"question_mark", "F", "x", "ctrl+p"} or "CRITICAL" in console.text()


async def test_without_colour_the_focus_of_a_dialog_is_still_seen() -> None:
    async with desk(frozen_source(), (80, 24), Look(has_colour=False)) as console:
        await console.press("F")
        assert marked(console.console) == ["Thaw"]
        await console.press("enter", "enter")
        assert marked(console.console) == ["Do nothing"]
        await console.press("right")
        assert marked(console.console) == ["Thaw rank 2"]
        await console.press("escape", "x")
        assert marked(console.console) == ["Stop         after a step and a checkpoint"]
        await console.press("escape", "ctrl+p")
        await until_async(lambda: bool(marked(console.console)), 20, "the palette has its list")
        assert marked(console.console)[0].startswith("Barriers")


@pytest.mark.parametrize(("key", "row"), [("2", "> +2  demo-1"), ("4", "> +0  demo-0"), ("8", ">1")])
async def test_without_colour_the_selected_row_is_still_seen(key: str, row: str) -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (80, 24), Look(has_colour=False, is_ascii=True)) as console:
        await console.play(source, 30.0)
        source.sim.freeze(2)
        await console.play(source, 6.0)
        await console.press(key)
        (line,) = [line for line in console.lines() if line.startswith(">")]

        assert re.match(row, line)


def marked(console: Console) -> list[str]:
    """Return what is underlined and bold: what has the focus."""
    return [
        segment.text.strip()
        for strip in screen_strips(console)
        for segment in strip
        if segment.text.strip() and segment.style is not None and segment.style.underline and segment.style.bold
    ]


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
    ("environ", "theme", "is_ascii"),
    [
        ({}, "deck", False),
        ({"NO_COLOR": "1"}, "plain", False),
        ({"NO_COLOR": ""}, "deck", False),
        ({"NO_COLOR": "1", "RANKDECK_THEME": "light"}, "light", False),
        ({"RANKDECK_ASCII": "1"}, "deck", True),
        ({"RANKDECK_ASCII": "auto"}, "deck", False),
    ],
)
def test_the_look_is_chosen_by_the_environment(
    environ: dict[str, str], theme: str, is_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.__stderr__", None)
    monkeypatch.setattr("locale.getpreferredencoding", lambda: "UTF-8")

    look = Look.chosen(load(ACTIONS, has_files=False, environ=environ).settings().console)

    assert (look.theme, look.has_colour, look.is_ascii) == (theme, theme != "plain", is_ascii)


def test_a_terminal_without_utf_8_is_shown_ascii_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.__stderr__", None)
    monkeypatch.setattr("locale.getpreferredencoding", lambda: "ISO-8859-1")

    for word, is_ascii in (("auto", True), ("true", True), ("false", False)):
        settings = load(ACTIONS, [f"console.ascii={word}"], has_files=False, environ={}).settings()
        assert Look.chosen(settings.console).is_ascii is is_ascii


async def test_stock_strips_paint_the_same_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(frozen_source()) as console:
        ours = screen_lines(console.console)
    monkeypatch.setattr("app.tui.rendering.HAS_STOCK_RENDERING", True)
    async with desk(frozen_source()) as console:
        stock = screen_lines(console.console)

    assert stock == ours
