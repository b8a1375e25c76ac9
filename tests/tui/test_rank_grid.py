"""Many ranks are a cell each: glyph and colour by state, with the selected one's details below."""

from __future__ import annotations

import numpy as np
import pytest

from app.diagnosis.causes import RankState
from app.diagnosis.rank_facts import STATE_CODE
from app.tui.theme import Look
from app.tui.views.ranks import RanksView
from app.tui.widgets.drawing import GROUP, Line, RankGrid
from tests.support.consoles import SimSource, desk, frozen_source
from tests.support.screens import assert_looks_as_before, screen_strips
from tests.support.sim import SimCluster


def many(num_nodes: int = 40, ranks_per_node: int = 8) -> SimSource:
    sim = SimCluster(num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    sim.run_to_step(5)
    sim.freeze(77)
    sim.run(4)
    view = sim.view()
    return SimSource(lambda: view)


@pytest.fixture(scope="module")
def source() -> SimSource:
    return many()


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_a_grid_looks_as_before(source: SimSource, size: tuple[int, int]) -> None:
    async with desk(source, size) as console:
        await console.show("ranks")

        assert_looks_as_before(f"grid-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("look", [Look(has_colour=False), Look(is_ascii=True)])
async def test_a_grid_tells_states_by_shape_alone(source: SimSource, look: Look) -> None:
    async with desk(source, (80, 24), look) as console:
        await console.show("ranks")

        assert look.glyphs.states[RankState.FROZEN] + " 1 frozen" in console.text()
        assert look.glyphs.states[RankState.WAITING] * 5 in console.text()


async def test_arrows_walk_over_the_cells_and_the_details_follow(source: SimSource) -> None:
    async with desk(source, (80, 24)) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        assert ranks.selected_rank == 77  # the culprit, until somebody chooses
        await console.press("right", "right", "left")
        assert ranks.selected_rank == 78
        await console.press("up")
        assert ranks.selected_rank == 78 - 64
        await console.press("home")
        assert ranks.selected_rank == 0
        await console.press("down", "end")
        assert ranks.selected_rank == 319
        assert "RANK 319" in console.text()
        await console.press("enter")
        assert "Ranks >  rank 319" in console.text()


async def test_v_goes_to_the_table_and_back(source: SimSource) -> None:
    async with desk(source, (80, 24)) as console:
        await console.press("v")
        assert console.console.active == "ranks"
        assert "v: table" in console.text()
        await console.press("v")
        ranks = console.console.query_one(RanksView)
        assert ranks.num_rows == 320
        assert any(line.startswith("\u25b8  77") for line in console.lines())
        await console.press("right")
        assert ranks.selected_rank == 77
    async with desk(frozen_source()) as console:
        await console.show("ranks")
        await console.press("v")
        assert "RANKS  4   \u25a0 1 frozen   \u25cb 3 waiting" in console.text()


async def test_a_filter_and_an_order_hold_in_the_grid_too(source: SimSource) -> None:
    async with desk(source, (120, 35)) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        await console.press("slash", *"frozen", "enter")
        assert "RANKS  1 of 320   frozen    \u25a0 1 frozen" in console.text()
        await console.press("escape", "o")
        assert "by wait" in console.text()
        assert ranks.selected_rank == 77
        await console.press("end")
        assert ranks.selected_rank == 77  # who does not wait comes last


async def test_a_click_selects_a_cell(source: SimSource) -> None:
    async with desk(source, (80, 24)) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        for offset, rank in (((7, 1), 0), ((14, 1), 7), ((15, 1), 7), ((16, 2), 64 + 8), ((3, 1), 64 + 8)):
            await console.pilot.click("#ranks", offset=offset)
            await console.settle()
            assert ranks.selected_rank == rank


async def test_two_clicks_beside_the_cells_open_nothing(source: SimSource) -> None:
    async with desk(source, (80, 24)) as console:
        await console.show("ranks")
        for offset in ((3, 1), (15, 1)):  # the label of a line, and a gap
            await console.pilot.click("#ranks", offset=offset, times=2)
            await console.settle()
            assert console.console.active == "ranks"
        await console.pilot.click("#ranks", offset=(16, 2), times=2)
        await console.settle()
        assert "Ranks >  rank 72" in console.text()


async def test_a_line_of_the_grid_is_few_segments(source: SimSource) -> None:
    async with desk(source, (200, 50)) as console:
        await console.show("ranks")
        ranks = console.console.query_one(RanksView)
        rendered = screen_strips(console.console)[ranks.region.y + 1 :][: ranks.num_rows]

        assert max(len(list(strip)) for strip in rendered) < 12


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
@pytest.mark.parametrize("keys", [("2",), ("v",), ("2", "slash", *"rank=3", "enter"), ("v", "slash", *"demo", "enter")])
async def test_a_job_may_go_on_with_other_ranks(sizes: tuple[int, int], keys: tuple[str, ...]) -> None:
    views = []
    for size in sizes:
        sim = SimCluster(ranks_per_node=size)
        sim.run(1)
        views.append(sim.view())
    async with desk(SimSource(lambda: views[0])) as console:
        await console.press(*keys, "end")
        del views[0]
        await console.frames()
        ranks = console.console.query_one(RanksView)
        num_shown = 1 if "=" in keys else 2 * sizes[1]

        assert ranks.num_rows == (1 if ranks.is_grid else num_shown)
        assert ranks.selected_rank == (3 if "=" in keys else min(2 * sizes[0], 2 * sizes[1]) - 1)
        assert f"RANK {ranks.selected_rank}" in console.text()


def test_cells_are_found_where_they_are_painted() -> None:
    look = Look()
    states = np.full(1000, STATE_CODE[RankState.RUNNING], np.int8)
    states[::7] = STATE_CODE[RankState.WAITING]
    shown = np.arange(0, 1000, 3)
    for width in (30, 80, 133):
        grid = RankGrid(look, width, shown, states)
        for index in range(grid.num_lines):
            line = grid.line(index, 5)
            text = "".join(segment.text for segment in line.segments)
            assert line.width == len(text) <= width
            for x, character in enumerate(text):
                place = grid.place_at(index, x)
                if place is not None:
                    state = RankState.WAITING if shown[place] % 7 == 0 else RankState.RUNNING
                    assert character == look.glyphs.states[state]
            found = [grid.place_at(index, x) for x in range(width + 20)]
            places = [place for place in found if place is not None]
            assert places == list(range(index * grid.per_line, min(len(shown), (index + 1) * grid.per_line)))
        assert grid.per_line % GROUP == 0


def test_counts_that_do_not_fit_are_left_out_the_commonest_first() -> None:
    states = np.array([STATE_CODE[RankState.RUNNING]] * 9 + [STATE_CODE[RankState.FROZEN]], np.int8)
    grid = RankGrid(Look(is_ascii=True), 80, np.arange(10), states)

    assert "".join(s.text for s in grid.put_counts(Line(Look(is_ascii=True)), 80).segments).split() == [
        *("#", "1", "frozen"), *("+", "9", "running"),
    ]  # fmt: skip
    assert "".join(s.text for s in grid.put_counts(Line(Look(is_ascii=True)), 20).segments).split() == [
        "#",
        "1",
        "frozen",
    ]
