"""A past that comes after the first paint: charts and events reach back, and what a person looks at stays."""

from __future__ import annotations

import pytest

from app.tui.views.events import EventsView
from app.view.nodes import reading_text
from tests.support.consoles import TalkingSource, desk
from tests.support.memories import frozen_and_thawed, remembered
from tests.support.screens import assert_looks_as_before

SIZES = ((80, 24), (120, 35))
SIZE_NAMES = ("80x24", "120x35")
WATCHED_S = 8.0


def found_source() -> tuple[TalkingSource, float]:
    """Return a training in which rank 2 was frozen before anybody looked on, and when somebody begins to."""
    sim, _ = frozen_and_thawed(20.0)
    return TalkingSource(sim), sim.now_s


def look_back(source: TalkingSource, attached_s: float) -> None:
    """Let the console have what the nodes remember."""
    past = remembered(source.sim, source.sim.now_s - 1.0)
    source.history.reach_back(past.history, past.at_s)
    source.events = source.events.reaching_back(past.events, attached_s)


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_charts_and_events_reach_back_once_the_past_has_come(size: tuple[int, int]) -> None:
    source, attached_s = found_source()
    async with desk(source, size) as console:
        await console.show("charts")
        await console.play(source, WATCHED_S)
        assert "1 min" not in console.lines()[-2], "the axis is as short as it has looked on"
        look_back(source, attached_s)
        await console.play(source, 1.0)
        assert_looks_as_before(f"reached-back-charts-{size[0]}x{size[1]}", console.lines())
        await console.show("events")
        assert_looks_as_before(f"reached-back-events-{size[0]}x{size[1]}", console.lines())
        assert "frozen" not in console.lines()[0], "what is over is not said to be so now"


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_while_the_past_is_read_the_views_say_so_in_place_of_a_curve_of_one_point(size: tuple[int, int]) -> None:
    source, attached_s = found_source()
    source.reading = reading_text(["demo-0", "demo-1"], ["demo-1"])
    async with desk(source, size) as console:
        for _ in range(2):
            assert "reading what happened before: 1" in console.text()
            await console.play(source, WATCHED_S)
        for view in ("charts", "events"):
            await console.show(view)
            assert "reading what happened before: 1" in console.text()
        source.reading = ""
        look_back(source, attached_s)
        for view in ("events", "charts", "overview"):
            await console.show(view)
            await console.play(source, 0.4)
            assert "reading" not in console.text()


def test_what_is_read_is_said_by_node() -> None:
    assert reading_text(["h1"], ["h1"]) == "reading what happened before on h1"
    assert reading_text(["h1", "h2"], ["h2"]) == "reading what happened before: 1 of 2 done, waiting for h2"
    assert reading_text(["h1", "h2"], []) == "replaying what happened before"


async def test_the_event_that_is_selected_stays_selected_when_older_ones_come_in_front() -> None:
    source, attached_s = found_source()
    async with desk(source) as console:
        await console.show("events")
        for number in range(5):
            source.events.add_event(f"done {number}", source.sim.now_s)
        await console.play(source, WATCHED_S)
        await console.press("up", "up")
        events = console.console.query_one(EventsView)
        selected = events.event
        assert selected is not None
        assert selected.text == "done 2"
        look_back(source, attached_s)
        await console.play(source, 0.4)

        assert events.event is not None
        assert events.event.text == "done 2"
        assert not events.is_following
