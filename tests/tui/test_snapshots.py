"""The views as they look, kept as plain text: a change of the picture is a change of a file that one can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.tui.actions import VIEW_NAMES
from ddpcore.wire import Phase
from tests.support import screens
from tests.support.consoles import SimSource, TalkingSource, desk, frozen_source, starting_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster, played_once
from tests.support.sim_memory import GIB, leak
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Linger, Peer, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SIZES = ((60, 20), (80, 24), (120, 35), (200, 50))
TRAINING_S = 20.0
HARMS: dict[str, Callable[[SimCluster], None]] = {
    "well": lambda _: None,
    "lost": lambda sim: sim.lose_node(2),
    "oom": lambda sim: sim.kill_for_memory(5),
}
HARMED_S = 10.0
NUM_STEPS = 30


def until_then(last: Callable[[int], Action]) -> SimCluster:
    """Return a cluster whose ranks make some steps and then one thing."""

    def program(rank: int) -> Iterator[Action]:
        for step in range(1, NUM_STEPS + 1):
            yield BeginStep(step)
            yield Call("all_reduce", 142, "train_step", sizes=((1000,),), phase=Phase.BACKWARD)
            yield EndStep(step, 1.0, 0)
        yield last(rank)

    return SimCluster(program=program)


@played_once
def timed_out() -> SimCluster:
    """Return a cluster of which a rank froze, and whose other ranks died of the process group's time-out."""
    sim = SimCluster(timeout_s=8.0)
    sim.freeze(2, at_step=5)
    return sim


@played_once
def leaking() -> SimCluster:
    """Return a cluster of which a rank leaks."""
    sim = SimCluster()
    sim.run_to_step(3)
    leak(sim, 1, 3 * GIB, 4 * GIB)
    return sim


TROUBLES: dict[str, tuple[Callable[[], SimCluster], str, float]] = {
    "stands": (
        lambda: until_then(lambda rank: Work(Phase.OTHER, 50 if rank == 2 else 30, "shard", 99.0, True)),
        "overview",
        20,
    ),
    "lingers": (lambda: until_then(lambda rank: Linger("uploader", 33, 99.0 if rank == 1 else 0.0)), "overview", 20),
    "circle": (lambda: until_then(lambda rank: Peer("recv", (rank + 1) % 4, 30, "exchange")), "overview", 12),
    "timed-out": (timed_out, "logs", 20),
    "leaks": (leaking, "memory", 40),
}
"""What has gone wrong, the view that shows it, and the seconds until it is seen."""


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_views_of_a_frozen_rank_look_as_before(size: tuple[int, int]) -> None:
    async with desk(frozen_source(), size) as console:
        for number, name in enumerate(VIEW_NAMES, start=1):
            await console.press(str(number))
            await console.settle()
            assert_looks_as_before(f"frozen-{name}-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_the_overview_of_a_start_looks_as_before(size: tuple[int, int]) -> None:
    async with desk(starting_source(), size) as console:
        assert_looks_as_before(f"starting-overview-{size[0]}x{size[1]}", console.lines())


@pytest.mark.parametrize("harm", HARMS)
async def test_the_views_of_a_training_that_is_well_or_not_look_as_before(harm: str) -> None:
    source = TalkingSource(SimCluster(num_nodes=4, ranks_per_node=4))
    async with desk(source) as console:
        await console.play(source, TRAINING_S)
        HARMS[harm](source.sim)
        await console.play(source, HARMED_S)
        for name in VIEW_NAMES:
            await console.show(name)
            assert_looks_as_before(f"{harm}-{name}-120x35", console.lines())


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_long_verdict_on_a_small_screen_looks_as_before(trouble: str) -> None:
    make, name, seconds = TROUBLES[trouble]
    source = TalkingSource(make())
    source.run(seconds)
    async with desk(source, (80, 24)) as console:
        await console.show(name)
        assert_looks_as_before(f"{trouble}-{name}-80x24", console.lines())


async def test_a_long_verdict_takes_the_empty_lines_of_a_view() -> None:
    sim = TROUBLES["circle"][0]()
    sim.run(12)
    source = SimSource(sim.view)
    verdict = sim.view().headline().text
    async with desk(source, (80, 24)) as console:
        await console.frames(4)
        assert verdict in " ".join(console.text().split())
        assert "nothing printed yet" in console.text()
        before = console.lines()
        await console.frames(4)
        assert console.lines() == before

        await console.show("ranks")
        await console.frames(4)
        assert verdict in " ".join(console.text().split()), "the rows leave lines empty there too"
        in_ranks = console.lines()
        await console.frames(4)
        assert console.lines() == in_ranks
        await console.show("charts")
        await console.frames(4)
        assert verdict not in " ".join(console.text().split()), "charts fill the window"
        await console.show("overview")
        await console.frames(4)
        assert console.lines() == before


def test_an_update_writes_the_file_and_fails_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screens, "SNAPSHOTS", tmp_path)
    monkeypatch.setenv("RANKDECK_UPDATE_SNAPSHOTS", "1")
    monkeypatch.delenv("CI", raising=False)

    assert_looks_as_before("some", ["a", "b"])
    with pytest.raises(pytest.fail.Exception, match="written anew"):
        screens.fail_if_written()
    assert_looks_as_before("some", ["a", "b"])
    assert (tmp_path / "some.txt").read_text() == "a\nb\n"


@pytest.mark.parametrize("is_update_asked", [True, False])
def test_a_changed_picture_fails_and_ci_writes_nothing(
    is_update_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screens, "SNAPSHOTS", tmp_path)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("RANKDECK_UPDATE_SNAPSHOTS", "1" if is_update_asked else "")

    with pytest.raises(pytest.fail.Exception, match="is not as in"):
        assert_looks_as_before("some", ["a"])
    assert list(tmp_path.iterdir()) == []
