"""What 16,384 ranks cost the terminal: lines and bytes a frame, a key, and a frame in which nothing has changed.

Counted, never timed: `tests/bench/bench_console.py` has the times.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from textual._compositor import ChopsUpdate, LayoutUpdate

from agent.wire.reports import decode_node_report
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.tui.theme import Look
from app.tui.ui_state import FRAMES_PER_VIEW, MAX_FRAMES_PER_VIEW
from app.view.view import View
from tests.bench.bench_diagnosis import frames, healthy
from tests.support.consoles import Desk, SimSource, StillConsole, desk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rich.console import RenderableType
    from textual.screen import Screen

    from app.tui.source import ConsoleSource

NUM_NODES = 2048
WIDTH, HEIGHT = 200, 50
MAX_BYTES_A_CELL = 2.5
"""Of a table in which every line has changed; Textual's own output takes twice as much."""
MAX_KEY_LINES = 12
"""Two rows and what is known of the rank."""


class MeteredConsole(StillConsole):
    """Counts what it would write to a terminal."""

    num_lines = 0
    num_bytes = 0

    def _display(self, screen: Screen[None], renderable: RenderableType | None) -> None:
        if isinstance(renderable, ChopsUpdate | LayoutUpdate):
            lines = range(self.size.height)
            self.num_lines += len({y for y, _, _ in renderable.spans} if isinstance(renderable, ChopsUpdate) else lines)
            self.num_bytes += len(renderable.render_segments(self.console))
        super()._display(screen, renderable)

    def reset(self) -> None:
        self.num_lines = self.num_bytes = 0


class MovingFleet:
    """Nodes that report every half second; a moment is a view of the model then."""

    def __init__(self) -> None:
        self._names = [f"n{node}" for node in range(NUM_NODES)]
        self._cluster = Cluster(self._names)
        self._diagnoser = Diagnoser()
        self._turn = 0
        self.view = self.move()

    def move(self) -> View:
        self._turn += 1
        now_s = 100.0 + self._turn / 2
        for name, frame in zip(self._names, frames(NUM_NODES, self._turn, healthy), strict=True):
            self._cluster.apply(name, decode_node_report(frame), now_s)
        found = self._diagnoser.observe(self._cluster, now_s)
        for job_id, job in found.jobs.items():  # as of a fleet that has been watched for longer: nothing spins
            found.jobs[job_id] = msgspec.structs.replace(job, is_judged=True)
        self.view = View(self._cluster, found, now_s)
        return self.view


@pytest.fixture(scope="module")
def fleet() -> MovingFleet:
    fleet = MovingFleet()
    fleet.move()
    return fleet


@asynccontextmanager
async def metered(source: ConsoleSource, *keys: str) -> AsyncIterator[tuple[Desk, MeteredConsole]]:
    """Open a console on a large screen and show something, all of it painted."""
    console = MeteredConsole(source, Look())
    async with console.run_test(size=(WIDTH, HEIGHT)) as pilot:
        opened = Desk(console, pilot)
        await opened.settle()
        await opened.frames(MAX_FRAMES_PER_VIEW + 1)
        await opened.press(*keys)
        await opened.frames(MAX_FRAMES_PER_VIEW + 1)
        console.reset()
        yield opened, console


@pytest.mark.parametrize("keys", [(), ("2",), ("2", "v"), ("3",), ("4",)], ids=["overview", "grid", "table", "3", "4"])
async def test_a_frame_in_which_nothing_has_changed_writes_nothing(fleet: MovingFleet, keys: tuple[str, ...]) -> None:
    async with metered(SimSource(lambda: fleet.view), *keys) as (opened, console):
        await opened.frames(MAX_FRAMES_PER_VIEW + 1)

        assert (console.num_lines, console.num_bytes) == (0, 0)


@pytest.mark.parametrize("keys", [("2",), ("2", "v")], ids=["grid", "table"])
async def test_a_frame_of_a_fleet_that_moves_stays_within_its_budget(fleet: MovingFleet, keys: tuple[str, ...]) -> None:
    async with metered(SimSource(lambda: fleet.view), *keys) as (opened, console):
        fleet.move()
        await opened.frames(MAX_FRAMES_PER_VIEW + 1)

        assert 0 < console.num_lines <= HEIGHT
        assert console.num_bytes <= MAX_BYTES_A_CELL * WIDTH * HEIGHT


@pytest.mark.parametrize(("keys", "key"), [(("2",), "right"), (("2", "v"), "down")], ids=["grid", "table"])
async def test_a_key_writes_the_rows_it_concerns(fleet: MovingFleet, keys: tuple[str, ...], key: str) -> None:
    async with metered(SimSource(lambda: fleet.view), *keys, "home") as (opened, console):
        await opened.press(key)

        assert " RANK 1" in opened.lines()
        assert 0 < console.num_lines <= MAX_KEY_LINES


async def test_a_slow_link_gets_a_part_of_the_lines_and_the_rest_in_later_frames(fleet: MovingFleet) -> None:
    async with metered(SimSource(lambda: fleet.view), "2", "v") as (opened, console):
        fleet.move()
        console.pacer._bytes_s = 100_000.0
        counts = []
        for _ in range(3 * MAX_FRAMES_PER_VIEW):
            before = console.num_lines
            await opened.frames(1)
            counts.append(console.num_lines - before)
        shown = opened.lines()
        console.pacer.restart()
        await opened.frames(MAX_FRAMES_PER_VIEW + 1)

        assert max(counts) < HEIGHT / 2
        assert sum(counts) > HEIGHT / 2
        assert opened.lines() == shown, "in the end all of it is there"


async def test_looks_at_the_model_are_rarer_the_more_they_cost(fleet: MovingFleet) -> None:
    def look_long() -> View:
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        return fleet.view

    quick, long = SimSource(lambda: fleet.view), SimSource(look_long)
    for source in (quick, long):
        async with desk(source) as opened:
            opened.console.ui.max_frames_per_view = MAX_FRAMES_PER_VIEW
            before = source.num_views
            await opened.frames(4 * MAX_FRAMES_PER_VIEW)
            source.num_views -= before

    assert quick.num_views > 2 * long.num_views >= 2 * 4
    assert quick.num_views <= 4 * MAX_FRAMES_PER_VIEW / FRAMES_PER_VIEW
