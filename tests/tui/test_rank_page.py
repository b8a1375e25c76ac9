"""Enter leads from a row to its rank, from there to what it prints, and Esc back; `y` copies what is selected."""

from __future__ import annotations

import base64

import pytest

from app.tui.logs.store import CHUNK_LINES
from app.tui.views.logs import LogsView
from app.tui.views.rank import RankPage
from app.tui.views.ranks import RanksView
from app.tui.widgets.line_view import LineView
from tests.support.consoles import Desk, SimSource, TalkingSource, desk, frozen_source, training_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster


def copied(console: Desk) -> str:
    return console.console.clipboard


@pytest.mark.parametrize("size", [(80, 24), (120, 35), (200, 50)])
async def test_the_page_of_a_rank_looks_as_before(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        await console.show("ranks")
        await console.press("down", "enter")

        assert_looks_as_before(f"rank-{size[0]}x{size[1]}", console.lines())


async def test_enter_opens_the_selected_rank_and_escape_goes_back_to_where_it_was() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await console.press("end", "enter")
        assert "Ranks >  rank 3   demo-1" in console.text()
        assert " 2 Ranks " in console.lines()[0]
        await console.press("left")
        assert "Ranks >  rank 2   demo-1  \u25a0 frozen" in console.text()
        await console.press(*["left"] * 4)
        assert "rank 0   demo-0" in console.text()
        await console.press(*["right"] * 7)
        assert "rank 3   demo-1" in console.text()

        await console.press("escape")
        assert console.console.active == "ranks"
        assert console.console.query_one(RanksView).selected_rank == 3


async def test_a_rank_without_output_is_not_taken_for_a_job_without_output() -> None:
    sim = SimCluster()
    sim.run(2)
    source = SimSource(sim.view)
    source.print("demo-0", -1, "the launcher of a job before", job_id="before")
    source.print("demo-0", 0, "step 29", job_id="demo")
    async with desk(source) as console:
        await console.frames()
        await console.show("ranks")
        await console.press("home", "down", "enter")
        assert "rank 1 has printed nothing yet" in console.text()
        await console.press("left")
        assert "step 29" in console.text()


async def test_what_happened_to_several_ranks_is_told_of_each() -> None:
    source = training_source(12)
    source.sim.freeze(2)
    source.sim.freeze(3)
    source.run(5)
    async with desk(source, (120, 50)) as console:
        for rank in ("2", "3"):
            await console.show("ranks")
            await console.press("home", *["down"] * int(rank), "enter")
            assert f"Ranks >  rank {rank}   demo-1" in console.text()
            events = console.text().partition("EVENTS")[2]
            assert "ranks 2-3 on demo-1 are frozen" in events
            await console.press("escape")


@pytest.mark.parametrize("view", ["overview", "barriers", "stragglers", "memory", "events"])
async def test_enter_leads_from_other_views_to_the_rank_that_they_are_about(view: str) -> None:
    async with desk(frozen_source()) as console:
        await console.show(view)
        await console.press("enter")

        assert f"{view.capitalize()} >  rank 2 " in console.text()
        await console.press("tab")
        assert console.console.active != "rank"


async def test_a_log_line_leads_to_who_printed_it_and_a_rank_to_what_it_prints() -> None:
    source = frozen_source()
    source.print("demo-0", 1, "a line of rank 1")
    async with desk(source) as console:
        await console.show("logs")
        await console.press("enter")
        assert "Logs >  rank 1 " in console.text()
        assert "a line of rank 1" in console.text()

        await console.press("enter")
        logs = console.console.query_one(LogsView)
        assert console.console.active == "logs"
        assert logs.filter.source == "rank=1"
        source.print("demo-0", -1, "a line of torchrun")
        await console.press("e", "escape")
        assert "Logs >  rank 1 " in console.text()
        assert not logs.filter
        await console.press("enter", "2", "6", "escape")
        assert (console.console.active, logs.filter.source) == ("logs", "")
        await console.frames()
        await console.press("enter")
        assert "Nothing here is about one rank." in console.text()


async def test_where_nothing_is_about_a_rank_enter_says_so() -> None:
    async with desk(SimSource(SimCluster().view)) as console:
        for view in ("overview", "ranks", "stragglers", "logs", "events"):
            await console.show(view)
            await console.press("enter")
            assert console.console.active == view

        console.console.action_show_view("rank")
        await console.press("left", "y", "enter")
        assert console.console.active == "logs"


async def test_a_rank_that_waits_stands_still_and_one_that_costs_is_opened_from_its_row() -> None:
    source = TalkingSource(SimCluster())
    source.sim.slow(1, 3.0)
    async with desk(source) as console:
        await console.play(source, 20)
        await console.show("stragglers")
        await console.press("enter")
        assert "Stragglers >  rank 1 " in console.text()
        await console.press("escape", "down", "enter")

        assert console.console.query_one(RankPage).rank != 1


async def test_lines_that_have_not_been_searched_for_those_of_the_rank_are_not_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("app.tui.ui_state.SEARCH_S", 0.0)
    async with desk(frozen_source()) as console:
        logs = console.console.ui.logs
        logs.append("demo-1", 3, "first and last words", is_stderr=False)
        for number in range(20 * CHUNK_LINES):
            logs.append("demo-0", 0, f"step {number}", is_stderr=False)
        await console.show("ranks")
        await console.press("end", "enter")
        assert "older lines not searched yet" in console.text()
        assert "nothing printed yet" not in console.text()
        while "not searched yet" in console.text():
            await console.frames()

        assert "first and last words" in console.text()


async def test_the_page_follows_what_happens_to_its_rank() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source) as console:
        await console.play(source, 3)
        await console.show("ranks")
        await console.press("end", "enter")
        assert "\u25cf running" in console.text() or "waiting" in console.text()
        source.sim.freeze(3)
        await console.play(source, 3)
        source.sim.thaw(3)
        await console.play(source, 3)

        assert "EVENTS" in console.text()
        assert "rank 3: no longer frozen" in console.text()


async def test_a_second_culprit_has_its_verdict_on_its_page() -> None:
    source = training_source(3)
    source.sim.freeze(0)
    source.sim.lose_node(1)
    source.run(9)
    async with desk(source) as console:
        verdicts = source.view().verdicts()
        assert len(verdicts) > 1
        await console.show("ranks")
        await console.press("home", *["down"] * verdicts[1].culprits[0], "enter")

        assert " VERDICT" in console.text()


async def test_y_copies_what_is_selected_and_says_so() -> None:
    source = frozen_source()
    source.print("demo-0", 1, "a last line")
    async with desk(source) as console:
        await console.press("y")
        assert copied(console).startswith("rank 2 on demo-1 is frozen (SIGSTOP)")
        assert copied(console).splitlines()[1].startswith("thaw it: kill -CONT")
        assert "Copied the verdict" in console.text()
        for view, begin in (
            ("ranks", "rank 2  demo-1  frozen  step "),
            ("logs", "demo-0:r1 a last line"),
            ("events", "16:51  verdict  rank 2 on demo-1 is frozen"),
        ):
            await console.show(view)
            await console.press("y")
            assert copied(console).startswith(begin)
        await console.show("ranks")
        await console.press("up", "enter", "y")
        assert copied(console).startswith("rank 1  demo-0")


async def test_what_is_copied_goes_to_the_terminal_by_osc_52(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(frozen_source()) as console:
        written: list[str] = []
        driver = console.console._driver
        assert driver is not None
        monkeypatch.setattr(driver, "write", written.append)
        await console.press("y")

    (sequence,) = [text for text in written if text.startswith("\x1b]52;c;")]
    assert base64.b64decode(sequence[7:-1]).decode() == copied(console)


async def test_before_there_is_anything_y_copies_how_things_stand_or_says_that_there_is_nothing() -> None:
    async with desk(SimSource(SimCluster().view)) as console:
        for view in ("overview", "ranks", "logs", "events"):
            await console.show(view)
            await console.press("y")
            assert copied(console).startswith("waiting for the agents")
        console.console.ui.view = None
        await console.press("y")

        assert "There is nothing to copy yet." in console.text()


async def test_a_click_selects_a_row_and_a_second_one_opens_it() -> None:
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        at = next(y for y, line in enumerate(console.lines()) if line.startswith("    1  demo-0")) - ranks.region.y
        await console.pilot.click("#ranks", offset=(10, at))
        await console.settle()
        assert ranks.selected_rank == 1
        await console.pilot.click("#ranks", offset=(10, 0))  # a heading
        await console.pilot.click("#ranks", offset=(10, 12))  # nothing is there
        await console.settle()
        assert ranks.selected_rank == 1
        await console.pilot.click("#ranks", offset=(10, at + 2), times=2)
        await console.settle()
        assert console.console.active == "rank"
        assert console.console.query_one(RankPage).rank == 3


async def test_a_click_marks_a_log_line_which_is_then_copied() -> None:
    source = frozen_source()
    async with desk(source, (120, 35)) as console:
        await console.show("logs")
        logs = console.console.query_one(LogsView)
        await console.pilot.click("#logs", offset=(10, 2))
        await console.settle()
        assert logs.marked == logs.ui.logs.first + 1
        await console.press("y")
        stored = logs.ui.logs.line(1)

        assert copied(console) == f"{stored.node}:r{stored.rank} {stored.text}"
        assert any(line.startswith("\u25b8") for line in console.lines())


def test_a_view_without_rows_to_select_takes_clicks_for_nothing() -> None:
    assert LineView.has_selection is False
