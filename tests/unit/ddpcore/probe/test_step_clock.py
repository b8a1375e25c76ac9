"""How long steps take, and since when there has been none."""

from __future__ import annotations

import pytest

from ddpcore.probe.progress import LEAST_LIMIT_S, StepClock

TICK_S = 0.25


def run(clock: StepClock, from_s: float, steps: list[int], *, own_share: float = 1.0) -> float:
    """Give it samples in which the program has done these steps; return the time of the last one."""
    for place, steps_done in enumerate(steps):
        clock.observe(from_s + place * TICK_S, steps_done, own_share * TICK_S, has_moved=False)
    return from_s + (len(steps) - 1) * TICK_S


def test_nothing_is_known_before_a_second_step() -> None:
    clock = StepClock()
    now_s = run(clock, 100.0, [0, 0, 1, 1, 1])

    assert (clock.limit_s, clock.age_s(now_s + 60)) == (0.0, 0.0)

    now_s = run(clock, now_s, [1, 2])

    assert clock.limit_s == pytest.approx(10.0, rel=0.05)
    assert clock.age_s(now_s + 60) == pytest.approx(60.0)


def test_nothing_is_known_of_a_program_without_steps_before_a_third_collective() -> None:
    clock = StepClock()
    for place in range(2):
        clock.observe(100.0 + place, 0, 1.0, has_moved=True)
    assert clock.limit_s == 0.0

    clock.observe(102.0, 0, 1.0, has_moved=True)

    assert clock.limit_s == pytest.approx(10.0)


def test_a_step_may_take_ten_usual_ones_or_twice_the_longest() -> None:
    short, long = StepClock(), StepClock()
    run(short, 100.0, list(range(100)))
    run(long, 100.0, [*range(1, 41), *([40] * 39), 41])

    assert short.limit_s == pytest.approx(2.5, rel=0.05)
    assert long.limit_s == pytest.approx(20.0, rel=0.05)


def test_time_in_which_the_rank_waits_for_others_makes_no_step_long() -> None:
    clock = StepClock()
    now_s = run(clock, 100.0, [*range(1, 11), *([10] * 400)], own_share=0.0)
    run(clock, now_s + TICK_S, [11, 12])

    assert clock.limit_s < 3.0


def test_a_program_that_always_waits_for_a_collective_has_a_limit_too() -> None:
    clock = StepClock()
    run(clock, 100.0, list(range(1, 11)), own_share=0.0)

    assert clock.limit_s == LEAST_LIMIT_S


def test_a_program_without_steps_is_measured_by_its_collectives() -> None:
    clock = StepClock()
    for place in range(20):
        clock.observe(100.0 + place, 0, 1.0, has_moved=True)

    assert clock.limit_s == pytest.approx(10.0, rel=0.05)
    assert clock.age_s(130.0) == pytest.approx(11.0)
    assert not clock.is_still(120.0)
    assert clock.is_still(122.0)


def test_collectives_before_the_first_step_do_not_count_once_there_are_steps() -> None:
    clock = StepClock()
    for place in range(20):
        clock.observe(100.0 + 5 * place, 0, 5.0, has_moved=True)
    run(clock, 200.0, [1, 2, 3, 4, 5, 6])

    assert clock.limit_s == pytest.approx(2.5, rel=0.05)
