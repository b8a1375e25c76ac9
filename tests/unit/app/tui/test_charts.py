"""Curves and bars of characters show what they are given, in exactly the cells they are given."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tui.theme import Look
from app.tui.widgets.chart_panel import loss_panel
from app.tui.widgets.charts import Box, Curve, bar_cells, bounds, drawing

if TYPE_CHECKING:
    from collections.abc import Sequence

FIGURES = st.floats(-1e9, 1e9, allow_nan=False)
POINTS = st.lists(st.tuples(FIGURES, FIGURES), max_size=50)
GAPPED = st.lists(st.tuples(FIGURES, FIGURES | st.just(math.nan)), max_size=50).map(sorted)
WHOLE = Box(-1e9, 1e9, -1e9, 1e9)


def curve(points: Sequence[tuple[float, float]], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Return one curve as text."""
    box = bounds(points) if points else WHOLE
    return [line.text for line in drawing([Curve(points)], box, width, height, ascii_only=ascii_only)]


@given(points=POINTS, width=st.integers(1, 60), height=st.integers(1, 12), ascii_only=st.booleans())
def test_a_curve_fills_its_cells_and_no_others(
    points: list[tuple[float, float]], width: int, height: int, ascii_only: bool
) -> None:
    lines = curve(points, width, height, ascii_only=ascii_only)

    assert [len(line) for line in lines] == [width] * height
    allowed = {" ", "*"} if ascii_only else {" ", *map(chr, range(0x2801, 0x2900))}
    assert set("".join(lines)) <= allowed
    assert bool(points) == bool("".join(lines).strip())


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, -1)])
def test_without_room_nothing_is_drawn(width: int, height: int) -> None:
    assert curve([(0, 0), (1, 1)], width, height) == []


def test_a_falling_line_falls_from_the_upper_left_to_the_lower_right() -> None:
    assert curve([(x, -x) for x in range(8)], 4, 2) == ["\u2811\u2884  ", "  \u2811\u2884"]
    assert curve([(0, 1), (1, 0)], 4, 4, ascii_only=True) == ["*   ", " *  ", "  * ", "   *"]


@given(points=POINTS.filter(lambda points: len(points) > 1))
def test_a_curve_has_no_gap_between_its_first_and_its_last_column(points: list[tuple[float, float]]) -> None:
    lines = curve(points, 20, 6, ascii_only=True)
    used = [any(line[column] == "*" for line in lines) for column in range(20)]

    first, last = used.index(True), 19 - used[::-1].index(True)
    assert all(used[first : last + 1])


def test_a_tall_curve_is_drawn_two_dots_thick() -> None:
    def num_dots(height: int) -> int:
        return sum(
            (ord(cell) - 0x2800).bit_count() for line in curve([(0, 0), (9, 0)], 4, height) for cell in line.strip()
        )

    assert num_dots(height=3) == 8
    assert num_dots(height=4) == 16


def test_what_is_not_known_is_a_gap_and_not_a_joined_line() -> None:
    points = [(0, 1), (1, 1), (2, math.nan), (3, math.nan), (4, math.nan), (5, 1), (6, 1), (7, 1)]

    (line,) = drawing([Curve(points)], Box(0, 7, 0, 2), 8, 1, ascii_only=True)
    assert line.text == "**   ***"
    (line,) = drawing([Curve([(x, math.nan) for x in range(8)])], Box(0, 7, 0, 2), 8, 1)
    assert (line.text, set(line.owners)) == (" " * 8, {-1})


def test_what_is_beyond_the_time_is_left_out_and_what_is_beyond_the_scale_stands_at_its_edge() -> None:
    points = [(-3, 0), (0, 99), (1, -99), (2, 0), (7, 99)]
    lines = drawing([Curve(points)], Box(0, 3, 0, 1), 3, 3, ascii_only=True)

    assert [line.text for line in lines] == ["*  ", " * ", " **"]


def test_curves_are_told_apart_without_colour_and_the_first_is_in_front() -> None:
    solid, dotted = Curve([(0, 1), (7, 1)]), Curve([(0, 0), (7, 2)], is_dotted=True)
    box = Box(0, 7, 0, 2)
    lines = drawing([solid, dotted], box, 8, 3, ascii_only=True)
    assert [line.text for line in lines] == ["      ..", "********", "..      "]
    assert [set(line.owners) for line in lines] == [{-1, 1}, {0}, {-1, 1}]

    (line,) = drawing([dotted], Box(0, 7, -1, 3), 8, 1)
    dots = [(ord(cell) - 0x2800).bit_count() for cell in line.text]
    assert dots == [1] * 8, "every second column of dots"
    assert drawing([Curve([(1, 1)], is_dotted=True)], box, 4, 1)[0].text.strip(), "one point alone is seen"


@given(first=GAPPED, second=GAPPED, width=st.integers(1, 40), height=st.integers(1, 9), ascii_only=st.booleans())
def test_every_cell_is_blank_or_of_one_curve(
    first: list[tuple[float, float]], second: list[tuple[float, float]], width: int, height: int, ascii_only: bool
) -> None:
    curves = [Curve(first), Curve(second, is_dotted=True)]
    lines = drawing(curves, WHOLE, width, height, ascii_only=ascii_only)

    assert [(len(line.text), len(line.owners)) for line in lines] == [(width, width)] * height
    for line in lines:
        assert [owner < 0 for owner in line.owners] == [cell == " " for cell in line.text]
    alone = drawing(curves[:1], WHOLE, width, height, ascii_only=ascii_only)
    for line, only in zip(lines, alone, strict=True):
        assert [owner == 0 for owner in line.owners] == [owner == 0 for owner in only.owners]


def test_bounds_are_apart_even_for_one_point() -> None:
    assert bounds([(3.0, 10.0)]) == (3.0, 4.0, 9.0, 11.0)
    assert bounds([(3.0, 0.0)]) == (3.0, 4.0, -1.0, 1.0)
    assert bounds([(1.0, 2.0), (5.0, -2.0)]) == (1.0, 5.0, -2.0, 2.0)


@pytest.mark.parametrize(
    ("frac", "cells"),
    [
        (0.0, (0, False, 10)),
        (0.0001, (0, True, 9)),
        (0.5, (5, False, 5)),
        (0.54, (5, True, 4)),
        (1.0, (10, False, 0)),
        (7.0, (10, False, 0)),
        (-1.0, (0, False, 10)),
    ],
)
def test_a_bar_is_full_in_halves_of_a_cell(frac: float, cells: tuple[int, bool, int]) -> None:
    assert bar_cells(frac, 10) == cells


@given(frac=st.floats(-2, 2), width=st.integers(0, 100))
def test_a_bar_has_exactly_its_width(frac: float, width: int) -> None:
    full, has_half, empty = bar_cells(frac, width)

    assert full + has_half + empty == width
    assert min(full, empty) >= 0


@pytest.mark.parametrize(
    ("width", "at", "title"),
    [
        (60, "at", "LOSS  1.50 at step 1,200; first 5.50 at step 2"),
        (60, "at about", "LOSS  1.50 at about step 1,200; first 5.50 at about step 2"),
        (48, "at about", "LOSS  1.50 at about step 1,200"),
    ],
)
def test_the_loss_names_its_steps_as_steps_and_leaves_out_the_first_where_there_is_no_room(
    width: int, at: str, title: str
) -> None:
    lines = loss_panel(Look(), [(2, 5.5), (1200, 1.5)], (width, 6), at=at)
    assert "".join(segment.text for segment in lines[0].segments).strip() == title
