"""What stragglers cost is compared with what they cost minutes ago, and only a notable change is told."""

from __future__ import annotations

import pytest

from app.diagnosis.wait_fractions import MAX_AGE_S, CostTrend


def followed(*costs: float, ranks: tuple[int, ...] = (2,)) -> CostTrend:
    """Return a trend with a cost each second."""
    trend = CostTrend()
    for second, cost in enumerate(costs):
        trend.note(ranks, cost, 100.0 + second)
    return trend


def test_a_cost_that_grows_is_told_with_what_it_was_and_when() -> None:
    earlier = followed(*[0.1] * 60, *[0.3] * 60).earlier(219.0)

    assert earlier is not None
    assert earlier.frac == pytest.approx(0.1)
    assert earlier.age_s == pytest.approx(119.0)


def test_a_cost_that_falls_is_told_too() -> None:
    earlier = followed(*[0.5] * 100, *[0.2] * 20).earlier(219.0)
    assert earlier is not None
    assert earlier.frac == pytest.approx(0.5)


@pytest.mark.parametrize(
    "costs", [[0.3] * 120, [0.3] * 60 + [0.34] * 60, [0.1] * 20 + [0.5] * 20], ids=["steady", "noise", "too soon"]
)
def test_what_is_much_the_same_or_too_soon_is_not(costs: list[float]) -> None:
    assert followed(*costs).earlier(100.0 + len(costs) - 1) is None


def test_other_ranks_begin_anew_and_none_have_no_trend() -> None:
    trend = followed(*[0.1] * 100)
    trend.note((3,), 0.6, 200.0)
    assert trend.earlier(201.0) is None
    trend.forget()
    assert trend.earlier(999.0) is None


def test_only_the_last_minutes_count() -> None:
    costs = [0.9] * 10 + [0.2] * round(MAX_AGE_S + 20)
    assert followed(*costs).earlier(100.0 + len(costs) - 1) is None
