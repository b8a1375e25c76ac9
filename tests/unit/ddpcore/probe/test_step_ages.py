"""When the latest steps ended, as the probe reports it."""

from __future__ import annotations

import pytest

from ddpcore.probe.progress import MAX_AGE_MS, MAX_AGES, step_ages
from ddpcore.probe.samples import StepAges, StepEnd, StepMark

NOW_US = 1_000_000_000


def mark(step: int) -> StepMark:
    return StepMark(step, None, None, None, 1)


def ages(step: int, *ends: tuple[int, int]) -> StepAges:
    """Return the ages of steps that ended so many milliseconds ago, given in the order of time."""
    return step_ages(mark(step), [StepEnd(number, NOW_US - 1000 * age_ms) for number, age_ms in ends], NOW_US)


def test_each_step_has_its_age_as_long_as_the_one_before_it_is_known() -> None:
    assert ages(44, (41, 200), (42, 140), (43, 80), (44, 20)) == StepAges(1, (20, 80, 140))
    assert ages(400, (380, 140), (390, 80), (400, 20)) == StepAges(10, (20, 80))


@pytest.mark.parametrize(
    "ends",
    [
        [],
        [(44, 20)],
        [(44, 40), (44, 20)],  # reported twice
        [(50, 40), (44, 20)],  # counted anew
        [(43, 40), (44, MAX_AGE_MS + 1)],  # the same for all
        [(43, 40), (44, -5)],  # the clock was put back
        [(-1, 40), (44, 20)],
    ],
)
def test_without_a_step_before_there_is_no_age(ends: list[tuple[int, int]]) -> None:
    assert ages(44, *ends) == StepAges()


def test_a_break_in_the_count_ends_the_list() -> None:
    assert ages(3, (100, 200), (1, 140), (2, 80), (3, 20)) == StepAges(1, (20, 80))
    assert ages(44, (40, 200), (42, 140), (43, 80), (44, 20)) == StepAges(1, (20, 80))
    assert ages(44, (41, 10), (42, 140), (43, 80), (44, 20)) == StepAges(1, (20, 80, 140))
    assert ages(44, (41, 200), (42, 10), (43, 80), (44, 20)) == StepAges(1, (20, 80))


def test_the_main_thread_goes_on_while_the_probe_reads() -> None:
    assert ages(43, (41, 200), (42, 140), (43, 80), (44, 0)) == StepAges(1, (80, 140))
    assert ages(44, (42, 140), (43, 80)) == StepAges(1, (0, 80))


def test_the_list_is_short() -> None:
    found = ages(100, *((step, 10 * (100 - step)) for step in range(101)))

    assert found.ages_ms == tuple(range(0, 10 * MAX_AGES, 10))
    assert step_ages(None, [], NOW_US) == StepAges()


def test_a_loss_keeps_its_step_until_there_is_another() -> None:
    first = mark(0).followed_by(20, 0.5, 1)
    later = first.followed_by(21, None, 1)

    assert (first.loss, first.loss_step, first.loss_first, first.steps_done) == (0.5, 20, 0.5, 2)
    assert (later.loss, later.loss_step, later.loss_first, later.step) == (0.5, 20, 0.5, 21)
    assert later.followed_by(22, 0.25, 1).loss_step == 22
    assert later.followed_by(22, 0.25, 1, 20).loss_step == 20
    assert mark(0).followed_by(1, None, None).loss_step is None
