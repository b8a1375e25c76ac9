"""Charts fill what they are given, scales end at round numbers, and the axis of time says how long ago."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tui.widgets.charts import GAP, MIN_CHART_HEIGHT, arrange, nice_above, time_axis


@pytest.mark.parametrize(
    ("num_charts", "size", "shape"),
    [
        (6, (80, 17), (1, 6, 2)),
        (6, (120, 27), (2, 3, 3)),
        (4, (120, 27), (2, 2, 2)),
        (5, (120, 27), (2, 3, 3)),
        (6, (200, 42), (3, 2, 2)),
        (9, (200, 42), (3, 3, 3)),
        (14, (120, 27), (2, 7, 3)),
        (6, (60, 5), (1, 6, 1)),
        (0, (80, 20), (1, 1, 1)),
    ],
)
def test_as_many_charts_as_can_be_read_are_shown_at_once(
    num_charts: int, size: tuple[int, int], shape: tuple[int, int, int]
) -> None:
    grid = arrange(num_charts, *size)

    assert (grid.columns, grid.rows, grid.shown_rows) == shape


@given(num_charts=st.integers(0, 20), width=st.integers(1, 400), height=st.integers(-3, 120))
def test_charts_fill_the_screen_and_do_not_overflow_it(num_charts: int, width: int, height: int) -> None:
    grid = arrange(num_charts, width, height)
    is_scrolled = grid.shown_rows < grid.rows
    used = grid.columns * grid.width + GAP * (grid.columns - 1) + is_scrolled
    shown = sum(grid.heights[: grid.shown_rows])

    assert used <= max(width, 1 + is_scrolled)
    assert width - used < grid.columns or width < GAP + 3
    assert (grid.rows - 1) * grid.columns < max(1, num_charts) <= grid.rows * grid.columns
    assert shown <= max(1, height)
    assert max(1, height) - shown < grid.shown_rows
    assert len(grid.heights) == grid.rows
    assert max(grid.heights) - min(grid.heights) <= (0 if is_scrolled else 1)
    assert grid.shown_rows == 1 or min(grid.heights) >= MIN_CHART_HEIGHT
    if not is_scrolled:
        assert shown == max(1, height)


@pytest.mark.parametrize(
    ("span_s", "width", "labels"),
    [
        (60.0, 60, "1 min ago    45 s           30 s          15 s           now"),
        (300.0, 60, "        4 min ago                2 min                   now"),
        (600.0, 40, "10 min ago        5 min              now"),
        (5400.0, 90, "        1 h 15 min ago       1 h         45 min         30 min         15 min          now"),
        (260_000.0, 60, "3 d ago            2 d                1 d                now"),
        (129_600.0, 60, "1 d 12 h ago       1 d               12 h                now"),
        (129_600.0, 90, "1 d 12 h ago                 1 d          18 h           12 h            6 h           now"),
        (3.0, 60, "3 s ago            2 s                1 s                now"),
        (31.0, 34, "30 s ago       15 s            now"),
        (30.0, 5, "  now"),
        (30.0, 2, "no"),
    ],
)
def test_an_axis_says_how_long_ago_each_tick_was(span_s: float, width: int, labels: str) -> None:
    axis = time_axis(span_s, width)

    assert axis.labels == labels
    assert width - 1 in axis.ticks


def test_the_axis_of_what_is_over_ends_at_its_end() -> None:
    assert time_axis(60.0, 40, "end").labels.endswith("end")


@given(span_s=st.floats(1e-3, 1e8), width=st.integers(1, 400))
def test_an_axis_has_its_width_and_ticks_within_it(span_s: float, width: int) -> None:
    axis = time_axis(span_s, width)

    assert len(axis.labels) == width
    assert axis.ticks <= set(range(width))
    assert axis.labels.rstrip() == axis.labels


@pytest.mark.parametrize(
    ("value", "base", "above"),
    [
        (26.3, 10.0, 30.0),
        (0.9, 10.0, 1.0),
        (1.0, 10.0, 1.0),
        (0.012, 10.0, 0.015),
        (97.0, 10.0, 100.0),
        (312 * 2**20, 1024.0, 400 * 2**20),
        (24 * 2**30, 1024.0, 30 * 2**30),
        (700.0, 1024.0, 800.0),
        (0.0, 10.0, 1.0),
        (math.nan, 10.0, 1.0),
        (math.inf, 1024.0, 1.0),
    ],
)
def test_a_scale_ends_at_the_next_round_number(value: float, base: float, above: float) -> None:
    assert nice_above(value, base) == pytest.approx(above)


@given(value=st.floats(1e-30, 1e30), base=st.sampled_from([10.0, 1024.0]))
def test_a_scale_holds_its_highest_value_and_is_not_much_higher(value: float, base: float) -> None:
    assert value * (1 - 1e-9) <= nice_above(value, base) <= value * 2.1
