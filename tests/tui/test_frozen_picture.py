"""A frozen picture stands still in every view, and nothing that comes meanwhile is lost."""

from __future__ import annotations

from app.tui.actions import VIEW_NAMES
from tests.support.consoles import Desk, SimSource, TalkingSource, desk, frozen_source
from tests.support.sim import SimCluster


async def looks(console: Desk) -> dict[str, list[str]]:
    """Return what every view shows, but for the age of the picture and what the footer tells."""
    seen = {}
    for name in VIEW_NAMES:
        await console.show(name)
        seen[name] = console.lines()[1:-1]
    return seen


def num_losses(console: Desk) -> int:
    """Return how many losses the curve of the overview has."""
    shown = console.console.ui.history.shown
    return 0 if shown is None else len(shown.loss.points)


async def test_every_view_stands_still_while_the_training_goes_on() -> None:
    source = TalkingSource(SimCluster())
    async with desk(source) as console:
        await console.play(source, 5)
        await console.press("f")
        before = await looks(console)
        num_points = num_losses(console)

        await console.play(source, 4)
        source.sim.freeze(2)
        await console.play(source, 4)

        assert await looks(console) == before
        assert "FROZEN PICTURE 8.0s" in console.lines()[0]
        assert num_losses(console) == num_points

        await console.press("f")
        await console.frames()
        assert "rank 2 on demo-1 is frozen" in console.text()
        assert "FROZEN PICTURE" not in console.text()
        assert num_losses(console) > num_points


async def test_lines_and_events_that_come_meanwhile_are_there_afterwards() -> None:
    source = frozen_source()
    async with desk(source) as console:
        await console.show("logs")
        await console.press("f")
        source.print("demo-0", 0, "meanwhile")
        await console.frames()
        assert "meanwhile" not in console.text()

        await console.press("f")
        assert "meanwhile" in console.text()


async def test_a_frozen_picture_can_be_walked_through() -> None:
    source = frozen_source()
    async with desk(source, (80, 24)) as console:
        await console.press("f")
        source.sim.thaw(2)
        await console.play(source, 5)
        assert "FROZEN 5.0s" in console.lines()[0]
        await console.show("ranks")
        await console.press("p")
        assert "RANKS  1 of 4" in console.text()
        assert "frozen" in console.text()

        await console.press("f")
        await console.frames()
        assert "RANKS  0 of 4" in console.text()


async def test_before_the_first_rows_there_is_nothing_to_freeze() -> None:
    source = SimSource(SimCluster().view)
    async with desk(source) as console:
        console.console.ui.view = None
        await console.press("f")

        assert console.console.ui.frozen_s is None
