"""The trend of a figure holds the whole run in bounded memory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.recording.history import Trend


def test_points_are_kept_as_they_come() -> None:
    trend = Trend()
    for x in range(10):
        trend.add(x, x * x)

    assert trend.points == [(x, x * x) for x in range(10)]


def test_a_step_to_which_more_ranks_have_come_has_the_latest_value() -> None:
    trend = Trend()
    for x, y in ((1, 5.0), (1, 4.0), (2, 3.0), (2, 2.0)):
        trend.add(x, y)

    assert trend.points == [(1, 4.0), (2, 2.0)]
    assert trend.curve == trend.points


@given(count=st.integers(1, 100), max_points=st.integers(2, 20))
def test_a_curve_ends_with_the_latest_value_however_much_is_merged(count: int, max_points: int) -> None:
    trend, other = Trend(max_points), Trend(max_points)
    for x in range(count):
        trend.add(x, 2.0 * x + 1)
        trend.add(x, 2.0 * x)
    other.add(-1, 5.0)
    other.go_on_with(trend)

    for one in (trend, other):
        assert one.curve[-1] == pytest.approx((count - 1, 2.0 * (count - 1)))
        assert [x for x, _ in one.curve] == sorted({x for x, _ in one.curve})


def test_a_step_back_starts_afresh_even_between_two_kept_points() -> None:
    trend = Trend(max_points=4)
    for x in range(9):
        trend.add(x, 1.0)
    trend.add(3, 7.0)

    assert trend.points == [(3, 7.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_not_drawn(value: float) -> None:
    trend = Trend()
    trend.add(1, value)

    assert trend.points == []


@given(count=st.integers(0, 500), max_points=st.integers(2, 20))
def test_memory_is_bounded_x_grows_and_the_mean_is_kept(count: int, max_points: int) -> None:
    trend = Trend(max_points)
    for x in range(count):
        trend.add(x, 3.5)

    xs = [x for x, _ in trend.points]
    assert len(trend.points) <= max_points
    assert xs == sorted(set(xs))
    assert all(y == 3.5 for _, y in trend.points)
    if count:
        # The newest point is at most one merged stretch behind, and the oldest is of the beginning.
        assert not xs or count - 1 - xs[-1] <= max(1, 2 * count // max_points + 1)
        assert not xs or xs[0] <= 2 * count / max_points + 1


def test_merged_points_are_means_at_their_last_step() -> None:
    trend = Trend(max_points=4)
    for x, y in enumerate((1.0, 3.0, 5.0, 7.0)):
        trend.add(x, y)

    assert trend.points == [(1, 2.0), (3, 6.0)]
    trend.add(4, 8.0)
    assert trend.points == [(1, 2.0), (3, 6.0)]
    trend.add(5, 10.0)
    assert trend.points == [(1, 2.0), (3, 6.0), (5, 9.0)]
