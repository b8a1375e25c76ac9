"""The Charts view: how the figures went, and when something happened."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import pytest

from agent.node_state.observations import RankPrinted
from app.recording.replay import Replay
from app.tui.theme import Look
from app.tui.views.charts import ChartsView
from app.tui.widgets.chart_panel import _title, kind_of
from app.view.rows import Figure, FigureKey
from ddpcore.wire import Phase
from tests.support.consoles import SimSource, TalkingSource, desk, training_source
from tests.support.hostile_text import PAYLOADS, assert_is_harmless
from tests.support.recordings import Watch, frozen_recording
from tests.support.screens import assert_looks_as_before, screen_strips
from tests.support.sim import SimCluster
from tests.support.sim_gpus import give_gpus
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.consoles import Desk

SIZES = ((80, 24), pytest.param((120, 35), marks=pytest.mark.slow))
SIZE_NAMES = ("80x24", "120x35")


def view_of(console: Desk) -> ChartsView:
    return console.console.query_one(ChartsView)


def titles(console: Desk) -> list[str]:
    """Return the titles of the charts on the screen."""
    known = r"LOSS|STEPS/S|WAIT SHARE|GPU USE|GPU MEMORY|CPU CORES A RANK|MEMORY A RANK|CPU OF THE HOSTS|lr|acc"
    return re.findall(rf"(?:^|  ) ?({known})  ", "\n".join(console.lines()[3:]), re.MULTILINE)


def heading(console: Desk) -> str:
    """Return the line of the spans and the legend."""
    (line,) = [line for line in console.lines() if line.startswith(" CHARTS")]
    return line


def losing(loss_of: Callable[[int, int], float]) -> Callable[[int], Iterator[Action]]:
    """Return a training whose ranks report these losses, by rank and step."""

    def program(rank: int) -> Iterator[Action]:
        for step in range(1, 10_000):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 10, "forward", 0.1)
            yield Call("all_reduce", 11, "step", sizes=((3,),), phase=Phase.BACKWARD)
            yield EndStep(step, loss_of(rank, step), 0)

    return program


def let_print(sim: SimCluster, **metrics: float) -> None:
    """Let the patterns of the job find these figures in the lines of rank 0 and 1."""
    for rank in (0, 1):
        sim.nodes[0]._core.apply(
            RankPrinted("demo", rank, {name: value + rank for name, value in metrics.items()}), sim.now_s
        )


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_a_training_looks_as_before(size: tuple[int, int]) -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, size) as console:
        await console.show("charts")
        await console.play(source, 40)
        assert_looks_as_before(f"healthy-charts-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_a_stall_and_its_end_look_as_before(size: tuple[int, int]) -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, size) as console:
        await console.show("charts")
        await console.play(source, 25)
        source.sim.freeze(2)
        await console.play(source, 14)
        assert_looks_as_before(f"stalled-charts-{size[0]}x{size[1]}", console.lines())
        source.sim.thaw(2)
        await console.play(source, 10)
        assert_looks_as_before(f"thawed-charts-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("size", SIZES, ids=SIZE_NAMES)
async def test_gpus_look_as_before(size: tuple[int, int]) -> None:
    sim = SimCluster()
    gpus = give_gpus(sim)
    source = TalkingSource(sim)
    async with desk(source, size) as console:
        await console.show("charts")
        await console.play(source, 15)
        gpus[1].change(1, busy_frac=0.13)
        await console.play(source, 10)
        if size[1] < 30:
            await console.press("down", "down")
        assert_looks_as_before(f"gpus-charts-{size[0]}x{size[1]}", console.lines())
        assert "lowest 13 % GPU 1 of demo-1" in console.text()


async def test_without_colour_and_utf_8_the_curves_are_told_apart() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (80, 24), Look(has_colour=False, is_ascii=True)) as console:
        await console.show("charts")
        await console.play(source, 20)
        source.sim.freeze(2)
        await console.play(source, 5)
        await console.press("down", "down")
        assert console.text().isascii()
        assert "** mean  .. lowest, highest" in console.text()
        assert_looks_as_before("plain-charts-80x24", console.lines())


@pytest.mark.parametrize(("size", "num_shown"), [((80, 24), 2), ((120, 35), 6), ((200, 50), 6), ((60, 15), 1)], ids=str)
async def test_charts_fill_the_screen(size: tuple[int, int], num_shown: int) -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, size) as console:
        await console.show("charts")
        await console.play(source, 15)
        assert len(titles(console)) == num_shown
        assert "now" in console.lines()[-2] or "now" in console.lines()[-3]
        assert max(len(list(strip)) for strip in screen_strips(console.console)) <= 48


async def test_what_does_not_fit_is_scrolled_to_by_whole_charts() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (80, 24)) as console:
        await console.show("charts")
        await console.play(source, 15)
        assert titles(console) == ["LOSS", "STEPS/S"]
        await console.press("down")
        assert titles(console) == ["STEPS/S", "WAIT SHARE"]
        await console.press("pagedown")
        assert titles(console) == ["CPU CORES A RANK", "MEMORY A RANK"]
        await console.press("end", "down")
        assert titles(console) == ["MEMORY A RANK", "CPU OF THE HOSTS"]
        await console.press("up")
        view_of(console).scroll_rows(-3)
        await console.settle()
        assert titles(console) == ["WAIT SHARE", "CPU CORES A RANK"]

        await console.resize(80, 30)
        assert titles(console)[0] == "WAIT SHARE", "what was read stays"
        await console.resize(20, 5)
        await console.frames(4)
        await console.resize(120, 35)
        assert len(titles(console)) == 6
        await console.resize(80, 24)
        await console.press("home")
        assert titles(console) == ["LOSS", "STEPS/S"]


@pytest.mark.slow
async def test_keys_choose_the_span_which_follows_the_newest() -> None:
    source = training_source(400)
    async with desk(source, (120, 35)) as console:
        await console.show("charts")
        assert "[5 min]" in heading(console)
        assert "4 min ago" in console.lines()[-2]
        await console.press("plus", "plus")
        assert "[1 min]" in heading(console)
        assert "1 min ago" in console.lines()[-2]
        await console.press("minus", "minus", "minus", "minus")
        assert "[all]" in heading(console)
        assert "6 min ago" in console.lines()[-2]
        await console.press("equals_sign")
        assert "[30 min]" in heading(console)
        assert "6 min ago" in console.lines()[-2], "a young job fills the charts all the same"

        await console.press("1", "plus")
        assert console.console.active == "charts"
        assert "[30 min]" in heading(console), "the first press only goes there"


async def test_verdicts_and_attempts_stand_on_the_axis_and_in_the_charts() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (120, 35)) as console:
        await console.show("charts")
        await console.play(source, 15)
        assert "verdict" not in heading(console)
        source.sim.freeze(2)
        await console.play(source, 3)
        axis = console.lines()[-3]
        assert axis.count("✖") == 2
        assert "✖ verdict: see 8" in heading(console)
        assert console.lines()[-4][axis.index("✖")] == "┊"

        source.sim.thaw(2)
        source.sim.stop()
        await console.play(source, 5)
        assert console.lines()[-2].endswith("end")
        source.sim.next_attempt()
        await console.play(source, 12)
        assert console.lines()[-2].endswith("now")
        assert console.lines()[-3].count("↻") == 2
        assert "↻ restart" in heading(console)


async def test_what_is_not_known_is_a_gap() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (120, 35), Look(is_ascii=True)) as console:
        await console.show("charts")
        await console.play(source, 15)
        source.sim.lose_node(0)
        source.sim.lose_node(1)
        await console.play(source, 15)
        assert "LOSS  -  last 2.1" in console.text()
        begin = console.lines().index(heading(console)) + 2
        rows = [line[8:58] for line in console.lines()[begin : begin + 7]]
        assert all("*" not in row[-18:] for row in rows)
        assert any("*" in row for row in rows)


async def test_losses_that_are_no_numbers_are_told_and_not_drawn() -> None:
    odd = {0: math.nan, 1: 1.0, 2: math.inf, 3: -math.inf}
    sim = SimCluster(program=losing(lambda rank, step: odd[rank] if step > 50 else 2.0))
    source = SimSource(sim.view)
    sim.each_view = source.history.observe
    async with desk(source, (120, 35)) as console:
        await console.show("charts")
        sim.run(30)
        await console.frames()
        assert "LOSS  NaN" in console.text()
        scale = [line.split("│")[0].strip() for line in console.lines()[5:14]]
        assert (scale[0], scale[-1]) == ("2.00", "1.00"), "the scale is of what is drawn"


async def test_a_job_that_tells_nothing_says_so() -> None:
    def program(rank: int) -> Iterator[Action]:
        for _ in range(10_000):
            yield Work(Phase.OTHER, 10, "think", 1.0)

    sim = SimCluster(program=program)
    source = TalkingSource(sim)
    async with desk(source, (120, 35)) as console:
        await console.show("charts")
        assert "nothing to draw yet" in console.text()
        source.reading = "reading what happened before on demo-0"
        await console.press("down", "plus", "end", "pageup")
        assert "CHARTS   reading what happened before on demo-0" in console.text()
        source.reading = ""
        await console.play(source, 12)
        assert re.search(r"^ no loss yet +no rate known in this time", console.text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("mean", "low", "high", "shown"),
    [
        (0.3, 0.0, 0.9, "highest 0.9 rank 3"),
        (0.7, 0.0, 0.9, "lowest 0.0 rank 1"),
        (0.5, 0.0, 1.0, "highest 1.0 rank 3"),
    ],
)
def test_of_two_extremes_the_one_further_from_the_mean_is_shown_where_there_is_room_for_one(
    mean: float, low: float, high: float, shown: str
) -> None:
    figure, kind = Figure(FigureKey.CPU_CORES, mean, low, high, "rank 1", "rank 3"), kind_of(FigureKey.CPU_CORES)
    narrow, wide = (
        "".join(segment.text for segment in _title(Look(), kind, figure, [], width).segments) for width in (60, 61)
    )
    assert narrow.strip() == f"CPU CORES A RANK  {mean}  {shown}"
    assert wide.strip() == f"CPU CORES A RANK  {mean}  lowest {low} rank 1  highest {high} rank 3"


async def test_the_number_of_charts_further_down_stands_at_the_left_and_falls_on_the_way_there() -> None:
    async with desk(training_source(12), (80, 24)) as console:
        await console.show("charts")
        counts = []
        for _ in range(8):
            counts += re.findall(r"^(\d) more\W", console.text(), re.MULTILINE) or ["0"]
            await console.press("down")
        assert counts[0] == "4"
        assert sorted(counts, reverse=True) == counts
        assert counts[-1] == "0"


async def test_figures_that_patterns_find_have_charts_of_their_own() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (200, 50)) as console:
        await console.show("charts")
        for second in range(20):
            let_print(source.sim, lr=0.1 / (1 + second), acc=second / 20, loss=9.0, step=3.0)
            await console.play(source, 1)
        assert titles(console)[:4] == ["LOSS", "acc", "lr", "STEPS/S"]
        assert re.search(r" lr  0.5\d+  lowest 0.005\d* rank 0  highest 1.0\d rank 1", console.text())


@pytest.mark.parametrize("look", [Look(), Look(has_colour=False, is_ascii=True)], ids=["colours", "plain"])
async def test_hostile_names_and_values_of_metrics_are_text(look: Look) -> None:
    source = training_source(8)
    let_print(source.sim, **{f"{number}{payload}": 1e300 for number, payload in enumerate(PAYLOADS)}, x=-math.inf)
    source.run(5)
    async with desk(source, (80, 40), look) as console:
        await console.show("charts")
        seen = ""
        for _ in range(16):
            await console.press("down")
            assert_is_harmless(console)
            seen += console.text()
        assert "0[/b]" in seen
        assert "1[@click=app.quit]x[/]" in seen


async def test_a_recording_has_the_history_up_to_each_moment() -> None:
    replay = Replay(frozen_recording(), clock=Watch())
    async with desk(replay, (120, 35)) as console:
        await console.show("charts")
        replay.skip(60)
        await console.frames(60)
        axis = console.lines()[-3:-1]
        assert console.lines()[-3].count("✖") == 2
        assert "STEPS/S  0.0" in console.text()

        replay.skip(-13.5)
        await console.frames(60)
        before = console.lines()[1:-1]
        assert "✖" not in console.lines()[-3]
        replay.skip(60)
        await console.frames(60)
        assert console.lines()[-3:-1] == axis
        replay.skip(-13.5)
        await console.frames(60)
        assert console.lines()[1:-1] == before


async def test_charts_are_drawn_anew_only_when_there_is_something_new() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source, (120, 35)) as console:
        await console.show("charts")
        await console.play(source, 10)
        lines = view_of(console).lines
        await console.frames(6)
        assert view_of(console).lines is lines
        await console.play(source, 1.2)
        assert view_of(console).lines is not lines
