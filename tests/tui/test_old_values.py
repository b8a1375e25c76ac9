"""What is no longer the present is never shown as if it were: it is faint, and its age is said."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.tui.theme import Look
from tests.support.consoles import Desk, TalkingSource, desk, training_source
from tests.support.sim import SimCluster, played_once

if TYPE_CHECKING:
    from rich.style import Style

TRAINING_S = 12.0
LOST_S = 9.0
LOOK = Look()


@played_once
def lost_source() -> TalkingSource:
    """Return a training of three nodes, of which demo-1 with its ranks 2 and 3 is not heard of any more."""
    source = TalkingSource(SimCluster(num_nodes=3))
    source.run(TRAINING_S)
    source.sim.lose_node(1)
    source.run(LOST_S)
    return source


def styles_in(console: Desk, row: str, words: str) -> set[Style]:
    """Return the styles of some words in the first line of the view that matches `row`."""
    for number, text in enumerate(console.lines()):
        if re.search(row, text):
            found = re.search(words, text)
            assert found, text
            cells = [cell for segment in console.rendered()[number] for cell in [segment.style] * segment.cell_length]
            return {cell for cell in cells[slice(*found.span())] if cell is not None}
    raise AssertionError(f"no line has {row}:\n{console.text()}")


@pytest.mark.parametrize(("node", "is_faint"), [("demo-0", False), ("demo-1", True), ("demo-2", False)])
async def test_the_figures_of_a_lost_node_are_faint_and_its_name_state_and_age_are_not(
    node: str, is_faint: bool
) -> None:
    async with desk(lost_source()) as console:
        row = rf"{node}\s+\S (up|lost)"
        for figures in (r"\d+ %", r"\d\.\d GiB / \d+ GiB"):
            assert (styles_in(console, row, figures) == {LOOK.palette.faint}) is is_faint
        for lasting in (node, r"\S (up|lost)", r"\d\.\ds"):
            assert LOOK.palette.faint not in styles_in(console, row, lasting)


async def test_the_step_of_a_lost_rank_is_faint_and_where_it_was_seen_last_is_not() -> None:
    async with desk(lost_source()) as console:
        await console.show("ranks")

        assert styles_in(console, r"3  demo-1  \S lost", r"(?<=lost)\s+\d+\+ ") >= {LOOK.palette.faint}
        assert styles_in(console, r"3  demo-1  \S lost", r"bytegpt\.py:\d+") == {LOOK.palette.ink}
        assert LOOK.palette.faint not in styles_in(console, r"0  demo-0  \S waiting", r"(?<=waiting)\s+\d+")


async def test_memory_says_whose_figures_are_old_and_how_old() -> None:
    async with desk(lost_source()) as console:
        await console.show("memory")

        assert re.search(r" PSS in 6 ranks; .* ranks 2-3 as of 9\.\d s ago", console.text())
        assert styles_in(console, r"2  demo-1\s+\d+M", r"\d+M") == {LOOK.palette.faint}
        assert LOOK.palette.faint not in styles_in(console, r"0  demo-0\s+\d+M", r"\d+M")
        assert re.search(r"demo-1\s+2-3 .* 9\.\ds$", console.text(), re.MULTILINE)


async def test_the_age_of_the_oldest_report_turns_to_a_warning() -> None:
    source = training_source(TRAINING_S)
    fresh, old = LOOK.palette.bar_muted, LOOK.palette.warning + LOOK.palette.raised
    async with desk(source) as console:
        assert styles_in(console, "reports", r"reports 0\.\ds old") == {fresh}
        source.sim.lose_node(1)
        await console.play(source, 3)
        assert styles_in(console, "reports", r"reports [23]\.\ds old") == {old}


async def test_a_node_that_is_back_is_no_longer_faint() -> None:
    source = lost_source()
    async with desk(source) as console:
        source.sim.return_node(1)
        await console.play(source, 2)

        assert LOOK.palette.faint not in styles_in(console, r"demo-1\s+\S up", r"\d+ %")
