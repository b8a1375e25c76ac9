"""The pictures that README shows are of real runs, and are those of the console as it is now.

So are the text pictures of `rankdeck help causes`: the console on simulated runs, in a terminal without colour.
"""

from __future__ import annotations

import asyncio
import html
import re
from typing import TYPE_CHECKING

import pytest

from app.manual import markdown
from app.tui.theme import Look
from tests.corpus.generator.causes import CAUSES, PROGRAM, CauseCluster, drag
from tests.support.consoles import SimSource, TalkingSource, desk
from tests.support.long_tests import one_in
from tests.support.sim import SimCluster
from tests.support.sim_gpus import give_gpus
from tests.support.sim_signals import give_signals
from tests.tui import shots

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("charts", "overview", "stragglers")
NUM_SIGNALS = 3
"""Signals of the panel that a text picture shows."""


def text_of(picture: Path) -> str:
    """Return the texts of a picture, in its order."""
    return html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)<", picture.read_text()))).replace("\xa0", " ")


@pytest.mark.parametrize("name", NAMES)
async def test_a_picture_has_the_tabs_headings_and_keys_of_the_console(name: str) -> None:
    async with desk(SimSource(SimCluster().view)) as console:
        await console.show(name)
        tabs, *rest = console.lines()
        headings = [line for line in rest if line.isupper()]
        shown = [*tabs.split()[1:-1], *" ".join([*headings, rest[-1]]).split()]

    assert [word for word in shown if word not in text_of(shots.PICTURES / f"{name}.svg")] == []


def source_of(cause: str, rank: int, cost: float) -> TalkingSource:
    """Return a training of 4 ranks of which one has been slow for a while, of a cause."""
    sim = CauseCluster(2, 2, program=PROGRAM, seed=1)
    give_gpus(sim)
    signals = give_signals(sim)
    signals.cost_frac = cost
    source = TalkingSource(sim)
    source.run(20)
    drag(sim, [rank], CAUSES[cause].phases, cost)
    for amount in CAUSES[cause].shifts:
        signals.shift_of(amount.signal, amount.at(cost), [rank], [], sim.now_s)
    source.run(25)
    return source


@pytest.mark.parametrize(
    "case", one_in(3, [("gpu_thermal", 3, 0.3), ("cpu_throttled", 2, 0.3), ("blocked", 1, 0.35)], lambda case: case[0])
)
async def test_a_text_picture_of_a_cause_is_what_the_console_shows(case: tuple[str, int, float]) -> None:
    cause, rank, _ = case
    source = source_of(*case)
    async with desk(source, (78, 50), Look(has_colour=False, is_ascii=True)) as console:
        await console.show("stragglers")
        await console.frames()  # the headline takes the lines that the view has left
        lines = console.lines()
    job = next(at for at, line in enumerate(lines) if line.startswith(" demo "))
    panel = next(at for at, line in enumerate(lines) if line.startswith(f" SIGNALS OF RANK {rank} "))
    shown = [*lines[1:job], *lines[panel : panel + 1 + NUM_SIGNALS]]

    picture = markdown("causes").partition(f"<!-- picture of {cause} -->\n```\n")[2].partition("\n```")[0]
    assert picture == "\n".join(shown)


@pytest.mark.slow
def test_the_pictures_of_readme_are_taken_from_real_runs(tmp_path: Path) -> None:
    asyncio.run(shots.take_for_readme(tmp_path))

    assert sorted(path.stem for path in tmp_path.iterdir()) == list(NAMES)
    for directory in (tmp_path, shots.PICTURES):
        assert "rank 2 on demo-1 is frozen" in text_of(directory / "overview.svg")
        assert "rank 2 on demo-1 is frozen" in text_of(directory / "charts.svg")
        assert "rank 6 on demo-1 is slow" in text_of(directory / "stragglers.svg")
