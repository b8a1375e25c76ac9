"""A host's Python that lacks rankdeck, and the wheels with which it comes there: no package index is asked."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from app.install.own_wheel import named_wheel, repacked
from app.install.wheels import FarPython, Wheel, needed, wheel_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

LACKING = ("click", "msgspec", "rich", "pygments")
"""Of what rankdeck requires, by itself or by another, pure and compiled."""


def required_by(wheel: Path) -> list[str]:
    """Return the names of all that a wheel requires, by itself or by another."""
    here = [found for distribution in metadata.distributions() if (found := _as_wheel(distribution))]
    choice = needed(named_wheel(wheel).wheel.requires, here, FarPython((3, 11, 0), ""))
    assert choice.unavailable == ()
    return [found.name for found in choice.wheels]


def fill_wheelhouse(directory: Path) -> None:
    """Pack what hosts lack again, from what the tests run with."""
    for name in LACKING:
        repacked(name, directory)


def link_packages(names: Iterable[str], directory: Path) -> None:
    """Make a directory for a PYTHONPATH in which some of the packages that the tests run with can be imported."""
    for name in names:
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            link = directory / top
            if not link.exists():
                link.symlink_to(str(distribution.locate_file(top)))


def _as_wheel(distribution: metadata.Distribution) -> Wheel | None:
    """Return what is installed as the wheel that it may have been."""
    name = distribution.name.replace("-", "_")
    return wheel_of(f"{name}-1-py3-none-any.whl", requires=tuple(distribution.requires or ()))
