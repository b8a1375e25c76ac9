"""The pictures that README shows are of real runs, and are those of the console as it is now."""

from __future__ import annotations

import asyncio
import html
import re
from typing import TYPE_CHECKING

import pytest

from tests.support.consoles import SimSource, desk
from tests.support.sim import SimCluster
from tests.tui import shots

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("charts", "overview", "stragglers")


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


@pytest.mark.slow
def test_the_pictures_of_readme_are_taken_from_real_runs(tmp_path: Path) -> None:
    asyncio.run(shots.take_for_readme(tmp_path))

    assert sorted(path.stem for path in tmp_path.iterdir()) == list(NAMES)
    for directory in (tmp_path, shots.PICTURES):
        assert "rank 2 on demo-1 is frozen" in text_of(directory / "overview.svg")
        assert "rank 2 on demo-1 is frozen" in text_of(directory / "charts.svg")
        assert "rank 6 on demo-1 is slow" in text_of(directory / "stragglers.svg")
