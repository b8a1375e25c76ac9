"""The pictures that README shows are those that the console gives now."""

from __future__ import annotations

import filecmp
from typing import TYPE_CHECKING

from tests.tui import shots

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_the_pictures_of_readme_are_what_the_console_shows_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = shots.PICTURES
    monkeypatch.setattr(shots, "PICTURES", tmp_path)

    await shots.take_for_readme()

    names = names_in(tmp_path)
    assert names == names_in(kept) == ["charts.svg", "overview.svg", "stragglers.svg"]
    _, differing, missing = filecmp.cmpfiles(kept, tmp_path, names, shallow=False)
    assert (differing, missing) == ([], []), "python tests/tui/shots.py --readme takes them again"
