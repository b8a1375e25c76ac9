"""The Stragglers view: who costs the others time, and what it does meanwhile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from agent.wire.signals import Signal
from app.cli import listing
from app.diagnosis.causes import Severity
from app.tui.theme import Look
from app.tui.views.stragglers import StragglersView, _paint_phase
from app.tui.widgets.drawing import Line
from app.view.pace import JobPace, PaceRow
from app.view.plain_tables import straggler_lines
from ddpcore.wire import Phase
from tests.corpus.generator.causes import COMPUTING, PROGRAM, CauseCluster, drag
from tests.support.consoles import SimSource, TalkingSource, desk, frozen_source, starting_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster, played_once
from tests.support.sim_gpus import give_gpus
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Work
from tests.support.sim_signals import give_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from app.view.view import View

SIZES = ((80, 24), (120, 35))


@played_once
def slowed_source() -> TalkingSource:
    """A training of 8 ranks of which rank 6 has been slow for a while."""
    source = TalkingSource(SimCluster(num_nodes=2, ranks_per_node=4))
    source.run(25)
    source.sim.slow(6, 3.0)
    source.run(20)
    return source


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_slow_rank_looks_as_before(size: tuple[int, int]) -> None:
    async with desk(slowed_source(), size) as console:
        await console.show("stragglers")
        assert_looks_as_before(f"slow-stragglers-{size[0]}x{size[1]}", console.lines())


async def test_the_line_of_now_and_the_usual_one_of_a_slow_rank_have_names_of_their_own() -> None:
    async with desk(slowed_source(), (80, 24)) as console:
        usual = re.search(r"mostly at or below (bytegpt\.py:\d+)", " ".join(" ".join(console.lines()[1:5]).split()))
        assert usual is not None
        await console.show("ranks")
        assert re.search(rf"^ mostly at +{usual[1]}", console.text(), re.MULTILINE)
        assert re.search(r"^ now at +bytegpt\.py:\d+ in \w+", console.text(), re.MULTILINE)
        await console.press("up")
        assert " now at " in console.text()
        assert "\n mostly at" not in console.text(), "no verdict is about this rank"


@pytest.mark.parametrize(("width", "text"), [(6, "\u25b4100 %"), (10, "   \u25b4 100 %")])
def test_a_whole_share_is_never_cut(width: int, text: str) -> None:
    row = PaceRow(0, "h1", Severity.OK, None, None, None, {"data": 1.0}, ["data"], "")
    line = Line(Look())
    _paint_phase(line, row, width, phase="data")
    assert "".join(segment.text for segment in line.segments) == text


@played_once
def hot_source() -> TalkingSource:
    """A training of 8 ranks of which rank 5 has been slow for a while, since its GPU is hot."""
    sim = CauseCluster(num_nodes=2, ranks_per_node=4, program=PROGRAM, seed=3)
    give_gpus(sim)
    signals = give_signals(sim)
    source = TalkingSource(sim)
    source.run(25)
    drag(sim, [5], COMPUTING, 0.36)
    for signal, value in ((Signal.GPU_THERMAL, 0.7), (Signal.GPU_CLOCK, 1.3e9), (Signal.GPU_TEMPERATURE, 88.0)):
        signals.shift(signal, value, rank=5)
    source.run(30)
    return source


@pytest.mark.parametrize("size", [*SIZES, (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_signals_of_a_slow_rank_look_as_before(size: tuple[int, int]) -> None:
    async with desk(hot_source(), size) as console:
        await console.show("stragglers")
        assert_looks_as_before(f"hot-stragglers-{size[0]}x{size[1]}", console.lines())


async def test_what_stands_out_comes_first_and_is_marked_without_colour_too() -> None:
    async with desk(hot_source(), (80, 24), Look(has_colour=False, is_ascii=True)) as console:
        await console.show("stragglers")
        text = console.text()
        assert text.isascii()
        lines = text.splitlines()
        first = next(place for place, line in enumerate(lines) if line.startswith(" SIGNALS OF RANK 5 "))
        assert lines[first].split()[4:] == ["ITS", "PEERS", "SINCE"]
        assert re.match(r" ! GPU slowed by heat +\d\d % +\d.* +\d+s$", lines[first + 1])
        assert re.match(r" ! GPU clock +1,\d{3} MHz +1,\d{3} MHz", lines[first + 2])
        assert "! differs enough from its peers" in text, "as a verdict says that nothing does"

        await console.press("down")
        text = console.text()
    selected = re.search(r"\n> +(\d) ", text)
    assert selected is not None
    assert f"SIGNALS OF RANK {selected[1]} " in text
    assert "! GPU" not in text, "it does not stand out"


def test_rows_have_signals_where_these_are_asked_for() -> None:
    pace = hot_source().view().pace
    assert pace is not None
    (row,) = pace.rows([0])
    assert (row.rank, row.signals) == (5, []), "not for each frame"

    signals = pace.signals(5)
    assert [(one.signal, one.unit, one.is_worse) for one in signals[:3]] == [
        ("gpu_thermal", "fraction", True),
        ("gpu_clock", "hz", True),
        ("gpu_temperature", "celsius", True),
    ]
    assert not any(one.is_worse for one in signals[3:])
    assert 1e9 < signals[1].value < 1.4e9 < (signals[1].peers or 0.0) < 2e9
    assert [one for one in pace.signals(0) if one.is_worse] == []
    rows = listing._pace(hot_source().view(), None)
    assert [row.rank for row in rows if row.signals] == [row.rank for row in rows], "of --json all"
    head, first, *_ = straggler_lines(rows, {})
    assert "STANDS OUT" in head
    assert re.search(r"GPU slowed by heat \d\d % \(.* %\), GPU clock 1,\d{3} MHz \(1,\d{3} MHz\)", first)


async def test_the_costliest_rank_is_the_first_row_with_what_it_does_more() -> None:
    async with desk(slowed_source(), (120, 35)) as console:
        await console.show("stragglers")
        text = console.text()

    assert re.search(r"rank 6 costs the others \d\d % of the step time; a typical rank waits \d\d %", text)
    headings = re.search(r"RANK  NODE +COST +WAITS +LAST +DATA +FORWARD +BACKWARD +OPTIMIZER +WHERE\n(.*)\n", text)
    assert headings is not None
    assert re.match(
        r"\u25b8 +6  demo-1 .* \d\d % +\d+ % +\d+ % +\d+ % .*\u25b4 \d\d % .*bytegpt\.py:\d+ in \w+", headings[1]
    )
    assert re.search(r"shares of the last 1\d s of undisturbed training", text)


async def test_the_selection_stays_with_the_rank_that_was_chosen() -> None:
    source = slowed_source()
    async with desk(source, (120, 35)) as console:
        await console.show("stragglers")
        view = console.console.query_one(StragglersView)
        assert view.selected_rank == 6
        await console.press("down", "down", "down")
        chosen = view.selected_rank
        assert chosen is not None
        source.sim.slow(chosen, 8.0)
        source.run(20)
        await console.frames()

        assert (view.selected, view.selected_rank) == (0, chosen), "it is the costliest now"
        assert f"SIGNALS OF RANK {chosen}" in console.text() or f"\u25b8   {chosen}  " in console.text()
        await console.press("down")
        assert view.selected_rank == 6


async def test_without_rows_no_rank_is_selected() -> None:
    views = [slowed_source().view(), starting_source().view()]
    async with desk(SimSource(lambda: views[0]), (80, 24)) as console:
        await console.show("stragglers")
        del views[0]
        await console.frames()
        await console.press("down", "enter")

        assert "Nothing here is about one rank." in console.text()


async def test_a_healthy_training_says_that_nobody_holds_the_others_up() -> None:
    sim = SimCluster()
    sim.run_to_step(400)
    async with desk(SimSource(sim.view), (80, 24)) as console:
        await console.show("stragglers")
        text = console.text()

    assert re.search(r"nobody holds the others up: a typical rank waits \d+ % of the time", text)
    assert "\u25b4 more than the others" in text
    assert "LAST how often it comes last of the ranks on its node" in text, "also at 80 columns"
    assert re.search(r"RANK  NODE +COST +WAITS +LAST +DATA +FWD +BWD +OPTIM", text)


async def test_the_time_of_a_hang_is_no_undisturbed_training() -> None:
    def program(rank: int) -> Iterator[Action]:
        for step in range(1, 1000):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 20, "forward", 0.2)
            if step == 100 and rank == 1:
                yield Work(Phase.OTHER, 50, "download", 30.0, True)
            yield Call("all_reduce", 142, "train_step", sizes=((1000,),), phase=Phase.BACKWARD)
            yield EndStep(step, 1.0, 0)

    sim = SimCluster(program=program)
    async with desk(SimSource(sim.view), (120, 35)) as console:
        await console.show("stragglers")
        sim.run(40)
        await console.frames()
        assert re.search(r"shares of the last 2\d s, a wait of 1\d s included", console.text())
        assert re.search(r"rank 1 holds the others up for 1\d s now", console.text())
        assert "costs the others" not in console.text()

        sim.run(60)
        await console.frames()
        assert re.search(r"shares of the last 1\d s of undisturbed training", console.text())


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_a_rank_that_has_ended_and_has_no_row_is_named(size: tuple[int, int]) -> None:
    """As in a console that was opened after its end, which has seen nothing of its training."""
    sim = SimCluster(timeout_s=600.0)
    sim.hangs_on_death = True
    sim.run(20)
    sim.kill(3)
    sim.run(2)

    def unseen() -> View:
        view = sim.view()
        found = view._found
        assert found is not None
        seen = found.pace()
        is_ended = np.arange(4) >= 2
        cost_frac, wait_frac = (np.where(is_ended, np.nan, known) for known in (seen.cost_frac, seen.wait_frac))
        pace = msgspec.structs.replace(seen, cost_frac=cost_frac, wait_frac=wait_frac)
        view._found = msgspec.structs.replace(found, pace=lambda: pace)
        return view

    assert [row.state for row in sim.view().ranks() if row.is_over] == ["exited", "exited"]
    async with desk(SimSource(unseen), size) as console:
        await console.show("stragglers")
        assert "ranks 2-3 have ended; before this, nobody held the others up" in console.text()


@pytest.mark.parametrize("size", [(80, 24), (120, 35)])
async def test_a_rank_that_holds_the_others_up_is_named_before_any_share_is_known(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        await console.show("stragglers")
        assert re.search(
            r"\N{HEAVY MULTIPLICATION X} rank 2 holds the others up for 6\.\d s now; not enough", console.text()
        )


async def test_before_training_it_says_that_it_has_seen_too_little() -> None:
    async with desk(starting_source(), (80, 24)) as console:
        await console.show("stragglers")

        assert "not enough undisturbed training has been seen yet" in console.text()


async def test_without_colour_and_in_ascii_marks_stay() -> None:
    async with desk(slowed_source(), (80, 24), Look(has_colour=False, is_ascii=True)) as console:
        await console.show("stragglers")
        text = console.text()

    assert text.isascii()
    assert re.search(r"\+ \d\d %", text)


async def test_many_ranks_are_scrolled_through_and_only_the_rows_on_the_screen_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    rows = JobPace.rows

    def counted(self: JobPace, wanted: Sequence[int]) -> list[PaceRow]:
        made.append(len(wanted))
        return rows(self, wanted)

    monkeypatch.setattr(JobPace, "rows", counted)
    sim = SimCluster(num_nodes=8, ranks_per_node=16)
    sim.run_to_step(150)
    async with desk(SimSource(sim.view), (80, 24)) as console:
        await console.show("stragglers")
        await console.press("end")
        last = console.lines()[-4]
        await console.press("home")
        first = console.lines()[7]

    assert 0 < max(made) <= 24
    assert last != first
    assert re.match(r"\u25b8 +\d+  demo-\d", last)
    assert re.match(r" +\d+  demo-\d", first)
