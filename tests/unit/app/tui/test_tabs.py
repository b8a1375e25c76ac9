"""Eight tabs fit where they must; names are cut no more than need be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tui.actions import VIEW_NAMES
from app.tui.widgets.header import tight_names


def width_of(active: str, names: list[str]) -> int:
    """Return the cells that the tabs take: ` 2 Ranks`, without letters ` 2`, and a blank behind the active one."""
    return 1 + sum(len(f" {number} {name}" if name else f" {number}") for number, name in enumerate(names, start=1))


@pytest.mark.parametrize("active", VIEW_NAMES)
def test_all_names_stand_in_full_in_80_cells(active: str) -> None:
    names = tight_names(active, 80)

    assert names == list(VIEW_NAMES)
    assert width_of(active, names) <= 80


def test_the_longest_names_lose_their_ends_first() -> None:
    assert tight_names("charts", 72) == [
        "overvie",
        "ranks",
        "barrier",
        "stragg",
        "memory",
        "logs",
        "charts",
        "events",
    ]


@given(active=st.sampled_from(VIEW_NAMES), room=st.integers(27, 200))
def test_the_active_name_is_whole_and_the_others_begin_theirs(active: str, room: int) -> None:
    names = tight_names(active, room)

    assert names[VIEW_NAMES.index(active)] == active
    assert all(whole.startswith(name) for whole, name in zip(VIEW_NAMES, names, strict=True))
    assert width_of(active, names) <= max(room, 28)
    others = [len(name) for name, whole in zip(names, VIEW_NAMES, strict=True) if name != whole]
    assert not others or max(others) - min(others) <= 1
