"""The Events view: what happened, and when."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import TYPE_CHECKING, cast

import pytest

from app.diagnosis.causes import Severity
from app.recording.events import MAX_EVENTS, EventKind, EventLog
from app.recording.replay import Replay
from app.session.session import Session, wall_offset_s
from app.tui.views.events import EventsView
from tests.support.consoles import TalkingSource, desk
from tests.support.recordings import Watch, frozen_recording
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from pathlib import Path

    from app.recording.events import Event
    from tests.support.consoles import Desk

SIZES = ((80, 24), (120, 35))


async def live_through_a_night(console: Desk, source: TalkingSource) -> None:
    """Let a training run, a rank freeze and go on, and a node be lost, before the eyes of the console."""
    await console.play(source, 12)
    source.sim.freeze(2)
    await console.play(source, 4)
    source.sim.thaw(2)
    source.events.add_event("on request: rank 2 on demo-1 thawed", source.sim.now_s)
    await console.play(source, 4)
    source.sim.lose_node(1)
    await console.play(source, 9)


def selected(console: Desk) -> str:
    (line,) = [line for line in console.lines() if line.startswith("▸")]
    return line


def view_of(console: Desk) -> EventsView:
    return console.console.query_one(EventsView)


def things(console: Desk) -> list[str]:
    return re.findall(r"thing \d+|\w+ is hot|(?:rank )?\w+ is slow", console.text())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_night_looks_as_before(size: tuple[int, int]) -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, size) as console:
        await live_through_a_night(console, source)
        await console.show("events")
        assert_looks_as_before(f"night-events-{size[0]}x{size[1]}", console.lines())


async def test_the_newest_event_is_followed_until_another_is_selected() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        for number in range(40):
            source.events.add_event(f"thing {number}", source.sim.now_s)
        await console.frames()
        assert "thing 39" in selected(console)

        await console.press("up", "up")
        source.events.add_event("thing 40", source.sim.now_s)
        await console.frames()
        assert "thing 37" in selected(console)
        assert "End: follow the latest" in console.text()

        await console.press("end")
        source.events.add_event("thing 41", source.sim.now_s)
        await console.frames()
        assert "thing 41" in selected(console)
        assert "End: follow" not in console.text()


async def test_what_is_read_stays_where_it_is_while_old_events_are_dropped() -> None:
    source = TalkingSource(SimCluster())
    for number in range(MAX_EVENTS):
        source.events.add_event(f"thing {number}", source.sim.now_s)
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        await console.press("pageup", "up")
        before = [line for line in console.lines() if "thing" in line]
        for number in range(30):
            source.events.add_event(f"late {number}", source.sim.now_s)
        await console.frames()
        assert [line for line in console.lines() if "thing" in line or "late " in line] == before
        assert "older dropped" in console.text()


async def test_an_event_of_before_comes_to_its_place_and_what_is_read_stays_where_it_is() -> None:
    source = TalkingSource(SimCluster())
    source.events.add_event("job a: running", 100.0, EventKind.JOB)
    for number in range(60):
        source.events.add_event(f"thing {number}", 190.0 + number, EventKind.CHECKPOINT)
    source.events.add_event("rank 3 is slow", 300.0, EventKind.VERDICT, Severity.WARNING)
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        await console.press("pageup", "up")
        before, chosen = things(console), view_of(console).event
        source.events.add_event("its GPU is hot", 140.0, EventKind.CAUSE, Severity.WARNING)
        assert view_of(console).event is chosen, "also before the next frame"
        await console.frames()
        assert (things(console), view_of(console).event) == (before, chosen)

        view_of(console).take_filter("kind=checkpoint")
        source.events.add_event("its disk is slow", 130.0, EventKind.CAUSE, Severity.WARNING)
        await console.frames()
        assert "EVENTS  60 of " in console.text()
        assert view_of(console).event is chosen
        await console.press("escape", "p", "end")
        source.events.add_event("its link is slow", 120.0, EventKind.CAUSE, Severity.WARNING)
        await console.frames()
        assert things(console) == ["link is slow", "disk is slow", "GPU is hot", "rank 3 is slow"]


class PlainSource(TalkingSource):
    """Tells times as a session does."""

    def time_text(self, event: Event) -> str:
        return Session.time_text(cast("Session", self), event)


async def test_an_event_of_days_ago_has_its_day_and_the_columns_stay_aligned() -> None:
    source = PlainSource(SimCluster())
    source.events = EventLog(wall_offset_s)
    now_s = time.monotonic()
    source.events.add_event("thing of then", now_s - 3 * 86_400.0)
    source.events.add_event("thing of now", now_s)
    async with desk(source, (80, 24)) as console:
        await console.show("events")
        then, now = [line for line in console.lines() if "thing of" in line]
        assert re.search(r" \d\d-\d\d \d\d:\d\d  ", then)
        assert re.search(r"\d\d:\d\d:\d\d     ", now)
        assert then.index("thing") == now.index("thing")


def test_what_was_said_keeps_its_time_while_the_machine_sleeps_and_its_clock_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    session, now_s = Session({"gpu1": tmp_path}), int(time.time()) + 0.9  # noqa: TID251 - what users see
    times = []
    for wall_s in (now_s, now_s + 8 * 3600.0, now_s + 8 * 3600.0 - 5.0):  # before and after a sleep, and set back
        monkeypatch.setattr("time.time", lambda wall_s=wall_s: wall_s)
        session.log_done("rank 2 on gpu1 thawed")
        times.append(f"{datetime.fromtimestamp(wall_s):%H:%M:%S}")  # noqa: DTZ006 - as above
        assert [session.time_text(event) for event in reversed(list(session.events.latest_first()))] == times

    past = EventLog()
    past.add_event("node gpu1: up", time.monotonic() - 60.0, EventKind.NODE)
    log = session.events.reaching_back(past, time.monotonic())
    assert session.time_text(log[0]) == f"{datetime.fromtimestamp(wall_s - 60.0):%H:%M:%S}"  # noqa: DTZ006 - as above


async def test_the_wheel_moves_the_window_and_stops_following() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        for number in range(60):
            source.events.add_event(f"thing {number}", source.sim.now_s)
        await console.frames()
        view_of(console).scroll_rows(-9)
        source.events.add_event("thing 60", source.sim.now_s)
        await console.frames()
        assert not view_of(console).is_following
        assert "thing 60" not in console.text()


async def test_a_long_event_is_shown_in_full_when_it_is_selected() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (80, 30)) as console:
        await console.show("events")
        source.events.add_event("a long story " * 12 + "with an end", source.sim.now_s)
        await console.frames()
        assert "IN FULL" in console.text()
        assert "with an end" in console.text()


async def test_text_of_others_is_neither_markup_nor_an_escape() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        hostile = "[red]fine[/red] \x1b[2J\x07 " + "x" * 10_000
        source.events.add_event(hostile, source.sim.now_s, EventKind.NOTE, Severity.QUIET)
        await console.frames()
        assert "[red]fine[/red]" in selected(console)
        assert "\x1b" not in console.text()


async def test_nothing_has_happened_before_the_first_report() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (100, 24)) as console:
        await console.show("events")
        assert "nothing has happened yet" in console.text()
        await console.press("up", "down", "home", "end", "pageup")


async def test_a_recording_that_goes_back_has_the_events_up_to_that_moment() -> None:
    watch = Watch()
    replay = Replay(frozen_recording(), clock=watch)
    async with desk(replay, (100, 24)) as console:
        await console.show("events")
        replay.skip(60)
        await console.frames(60)
        assert "✖ verdict    rank 2 on demo-1 is frozen" in console.text()
        assert "0:01" in console.text(), "events stand at their place in the recording"

        replay.skip(-60)
        await console.frames()
        assert "✖ verdict" not in console.text()


async def test_between_going_back_and_the_next_frame_the_events_are_those_that_are_shown() -> None:
    replay = Replay(frozen_recording(), clock=Watch())
    async with desk(replay, (100, 24)) as console:
        await console.show("events")
        replay.skip(60)
        await console.frames(60)
        await console.press("end", "comma", "y", "enter", "escape", "up", "pageup")
        assert "rank 2 on demo-1 is frozen" in console.console.clipboard

        await console.frames()
        await console.press("home", "y")
        assert "rank 2 on demo-1 is frozen" not in console.console.clipboard


async def test_the_selected_event_stays_in_sight_when_what_is_in_full_takes_its_room() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (80, 24)) as console:
        for number in range(60):
            text = "a long story " * 20 if number == 30 else f"thing {number}"
            source.events.add_event(text, source.sim.now_s)
        await console.frames()
        await console.show("events")
        await console.press("home", *["down"] * 30)
        assert "a long story" in selected(console)
        assert "IN FULL" in console.text()

        view_of(console).scroll_rows(-9)
        await console.settle()
        assert not any(line.startswith("▸") for line in console.lines()), "the wheel moves the window alone"
