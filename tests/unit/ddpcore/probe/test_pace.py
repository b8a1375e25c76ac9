"""When the probe looks and when it speaks, on a virtual clock."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpcore.probe.reporting import (
    SECOND_LOOK_S,
    SLOW_TICK_S,
    TICK_S,
    TICK_SLACK_S,
    TICK_SPREAD_S,
    WAITING_TICK_S,
    Pace,
    tick_of,
)


def sampled(now_s: float, wall_s: float = 0.0, *, is_pending: bool = False, is_waiting: bool = False) -> Pace:
    pace = Pace(1)
    pace.begin_sample(now_s)
    pace.end_sample(now_s, wall_s, is_pending=is_pending, is_waiting=is_waiting)
    return pace


def test_all_is_due_at_first() -> None:
    pace = Pace(1)
    assert pace.is_sample_due(0.0)
    assert pace.is_report_due(0.0)
    assert pace.pause_s(0.0) == 0.0


def test_a_rank_that_works_is_sampled_at_each_tick() -> None:
    pace = sampled(10.0)
    assert abs(pace.pause_s(10.0) - TICK_S) <= TICK_SPREAD_S
    assert not pace.is_sample_due(10.0 + TICK_S / 2)
    assert pace.is_sample_due(10.0 + pace.pause_s(10.0))
    assert pace.is_report_due(10.0 + pace.pause_s(10.0))


# Samples of a step that is as long as a tick are no independent ones: their place in it moves by a sixth of it at most,
# so that the standard error is three times that of a coin, sqrt(0.25 / n). Here 0.05 are 4.7 of it.
@settings(max_examples=30, deadline=None)
@given(st.floats(0.02, 2.0), st.floats(0.2, 0.8))
@example(0.2298, 0.5)
@example(TICK_S, 0.5)
def test_samples_tell_how_a_step_spends_its_time_however_long_it_is(step_s: float, share: float) -> None:
    pace, now_s, num_inside, num_samples = Pace(1), 0.0, 0, 20_000
    for _ in range(num_samples):
        pace.begin_sample(now_s)
        pace.end_sample(now_s, 0.0, is_pending=False, is_waiting=False)
        num_inside += now_s % step_s < share * step_s
        now_s += pace.pause_s(now_s)
    assert abs(num_inside / num_samples - share) < 0.05
    assert math.isclose(now_s / num_samples, TICK_S, rel_tol=0.01)


@given(st.floats(0.0, 1e6))
def test_beats_hardly_shorten_the_ticks_and_lengthen_none(began_s: float) -> None:
    pace, now_s, num_samples = Pace(1), began_s, 2000
    for _ in range(num_samples):
        pace.end_sample(now_s, now_s, is_pending=False, is_waiting=False)
        pause_s = pace.pause_s(now_s)
        assert pause_s <= TICK_S + TICK_SPREAD_S + TICK_SLACK_S + 1e-6
        now_s += pause_s
    assert (now_s - began_s) / num_samples > 0.97 * TICK_S


def test_a_rank_that_waits_is_sampled_more_often() -> None:
    pace = sampled(10.0, is_pending=True, is_waiting=True)
    assert math.isclose(pace.pause_s(10.0), WAITING_TICK_S)
    assert pace.is_sample_due(10.0 + WAITING_TICK_S)


def test_what_is_pending_is_looked_at_again_and_costs_no_sample_once_it_is_over() -> None:
    pace = sampled(10.0, is_pending=True)
    look_s = 10.0 + SECOND_LOOK_S
    assert math.isclose(pace.pause_s(10.0), SECOND_LOOK_S)
    assert pace.pause_s(look_s) == 0.0
    assert not pace.is_sample_due(look_s)
    pace.looked_again()
    assert abs(pace.pause_s(look_s) + SECOND_LOOK_S - TICK_S) <= TICK_SPREAD_S


def test_a_sample_that_fails_is_not_taken_again_at_once() -> None:
    pace = sampled(10.0, is_pending=True)
    pace.begin_sample(10.1)
    assert abs(pace.pause_s(10.1) - TICK_S) <= TICK_SPREAD_S


def test_a_request_makes_sample_and_report_due() -> None:
    pace = sampled(10.0)
    pace.reported(10.0)
    assert not pace.is_report_due(10.1)
    pace.hurry()
    assert pace.is_sample_due(10.1)
    assert pace.is_report_due(10.1)
    assert pace.pause_s(10.1) == 0.0


def test_a_tick_that_comes_a_little_early_still_reports() -> None:
    pace = sampled(10.0)
    pace.reported(10.0)
    assert not pace.is_report_due(10.0 + WAITING_TICK_S)
    assert pace.is_report_due(10.0 + TICK_S - 0.01)


@given(st.floats(0.0, 1e9), st.booleans(), st.booleans())
def test_no_sample_goes_past_a_beat_and_none_comes_before_it(wall_s: float, is_pending: bool, is_waiting: bool) -> None:
    pause_s = sampled(5.0, wall_s, is_pending=is_pending, is_waiting=is_waiting).pause_s(5.0)
    next_beat_s = (tick_of(wall_s) + 1) * SLOW_TICK_S
    assert wall_s + pause_s <= next_beat_s + TICK_SLACK_S + 1e-5
    if wall_s + pause_s > next_beat_s:
        assert tick_of(wall_s + pause_s) == tick_of(wall_s) + 1
