"""Keys do what the table of actions says, whatever the session is doing."""

from __future__ import annotations

import pytest

from app.errors import IncompatibleAgentError
from app.settings.loading import load
from app.tui.actions import ACTIONS, VIEW_NAMES, Keymap, available
from app.tui.console import Console
from app.tui.theme import Look
from app.tui.views.ranks import RanksView
from app.tui.widgets.footer import MIN_HEIGHT, MIN_WIDTH
from tests.support.consoles import SimSource, desk, frozen_source, training_source
from tests.support.sim import SimCluster
from tests.support.waiting import until_async

WAIT_S = 30.0


async def test_number_keys_show_the_views() -> None:
    async with desk(frozen_source()) as console:
        for number, name in enumerate(VIEW_NAMES, start=1):
            await console.press(str(number))

            assert console.console.active == name
            assert f" {number} {name.capitalize()} " in console.lines()[0]
            assert [view.id for view in console.console.query(".view") if view.display] == [name]


async def test_tab_and_shift_tab_go_round_the_views() -> None:
    async with desk(frozen_source()) as console:
        seen = []
        for _ in VIEW_NAMES:
            await console.press("tab")
            seen.append(console.console.active)
        assert seen == [*VIEW_NAMES[1:], VIEW_NAMES[0]]

        await console.press("shift+tab")

        assert console.console.active == VIEW_NAMES[-1]


async def test_a_click_on_a_tab_shows_its_view() -> None:
    async with desk(frozen_source()) as console:
        await console.pilot.click("#masthead", offset=(console.lines()[0].index("Memory"), 0))
        await console.settle()

        assert console.console.active == "memory"


async def test_a_click_on_a_key_of_the_footer_does_what_the_key_does() -> None:
    async with desk(frozen_source()) as console:
        for title, shown in (("Filter", "Esc clears"), ("Help", "Esc closes")):
            await console.pilot.click("#footer", offset=(console.lines()[-1].index(title), 0))
            await console.settle()

            assert shown in console.text()
            await console.press("escape")


async def test_the_help_says_what_verdicts_rest_on_and_what_cannot_be_known() -> None:
    async with desk(SimSource(SimCluster().view), (120, 60)) as console:
        await console.press("question_mark", "end")
        words = " ".join(console.text().split())

        assert "input_bound" in words
        assert "Not known: which link." in words


async def test_the_footer_of_80_columns_has_the_keys_that_act_and_explain() -> None:
    async with desk(training_source(12), (80, 24)) as console:
        footer = console.lines()[-1]
        assert " x Stop, restart " in footer
        assert " s Stacks " in footer
        assert " F Inject a fault " in footer, "README asks the user of the demo to press it"
        assert " ? Help " in footer
        assert footer.rstrip().endswith("q Quit")


def test_the_footer_has_at_most_eight_keys() -> None:
    for source in (SimSource(SimCluster().view), SimSource(SimCluster().view, can_inject=False)):
        assert 1 + len([action for action in available(source) if action.footer]) <= 8


@pytest.mark.parametrize("can_inject", [True, False])
async def test_the_help_lists_every_action_of_the_table(can_inject: bool) -> None:
    async with desk(SimSource(SimCluster().view, can_inject=can_inject), (120, 60)) as console:
        await console.press("question_mark")
        words = " ".join(console.text().split())

        for action in available(SimSource(SimCluster().view, can_inject=can_inject)):
            if not action.keys:
                continue
            assert Keymap().shown(action.name) in words
            assert action.title in words
        assert ("Inject a fault" in words) is can_inject
        for state in ("starting", "running", "waiting", "missing", "frozen", "silent", "exited", "done", "lost"):
            assert state in words

        await console.press("escape")
        assert "Previous view" not in console.text()


def test_no_key_is_given_twice() -> None:
    keys = [key for action in ACTIONS for key in action.keys.split(",") if key]

    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 35)])
async def test_the_palette_has_a_border_around_its_whole_list(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        await console.press("ctrl+p")
        await until_async(lambda: "Who waits for whom" in console.text(), WAIT_S, "the palette has its list")
        await console.settle()
        lines = console.lines()
        top, bottom = (next(row for row, line in enumerate(lines) if corner in line) for corner in "╭╰")
        left, right = lines[top].index("╭"), lines[top].index("╮")
        assert lines[bottom][left] + lines[bottom][right] == "╰╯"
        assert {line[left] + line[right] for line in lines[top + 1 : bottom]} == {"││"}
        assert bottom - top > size[1] // 2


async def test_the_palette_runs_an_action_by_name() -> None:
    async with desk(frozen_source()) as console:
        await console.press("ctrl+p")
        await console.press(*"memory")
        await until_async(lambda: "beside the median" in console.text(), WAIT_S, "the palette has found it")
        await console.press("enter")

        await until_async(lambda: console.console.active == "memory", WAIT_S, "the view is shown")


async def test_q_closes_the_session_once_and_leaves() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("q")
        await until_async(lambda: not console.console.is_running, WAIT_S, "the console has left")

    assert source.num_closed == 1
    assert console.console.failure is None
    assert console.console.return_code == 0


async def test_q_leaves_a_restart_undone_only_when_asked_again() -> None:
    source = frozen_source()
    assert source.control is not None
    async with desk(source, (120, 35)) as console:
        for number in (0, 1):
            source.control.doing = f"restart: waiting for attempt {number} to end"
            await console.press("q")
            *_, told = console.console._notifications
            assert told.message == (
                f"restart: waiting for attempt {number} to end. "
                "Without this console the job ends and is not restarted; q again leaves."
            )
            assert source.num_closed == 0
        await console.press("q")
        await until_async(lambda: not console.console.is_running, WAIT_S, "the console has left")

    assert source.num_closed == 1


async def test_the_key_that_leaves_is_called_as_the_person_has_set_it() -> None:
    source = frozen_source()
    assert source.control is not None
    source.control.doing = "restart: waiting"
    settings = load(ACTIONS, ["keys.quit=F10"], has_files=False, environ={}).settings().console
    async with desk(source, settings=settings) as console:
        await console.press("f10")
        (told,) = console.console._notifications
        assert told.message.endswith("; F10 again leaves.")


async def test_ctrl_c_leaves_from_within_a_dialog() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("F")
        await console.press("ctrl+c")
        await until_async(lambda: not console.console.is_running, WAIT_S, "the console has left")

    assert source.num_closed == 1
    assert source.injected == []


async def test_the_frames_come_by_themselves_and_a_failed_session_ends_the_console() -> None:
    source = SimSource(SimCluster().view)
    console = Console(source, Look())
    async with console.run_test(size=(80, 24)):
        await until_async(lambda: source.num_views >= 2, WAIT_S, "frames")
        source.failure = IncompatibleAgentError("demo-1", "speaks version 9, this console speaks 1")
        await until_async(lambda: not console.is_running, WAIT_S, "the console has ended")

    assert console.failure is source.failure
    assert console.return_code == source.failure.exit_code
    assert source.num_closed == 0


async def test_nothing_crashes_before_there_is_a_view() -> None:
    source = SimSource(SimCluster().view)
    console = Console(source, Look())
    console.start_frames = lambda: None  # type: ignore[method-assign]
    async with console.run_test(size=(80, 24), notifications=True) as pilot:
        await pilot.pause()
        for key in (*"12", "down", "pageup", "end", *"3456", "home", "right", "F", "question_mark", "escape"):
            await pilot.press(key)
        await pilot.pause()

        assert console.ui.view is None
        assert source.injected == []


async def test_nothing_crashes_while_there_is_no_job() -> None:
    async with desk(SimSource(SimCluster().view)) as console:
        for number in "12345":
            await console.press(number)
            assert "waiting for the agents on demo-0 and demo-1" in console.text()
            await console.press("down", "pagedown", "end", "home")
        await console.press("F")

        assert "There is no rank yet" in console.text()


@pytest.mark.parametrize("size", [(MIN_WIDTH - 1, 24), (80, MIN_HEIGHT - 1), (20, 5), (9, 1)])
async def test_a_terminal_that_is_too_small_says_so_in_a_line_and_comes_back(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        before = console.lines()
        await console.resize(*size)

        assert console.lines()[0] == f"{MIN_WIDTH}x{MIN_HEIGHT} needed, this is {size[0]}x{size[1]}"[: size[0]].rstrip()
        assert "frozen" not in console.text()
        await console.frames()

        await console.resize(80, 24)
        assert console.lines() == before


@pytest.mark.parametrize("size", [(60, 15), (61, 20), (100, 16), (200, 50), (320, 100)])
async def test_every_view_fills_a_terminal_of_any_size(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), (80, 24)) as console:
        await console.resize(*size)
        for number in "12345":
            await console.press(number)
            lines = console.lines()

            assert len(lines) == size[1]
            assert max(len(line) for line in lines) <= size[0]
            assert "rank 2 on demo-1 is frozen" in console.text()
            assert " Quit" in lines[-1]


async def test_the_selection_stays_where_a_person_puts_it() -> None:
    async with desk(frozen_source()) as console:
        await console.press("2")
        ranks = console.console.query_one(RanksView)
        assert ranks.selected == 2  # the culprit, until somebody chooses

        await console.press("up")
        await console.frames()
        assert ranks.selected == 1
        assert "RANK 1" in console.text()

        await console.press("end")
        assert ranks.selected == 3
        await console.press("home")
        assert ranks.selected == 0
