"""The views as they look, kept as plain text: a change of the picture is a change of a file that one can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.tui.actions import VIEW_NAMES
from tests.support import screens
from tests.support.consoles import TalkingSource, desk, frozen_source, starting_source
from tests.support.screens import assert_looks_as_before
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = ((60, 20), (80, 24), (120, 35), (200, 50))
TRAINING_S = 20.0
HARMS: dict[str, Callable[[SimCluster], None]] = {
    "well": lambda _: None,
    "lost": lambda sim: sim.lose_node(2),
    "oom": lambda sim: sim.kill_for_memory(5),
}
HARMED_S = 10.0


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
