"""Barriers shows the last waits, and of each rank how long it waited in them or that it was waited for."""

from __future__ import annotations

import re

import pytest

from app.tui.theme import Look
from tests.support.consoles import Desk, TalkingSource, desk
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

SIZES = ((60, 20), (80, 24), (120, 35), (200, 50))
TRAINING_S = 12.0


async def held_up(console: Desk, source: TalkingSource) -> None:
    """Let rank 5 hold the others up twice, and rank 2 once."""
    await console.play(source, TRAINING_S)
    for rank, seconds in ((5, 2.0), (2, 1.5), (5, 3.0)):
        source.sim.freeze(rank)
        await console.play(source, seconds)
        source.sim.thaw(rank)
        await console.play(source, 3)
    await console.show("barriers")


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_last_waits_look_as_before(size: tuple[int, int]) -> None:
    source = TalkingSource(SimCluster(num_nodes=2, ranks_per_node=4))
    async with desk(source, size) as console:
        await held_up(console, source)
        assert_looks_as_before(f"last-waits-{size[0]}x{size[1]}", console.lines())


async def test_who_is_waited_for_again_and_again_stands_out() -> None:
    source = TalkingSource(SimCluster(num_nodes=2, ranks_per_node=4))
    async with desk(source) as console:
        await held_up(console, source)
        text = console.text()

        assert len(re.findall(r"ago \S +\d\.\ds .* all_reduce #\d+: ranks [\d, -]+ → missing rank [25]", text)) == 3
        rendered = dict(re.findall(r"^ +(\d)  demo-\d  \S running +(\S{3}) ", text, re.MULTILINE))
        assert [rank for rank, strip in rendered.items() if strip.count("◆") == 2] == ["5"]
        assert [rank for rank, strip in rendered.items() if strip.count("◆") == 1] == ["2"]
        assert set("".join(rendered[rank] for rank in "013467")) <= set("▁▂▃▄▅▆▇")


async def test_the_waits_of_an_earlier_attempt_are_marked_and_not_in_the_rows_of_the_ranks() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    source = TalkingSource(sim)
    async with desk(source) as console:
        await held_up(console, source)
        sim.next_attempt()
        await console.play(source, TRAINING_S)
        text = console.text()

        assert len(re.findall(r"ago, before restart 1 \S +\d\.\ds .* → missing rank [25]", text)) == 3
        assert "◆" not in re.sub(r".* ago.*", "", text)


async def test_without_unicode_waits_are_figures() -> None:
    source = TalkingSource(SimCluster(num_nodes=2, ranks_per_node=4))
    async with desk(source, look=Look(is_ascii=True)) as console:
        await held_up(console, source)

        assert console.text().isascii()
        assert re.search(r"^ +5  demo-1  \S running +\?\d\? ", console.text(), re.MULTILINE)


async def test_a_frozen_picture_keeps_the_waits_it_shows() -> None:
    source = TalkingSource(SimCluster(num_nodes=2, ranks_per_node=4))
    async with desk(source) as console:
        await held_up(console, source)
        await console.press("f")
        source.sim.freeze(0)
        await console.play(source, 2)
        source.sim.thaw(0)
        await console.play(source, 2)
        assert "missing rank 0" not in console.text()

        await console.press("f")
        await console.play(source, 1)
        assert "missing rank 0" in console.text()
