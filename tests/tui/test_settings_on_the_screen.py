"""What a person has set is what the screen shows and what the keys do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.settings.loading import load
from app.settings.themes import ANSI, PLAIN, THEMES
from app.tui.actions import ACTIONS, VIEW_NAMES, Keymap
from app.tui.theme import Look
from tests.support.consoles import TalkingSource, desk, frozen_source
from tests.support.screens import assert_looks_as_before, screen_strips
from tests.support.sim import SimCluster
from tests.support.waiting import until_async

if TYPE_CHECKING:
    from rich.color import Color
    from textual.strip import Strip

    from app.settings.schema import ConsoleSettings
    from app.tui.console import Console

WAIT_S = 30.0
DIALOGS = ("question_mark", "F", "x", "ctrl+p", "slash", "s")


def chosen(*assignments: str) -> ConsoleSettings:
    return load(ACTIONS, assignments, has_files=False, environ={}).settings().console


def painted(console: Console) -> list[list[tuple[str, str]]]:
    """Return the screen with its styles."""
    return [[(segment.text, str(segment.style)) for segment in strip] for strip in joined(screen_strips(console))]


def joined(rendered: list[Strip]) -> list[Strip]:
    return [strip.simplify() for strip in rendered]


def colours(console: Console) -> set[Color]:
    styles = [segment.style for strip in screen_strips(console) for segment in strip if segment.style is not None]
    return {colour for style in styles for colour in (style.color, style.bgcolor) if colour is not None}


def test_every_action_has_a_name_of_its_own_and_a_call() -> None:
    names = [action.name for action in ACTIONS]

    assert len(set(names)) == len(names)
    assert [name for name in names if not name.replace("_", "").isalnum() or name != name.lower()] == []
    assert [action.name for action in ACTIONS if not action.call.startswith(("app.", "screen."))] == []


def test_names_of_actions_stay_what_files_call_them() -> None:
    assert [action.name for action in ACTIONS if action.keys] == [
        *VIEW_NAMES,
        *("next_view", "previous_view", "up", "down", "page_up", "page_down", "first", "last", "left", "right"),
        *("zoom_in", "zoom_out", "open", "copy", "filter", "problems", "back", "freeze", "sort", "grid"),
        *(
            "next_error",
            "previous_error",
            "collapse",
            "root_cause",
            "stacks",
            "control",
            "doctor",
            "answer",
            "outside",
            "fault",
        ),
        *(
            "pause",
            "next_verdict",
            "replay_back",
            "replay_on",
            "slower",
            "faster",
            "help",
            "palette",
            "suspend",
            "quit",
        ),
    ]


async def test_a_key_does_what_it_was_given_and_no_longer_what_it_did() -> None:
    settings = chosen("keys.freeze=z", "keys.logs=f5", "keys.stacks=f", "keys.collapse=[]")
    async with desk(frozen_source(), settings=settings) as console:
        await console.press("s", "c", "6")
        assert console.console.active == "overview"
        assert len(console.console.screen_stack) == 1

        await console.press("f5")
        assert console.console.active == "logs"
        await console.press("z")
        assert console.console.ui.frozen_s is not None
        await console.press("f")
        assert "STACKS" in console.lines()[0]


async def test_help_palette_and_quit_move_with_their_keys() -> None:
    settings = chosen("keys.help=h", "keys.left=left", "keys.palette=f7", "keys.quit=Q", "keys.copy=ctrl+p,y")
    async with desk(frozen_source(), settings=settings) as console:
        await console.press("question_mark", "colon", "q")
        assert len(console.console.screen_stack) == 1
        await console.press("ctrl+p")
        assert "Copied" in console.text()

        for key, shown in (("h", "arrows scroll"), ("f7", "Search for commands")):
            await console.press(key)
            assert shown in console.text()
            await console.press("h" if key == "h" else "escape")
            assert len(console.console.screen_stack) == 1

        await console.press("Q")
        await until_async(lambda: not console.console.is_running, WAIT_S, "the console has left")


async def test_footer_help_and_palette_show_the_keys_that_were_chosen() -> None:
    settings = chosen("keys.help=F1,f12", "keys.filter=ctrl+f", "keys.stacks=[]", "keys.quit=Q", "keys.freeze=z")
    async with desk(frozen_source(), (120, 60), settings=settings) as console:
        footer = console.lines()[-1]
        assert footer.split()[:4] == ["1-8", "Views", "F1", "Help"]
        assert "ctrl+f Filter" in footer
        assert "Stacks" not in footer
        assert footer.endswith("Q Quit")

        await console.press("f12")
        rows = [line.strip("\u2502 ").split() for line in console.lines()]
        assert ["z", "Freeze", "picture"] in [row[:3] for row in rows]
        assert ["F1", "F12", "Help"] in [row[:3] for row in rows]
        assert not any(row[1:2] == ["Stacks"] for row in rows)
        await console.press("f12")

        await console.press("ctrl+p")
        await console.press(*"freeze")
        await until_async(lambda: "Freeze picture  z" in console.text(), 5, "the palette shows its key")


async def test_the_words_on_the_screen_name_the_keys_that_were_chosen() -> None:
    settings = chosen("keys.open=O", "keys.back=B", "keys.zoom_in=f3", "keys.events=E", "keys.previous_error=[]")
    source = TalkingSource(SimCluster())
    async with desk(source, settings=settings) as console:
        await console.play(source, 10)
        source.sim.freeze(2)
        await console.play(source, 5)
        await console.press("7")
        assert "F3 - zoom" in console.text()
        assert "verdict: see E" in console.text()
        await console.press("2", "O")
        assert "O: its log" in console.text()
        assert "B: back" in console.text()
        await console.resize(40, 10)
        assert "(q quits)" in console.text()


async def test_tabs_and_footer_name_the_keys_of_the_views() -> None:
    settings = chosen("keys.overview=F1", "keys.help=?", "keys.memory=[]", "keys.next_view=tab")
    for width in (80, 120, 200):
        async with desk(frozen_source(), (width, 30), settings=settings) as console:
            tabs, footer = console.lines()[0], console.lines()[-1]
            assert " F1 Overview " in tabs
            assert " - Memory" in tabs or " - Mem" in tabs
            assert len(tabs) <= width
            assert footer.split()[:2] == ["tab", "Views"]
            await console.pilot.click("#masthead", offset=(tabs.index(" - Mem") + 3, 0))
            await console.settle()
            assert console.console.active == "memory"


def test_views_in_a_row_are_told_in_short() -> None:
    assert Keymap().views() == "1-8"
    row = {name: (str(number),) for number, name in enumerate(VIEW_NAMES)}
    assert Keymap(row).views() == "0-7"
    assert Keymap({"overview": ()}).views() == "tab"
    assert Keymap({"overview": (), "next_view": ()}).views() == ""


async def test_the_console_begins_with_the_view_that_was_chosen() -> None:
    async with desk(frozen_source(), settings=chosen("console.start_view=logs")) as console:
        assert console.console.active == "logs"
        assert " LOGS  " in console.text()
        await console.press("tab")
        assert console.console.active == "charts"


@pytest.mark.parametrize("theme", THEMES)
async def test_the_overview_looks_as_before_in_each_theme(theme: str) -> None:
    async with desk(frozen_source(), look=Look(theme=theme)) as console:
        grounds = sorted({colour.name for colour in colours(console.console)})
        assert_looks_as_before(f"theme-{theme}-120x35", [*console.lines(), "", "colours:", *grounds])


@pytest.mark.parametrize("theme", THEMES)
async def test_each_theme_paints_only_its_own_colours(theme: str) -> None:
    colours_of = THEMES[theme].colours
    allowed = {"default", "red", "magenta"} if theme == ANSI else {"default"}
    if colours_of is not None:
        own = [colour for part in colours_of for colour in ([part] if isinstance(part, str) else part)]
        allowed = set(own)
    async with desk(frozen_source(), look=Look(theme=theme)) as console:
        for number in range(1, len(VIEW_NAMES) + 1):
            await console.press(str(number))
            assert {colour.name for colour in colours(console.console)} <= allowed, number


@pytest.mark.parametrize("theme", [ANSI, PLAIN])
async def test_a_theme_of_the_terminals_own_colours_has_no_other_anywhere(theme: str) -> None:
    async with desk(frozen_source(), look=Look(theme=theme)) as console:
        for key in DIALOGS:
            await console.press(key)
            used = {colour.number for colour in colours(console.console) if not colour.is_default}
            assert used <= ({1, 5} if theme == ANSI else set()), key
            assert all(colour.triplet is None for colour in colours(console.console)), key
            await console.press("escape")


@pytest.mark.parametrize(
    "theme", [pytest.param(name, marks=() if name == ANSI else pytest.mark.slow) for name in THEMES if name != "deck"]
)
async def test_a_theme_that_is_changed_live_looks_as_if_chosen_at_the_start(theme: str) -> None:
    async with desk(frozen_source(), look=Look(theme=theme)) as console:
        expected = []
        for number in range(1, len(VIEW_NAMES) + 1):
            await console.press(str(number))
            expected.append(painted(console.console))
        await console.press("F")
        expected.append(painted(console.console))
    async with desk(frozen_source()) as console:
        for number in range(1, len(VIEW_NAMES) + 1):
            await console.press(str(number))
            await console.console.run_action("app.wear('deck')")
            await console.console.run_action(f"app.wear('{theme}')")
            await console.settle()
            assert painted(console.console) == expected[number - 1], number
            await console.console.run_action("app.wear('deck')")
        await console.console.run_action(f"app.wear('{theme}')")
        await console.press("F")
        assert painted(console.console) == expected[-1]


async def test_the_palette_has_our_themes_and_no_others() -> None:
    async with desk(frozen_source()) as console:
        titles = [command.title for command in console.console.get_system_commands(console.console.screen)]
        assert [title for title in titles if title.startswith("Theme")] == [f"Theme: {name}" for name in THEMES]

        await console.press("ctrl+p")
        await console.press(*"theme: li")
        await until_async(lambda: "Theme: light" in console.text(), WAIT_S, "the palette has found it")
        await console.press("enter")
        await until_async(lambda: console.console.ui.look.theme == "light", WAIT_S, "the theme is worn")
        await console.settle()

        assert console.console.theme == "light"
        assert THEMES["light"].colours is not None
        assert THEMES["light"].colours.ground in {colour.name for colour in colours(console.console)}


async def test_a_theme_that_was_named_has_its_colours_whatever_no_color_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with desk(frozen_source(), look=Look(theme="light")) as console:
        await console.press("question_mark")
        names = {colour.name for colour in colours(console.console)}

    assert THEMES["light"].colours is not None
    assert THEMES["light"].colours.raised in names
