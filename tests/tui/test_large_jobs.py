"""A thousand ranks cost no more to paint than fit on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from textual.events import MouseScrollDown

from agent.wire.reports import ProcessState
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.tui.actions import VIEW_NAMES
from app.tui.views.logs import LogsView
from app.tui.views.ranks import RanksView
from app.view.view import View
from ddpcore.wire import Fault, FaultKind
from tests.support.consoles import Desk, SimSource, desk
from tests.support.node_reports import group_report, job_status, node_report, rank_report, worker_report
from tests.support.screens import screen_strips

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.view.memory import MemoryRow
    from app.view.rows import RankRow

NUM_RANKS = 1024
RANKS_PER_NODE = 8
FROZEN = 700
HEIGHT = 35
MAX_SEGMENTS_PER_LINE = 48
"""Every segment is a write to the terminal with its own escape codes: a table row of 12 columns needs about 40."""


class CountingView(View):
    """Counts the rows that are made."""

    num_made = 0

    def ranks(self, wanted: Sequence[int] | None = None) -> list[RankRow]:
        rows = super().ranks(wanted)
        CountingView.num_made += len(rows)
        return rows

    def memory(self, wanted: Sequence[int] | None = None) -> list[MemoryRow]:
        rows = super().memory(wanted)
        CountingView.num_made += len(rows)
        return rows


@pytest.fixture(scope="module")
def large_view() -> CountingView:
    """Return 1,024 ranks on 128 nodes, all waiting for one that is frozen."""
    names = [f"node-{index}" for index in range(NUM_RANKS // RANKS_PER_NODE)]
    cluster = Cluster(names)
    diagnoser = Diagnoser()
    diagnosis = diagnoser.observe(cluster, 10.0)
    for turn in (1, 2, 3):
        for index, name in enumerate(names):
            first = index * RANKS_PER_NODE
            workers = []
            for rank in range(first, first + RANKS_PER_NODE):
                is_frozen = rank == FROZEN
                groups = [group_report(9 if is_frozen else 10, None if is_frozen else 0.5 + turn)]
                report = rank_report(
                    rank, NUM_RANKS, report_seq=turn, groups=groups, step=100, loss=2.5, steps_done=100
                )
                process = ProcessState.FROZEN if is_frozen else ProcessState.RUNNING
                workers.append(worker_report(rank, report, process=process, report_age_s=0.1))
            status = job_status(
                first, world_size=NUM_RANKS, num_nodes=len(names), node_rank=index, local_world_size=RANKS_PER_NODE
            )
            cluster.apply(name, node_report(turn, [status], workers), 10.0 + turn)
        diagnosis = diagnoser.observe(cluster, 10.1 + turn)
    return CountingView(cluster, diagnosis, 13.1)


async def made_by(console: Desk, *keys: str) -> int:
    """Return how many rows a frame makes, after some keys."""
    await console.press(*keys)
    CountingView.num_made = 0
    await console.frames(2)
    return CountingView.num_made


@pytest.mark.parametrize("name", ["overview", "ranks", "barriers", "memory"])
async def test_a_frame_asks_only_for_the_rows_on_the_screen(name: str, large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        await console.show(name)
        num_made = await made_by(console)

        assert 0 < num_made <= 2 * HEIGHT
        assert "rank 700 on node-87 is frozen" in console.text()


@pytest.mark.parametrize("number", range(1, len(VIEW_NAMES) + 1))
async def test_a_frame_stays_within_its_budget_of_lines_and_segments(number: int, large_view: CountingView) -> None:
    source = SimSource(lambda: large_view)
    for line in range(1000):
        source.print("node-0", line % 8, f"line {line}")
    async with desk(source, (200, HEIGHT)) as console:
        await console.press(str(number))
        rendered = screen_strips(console.console)

        assert len(rendered) == HEIGHT
        assert max(len(list(strip)) for strip in rendered) <= MAX_SEGMENTS_PER_LINE


async def test_the_culprit_is_selected_and_in_the_window(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        await console.press("2", "v")

        assert console.console.query_one(RanksView).selected == FROZEN
        assert "RANK 700" in console.text()
        assert any("700" in line and "frozen" in line for line in console.lines()[5:20])


async def test_the_selection_walks_pages_and_jumps_to_the_ends(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        await console.press("2", "v")
        ranks = console.console.query_one(RanksView)

        await console.press("down", "down", "up")
        assert ranks.selected == FROZEN + 1
        await console.press("pagedown")
        assert ranks.selected > FROZEN + 10
        await console.press("end")
        assert ranks.selected == NUM_RANKS - 1
        assert "1023" in console.text()
        await console.press("home")
        assert (ranks.selected, ranks.top) == (0, 0)
        assert await made_by(console, "pagedown") <= 2 * HEIGHT


async def test_the_wheel_moves_the_window_and_leaves_the_selection(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        await console.press("2", "v")
        ranks = console.console.query_one(RanksView)
        top = ranks.top
        await console.pilot._post_mouse_events([MouseScrollDown], widget=ranks)
        await console.frames(2)

        assert ranks.top == top + 3
        assert ranks.selected == FROZEN


async def test_no_row_is_blank_after_the_window_has_grown_at_the_end(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, 20)) as console:
        for name in ("ranks", "barriers", "memory"):
            await console.show(name)
            if name == "ranks":
                await console.press("v")
            await console.press("end")
            await console.resize(120, 50)
            rows = [line for line in console.lines() if "node-" in line]

            assert len(rows) >= 20
            assert all(line.strip() != "" for line in console.lines()[5:40])
            await console.resize(120, 20)


async def test_the_overview_names_the_culprit_among_the_first_ranks(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        lines = [line for line in console.lines() if "frozen" in line]

        assert any(line.split()[0] == "700" for line in lines)
        assert "more ranks: press 2" in console.text()
        assert "and 125 more nodes" in console.text()


async def test_keys_work_between_frames(large_view: CountingView) -> None:
    async with desk(SimSource(lambda: large_view), (120, HEIGHT)) as console:
        await console.show("logs")
        assert console.console.query_one(LogsView).display
        await console.press("2", "v", "down")

        assert console.console.query_one(RanksView).selected == FROZEN + 1


async def test_a_fault_is_asked_for_without_a_row_for_each_rank(large_view: CountingView) -> None:
    source = SimSource(lambda: large_view)
    async with desk(source, (120, HEIGHT)) as console:
        await console.press("2", "v", "home", "down", "down")
        assert await made_by(console, "F") <= 2 * HEIGHT
        assert "others: select one in the Ranks view first" in console.text()
        await console.press("escape", "F", "enter", "down")
        assert f"Freeze rank {FROZEN}" in console.text()
        await console.press("down", "up", "up", "enter", "right", "enter")

        assert source.injected == [Fault(FaultKind.FREEZE, 2)]
