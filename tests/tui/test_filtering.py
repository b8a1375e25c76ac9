"""What is typed behind `/` filters the view that is shown, at once, and is kept or taken away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from app.tui.logs import matches, search
from app.tui.logs.matches import LogMatches
from app.tui.logs.search import SearchThreads
from app.tui.logs.store import CHUNK_LINES
from app.tui.views.events import EventsView
from app.tui.views.logs import LogsView
from app.tui.views.ranks import RanksView
from app.tui.widgets.line_view import FilterBar
from tests.support.consoles import Desk, SimSource, TalkingSource, desk, frozen_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


async def type_filter(console: Desk, text: str, *, is_open: bool = False) -> None:
    await console.press(*([] if is_open else ["slash"]), *(_KEYS.get(character, character) for character in text))


async def until_searched(console: Desk) -> None:
    """Let frames come until every line has been looked at."""
    while "not searched yet" in console.text():
        await console.frames(1)


def numbers(console: Desk) -> list[str]:
    return re.findall(r"(?:line|late) \d+\.", console.text())


_KEYS = {
    " ": "space",
    "=": "equals_sign",
    "/": "slash",
    "!": "exclamation_mark",
    "<": "less_than_sign",
    ">": "greater_than_sign",
    ",": "comma",
    "(": "left_parenthesis",
    "*": "asterisk",
}


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_a_filter_being_typed_looks_as_before(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        await console.show("ranks")
        await console.press("slash")
        assert_looks_as_before(f"filter-empty-{size[0]}x{size[1]}", console.lines())
        await type_filter(console, "state=waiting nod=demo-0", is_open=True)
        assert_looks_as_before(f"filter-wrong-{size[0]}x{size[1]}", console.lines())


async def test_ranks_are_filtered_as_one_types_enter_keeps_and_escape_clears() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        ranks, bar = console.console.query_one(RanksView), console.console.query_one(FilterBar)
        await type_filter(console, "state=wai")
        assert "RANKS  3 of 4" in console.text()
        await console.press("up", "up")  # keys of the view work meanwhile
        assert ranks.selected_rank == 0

        await console.press("enter")
        assert not bar.display
        assert "state=wai" in console.text()
        await console.press("1", "2")  # digits are keys of the views again
        assert "RANKS  3 of 4" in console.text()

        await console.press("slash", "t", "escape")
        assert "RANKS  " not in console.text()
        assert ranks.num_rows == 4


async def test_what_is_wrong_is_said_and_the_last_filter_stays() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await type_filter(console, "state=frozen /(")
        assert "at character 14: /(/ is no pattern: missing ): (" in console.text()
        assert console.console.query_one(RanksView).num_rows == 1
        await console.frames()

        await console.press("backspace")
        assert "no pattern" not in console.text()


@pytest.mark.parametrize(("wrong", "problem"), [("foo=bar", "foo"), ("rank=9x", "9x")])
async def test_enter_keeps_a_wrong_filter_open_with_its_error(wrong: str, problem: str) -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        ranks, bar = console.console.query_one(RanksView), console.console.query_one(FilterBar)
        await type_filter(console, "state=waiting")
        await console.press("enter")
        await type_filter(console, f" {wrong}")
        await console.press("enter")
        await console.frames()
        assert bar.display
        assert re.search(rf"at character \d+: .*{problem}", console.text())

        await console.press("tab", "2")
        assert console.console.query_one(FilterBar).display is False
        assert ranks.filter.source == "state=waiting"

        await type_filter(console, f" {wrong}")
        await console.press("enter", *["backspace"] * len(wrong), "enter")
        assert console.console.query_one(FilterBar).display is False
        assert ranks.num_rows == 3
        await type_filter(console, f" {wrong}")
        await console.press("escape")
        assert ranks.num_rows == 4


async def test_escape_takes_a_kept_filter_away() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await type_filter(console, "frozen")
        await console.press("enter", "escape")

        assert console.console.query_one(RanksView).num_rows == 4


async def test_no_rank_may_be_left() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await type_filter(console, "rank=77")
        assert "RANKS  0 of 4" in console.text()
        assert "no rank is like that" in console.text()
        await console.press("down", "pagedown", "end", "home")
        await console.frames()
        await console.press("F")

        assert console.console.query_one(RanksView).selected_rank is None


async def test_where_nothing_can_be_filtered_the_ranks_are() -> None:
    async with desk(frozen_source()) as console:
        await console.show("memory")
        await type_filter(console, "frozen")
        assert console.console.active == "ranks"
        await console.press("tab")
        assert console.console.active == "barriers"
        assert not console.console.query_one(FilterBar).display


async def test_p_shows_problems_only_and_everything_again() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("p")
        assert console.console.active == "ranks"
        assert "RANKS  1 of 4" in console.text()
        assert "problems only" in console.text()
        await console.press("p")
        assert console.console.query_one(RanksView).num_rows == 4

        await console.show("events")
        await console.press("p")
        assert console.console.query_one(EventsView).num_rows == 1
        await console.press("escape")
        assert console.console.query_one(EventsView).num_rows > 1


async def test_ranks_are_sorted_by_key_and_from_the_palette() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.press("o")
        assert console.console.active == "ranks"
        assert "by wait" in console.text()
        seen = []
        for _ in range(5):
            await console.press("o")
            seen.append(next((line.split("by ")[1] for line in console.lines() if "RANKS  4  by " in line), "rank"))
        assert seen == ["step", "memory", "cpu", "rank", "wait"]
        await console.pilot.app.run_action("screen.sort('step')", console.console.screen)
        await console.settle()
        assert "by step" in console.text()


async def test_the_selection_goes_with_its_rank_when_ranks_are_sorted_and_filtered() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        await console.press("end", "o")
        assert ranks.selected_rank == 3
        await console.press("o", "o")
        assert ranks.selected_rank == 3
        await type_filter(console, "rank=2-3")
        assert (ranks.selected_rank, ranks.num_rows) == (3, 2)
        await console.press("escape")

        assert ranks.selected_rank == 3


async def test_logs_are_filtered_and_what_was_looked_for_is_marked() -> None:
    source = TalkingSource(SimCluster())
    for number in range(40):
        source.print("demo-0", number % 4, f"line {number}. of {'many' if number % 2 else 'few'}")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await type_filter(console, "few rank=0")
        assert "LOGS  10 of 40 lines" in console.text()
        source.print("demo-0", 0, "and few more")
        source.print("demo-0", 0, "and other ones")
        await console.frames(1)
        assert "LOGS  11 of 42 lines" in console.text()
        assert "and few more" in console.text()
        assert "other ones" not in console.text()
        style = console.console.ui.look.palette.found
        marked = {
            segment.text for strip in console.console.screen._compositor.render_strips() for segment in strip
            if segment.style and segment.style.bgcolor == style.bgcolor
        }  # fmt: skip
        assert marked == {"few"}


async def test_a_line_that_is_read_stays_while_others_are_found() -> None:
    source = SimSource(SimCluster().view)
    for number in range(3 * CHUNK_LINES):
        source.print("demo-0", number % 4, f"line {number}.")
    async with desk(source, (80, 24)) as console:
        await console.show("logs")
        await type_filter(console, "0.")
        await until_searched(console)
        await console.press("enter", "pageup")
        before = numbers(console)
        for number in range(40):
            source.print("demo-0", 0, f"late {number}0.")
        await console.frames()
        await until_searched(console)

        assert numbers(console) == before
        assert "new below, End follows" in console.text()
        await console.press("home")
        assert "line 0." in console.text()
        await console.press("end")
        assert "late 390." in console.text()


async def test_p_in_the_logs_shows_errors_and_the_stderr_of_culprits() -> None:
    source = frozen_source()
    source.print("demo-1", 2, "a last word", "stderr")
    source.print("demo-0", 1, "a word of another", "stderr")
    source.print("demo-0", 0, "RuntimeError: boom")
    async with desk(source) as console:
        await console.show("logs")
        await console.press("p")

        assert "LOGS  2 of" in console.text()
        assert "a last word" in console.text()
        assert "RuntimeError: boom" in console.text()


async def test_e_goes_from_error_to_error_and_says_when_there_is_none() -> None:
    source = SimSource(SimCluster().view)
    for number in range(300):
        source.print("demo-0", 0, f"ValueError: {number}." if number in {20, 150} else f"line {number}")
    async with desk(source, (120, 24)) as console:
        logs = console.console.query_one(LogsView)
        await console.press("e")
        assert console.console.active == "logs"
        assert "ValueError: 150." in console.text()
        assert not logs.is_following
        await console.press("e")
        assert "further down." in console.text()
        await console.press("E")
        assert "ValueError: 20." in console.text()
        await console.press("E")
        assert "further up." in console.text()
        await console.press("e")
        assert "ValueError: 150." in console.text()
        await console.press("home", "e")
        assert "ValueError: 20." in console.text()

        await type_filter(console, "!150")
        await console.press("enter", "e")
        assert logs.marked == 20


async def test_many_lines_are_searched_by_threads_for_each_filter_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks: list[object] = []

    class Counted(SearchThreads):
        def ask(self, call: Callable[[], Any]) -> Future[Any]:
            tasks.append(self)
            return super().ask(call)

    monkeypatch.setattr(search, "SearchThreads", Counted)
    monkeypatch.setattr(matches, "PIECE_S", 60.0)  # no pattern is slow, however busy this machine is
    async with desk(SimSource(SimCluster().view), (120, 24)) as console:
        store = console.console.ui.logs
        for number in range(24 * CHUNK_LINES):
            store.append("demo-0", number % 4, f"line {number}. {'x' * 100}", is_stderr=False)
        await console.show("logs")
        await type_filter(console, "/nan|line 7./")
        while not tasks:
            await console.frames(1)
        first = set(tasks)
        await console.press("backspace", "backspace", "0", ".", "/", "enter")
        await until_searched(console)

        assert console.console.query_one(LogsView).num_rows == sum(
            re.search("nan|line 70.", f"line {number}. ") is not None for number in range(24 * CHUNK_LINES)
        )
        assert set(tasks) > first


async def test_e_finds_the_errors_among_many_that_are_hidden_without_asking_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = SimSource(SimCluster().view)
    async with desk(source, (120, 24)) as console:
        ui, logs = console.console.ui, console.console.query_one(LogsView)
        for number in range(4 * CHUNK_LINES):
            is_far = number in {100, 9000}
            ui.logs.append("demo-0", 1 if is_far else number % 2 * 2, f"ValueError: {number}.", is_stderr=True)
        await console.show("logs")
        await type_filter(console, "rank=1")
        await console.press("enter")
        while ui.errors.num_unsearched or "not searched yet" in console.text():
            await console.frames(1)
        asked: list[int] = []
        real = LogMatches.place_of

        def counted(of: LogMatches, number: int) -> int:
            asked.append(number)
            return real(of, number)

        monkeypatch.setattr(LogMatches, "place_of", counted)

        for key, found in (("e", 9000), ("E", 100), ("e", 9000), ("e", 9000)):
            await console.press(key)
            assert logs.marked == found
        assert "further down." in console.text()
        assert len(asked) < 100


async def test_e_says_when_there_has_been_no_error() -> None:
    async with desk(SimSource(SimCluster().view)) as console:
        await console.press("e")

        assert "No line at level error yet." in console.text()


async def test_events_are_filtered() -> None:
    async with desk(frozen_source()) as console:
        await console.show("events")
        events = console.console.query_one(EventsView)
        num_events = events.num_rows
        await type_filter(console, "kind=verdict")
        assert f"EVENTS  1 of {num_events}" in console.text()
        assert events.selected_rank == 2
        await console.press("up", "enter", "escape")
        assert events.num_rows == num_events


async def test_what_is_pasted_into_a_filter_is_shown_and_not_interpreted() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)

        assert ranks.take_filter("\x1b]0;x\x07[/b]") == ""
        await console.settle()
        assert "\\x1b]0;x\\x07[/b]" in console.text()
        assert "\\x1b" in ranks.take_filter("\x1b=1 x\x1b=2 state=\x1b")


async def test_a_terminal_that_becomes_too_small_ends_typing() -> None:
    async with desk(frozen_source()) as console:
        await console.press("slash")
        await console.resize(40, 10)
        await console.resize(120, 35)

        assert not console.console.query_one(FilterBar).display
