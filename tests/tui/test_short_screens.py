"""Dialogs on the smallest screen that the console takes: what answers them is always to be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from textual.geometry import Region
from textual.widgets import Button, OptionList

from app.inspect.outside_view import Target
from app.inventory.program import Program
from app.ssh.questions import Question
from app.tui.actions import VIEW_NAMES
from app.tui.dialogs.program_form import ProgramScreen
from app.tui.dialogs.questions import QuestionScreen
from app.tui.dialogs.signals import SignalScreen
from app.tui.widgets.footer import MIN_HEIGHT, MIN_WIDTH
from app.tui.widgets.line_view import LineView
from tests.support.consoles import SimStarter, TalkingSource, desk, frozen_source

if TYPE_CHECKING:
    from textual.widget import Widget

    from app.tui.dialogs.control import DialogScreen
    from tests.support.consoles import Desk

SIZES = ((MIN_WIDTH, MIN_HEIGHT), (MIN_WIDTH, 19), (80, 24))
PROGRAM = Program(("train.py", *(f"--option-{number}=value" for number in range(12))), 4, 2, "/home/ada/project")
TARGETS = [Target(f"gpu{rank // 8}", 1_000_000 + rank, 1, 0, rank, is_stopped=True) for rank in range(64)]


def is_seen(console: Desk, widget: Widget) -> bool:
    """Return whether the whole widget is on the screen, inside its dialog."""
    dialog = console.console.screen.query_one(".dialog").region
    return dialog.shrink((1, 1, 1, 1)).contains_region(widget.region)


def at_once(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize("size", SIZES, ids=at_once)
@pytest.mark.parametrize("keys", ["F", "x"])
async def test_a_dialog_shows_its_buttons_and_what_is_marked(keys: str, size: tuple[int, int]) -> None:
    source = lost_a_node() if keys == "x" else frozen_source()
    async with desk(source, size) as console:
        await console.press(keys)
        screen = console.console.screen
        for key in (*["down"] * 10, "home", "end"):
            await console.press(key)
            for marked in screen.query(OptionList):
                place = marked.highlighted
                assert place is not None
                title = str(marked.get_option_at_index(place).prompt).split("  ")[0]
                assert title in console.text(), (key, title)
            assert all(is_seen(console, button) for button in screen.query(Button)), key


def lost_a_node() -> TalkingSource:
    """Return a job with every choice there is."""
    source = frozen_source()
    source.starter = SimStarter()
    source.sim.lose_node(1)
    source.run(10)
    return source


@pytest.mark.parametrize("size", SIZES, ids=at_once)
@pytest.mark.parametrize("name", ["signals", "program"])
async def test_long_questions_leave_the_buttons_their_place(name: str, size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        ui = console.console.ui
        screens: dict[str, DialogScreen[Any]] = {
            "signals": SignalScreen(ui, TARGETS),
            "program": ProgramScreen(ui.look, "gpu1", ["gpu1"], [PROGRAM, Program(("a.py",))], asks_look=True),
        }
        console.console.push_screen(screens[name])
        await console.settle()
        for _ in range(8):
            await console.press("tab")
            focused = console.console.screen.focused
            assert focused is not None
            assert all(is_seen(console, widget) for widget in (focused, *console.console.screen.query(Button)))


@pytest.mark.parametrize("size", SIZES, ids=at_once)
async def test_a_long_question_of_a_host_is_scrolled_and_its_field_is_seen_first(size: tuple[int, int]) -> None:
    question = Question(1, "gpu1", tuple(f"note {number}" for number in range(30)), ("Password:",), is_shown=False)
    async with desk(frozen_source(), size) as console:
        console.console.push_screen(QuestionScreen(console.console.ui.look, question, lambda _number, _text: None))
        await console.settle()
        screen = console.console.screen
        assert is_seen(console, screen.query_one("#answer"))
        assert "Password:" in console.text()
        assert "note 0 " not in console.text()
        await console.press(*["pageup"] * 4)
        assert "note 0 " in console.text()
        await console.press("x")
        await console.press("pagedown", "pagedown", "pagedown", "pagedown")
        assert is_seen(console, screen.query_one("#answer"))


@pytest.mark.parametrize("view", VIEW_NAMES)
async def test_a_layout_that_is_higher_than_a_view_whose_new_size_is_still_to_come_gets_blank_lines(view: str) -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.show(view)
        shown = console.console.query_one(f"#{view}", LineView)
        width, height = shown.size

        painted = shown.render_lines(Region(0, height - 2, width, 5))

        assert [strip.cell_length for strip in painted] == [width] * 5
        assert [strip.text.strip() for strip in painted[2:]] == [""] * 3
