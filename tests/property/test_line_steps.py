"""The step in a printed line is taken for the rank's own only where it is, however the rank's pace and prints are."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.node_state.line_steps import LAG_S, MIN_LINES, TRUSTED_S, LineSteps

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_S = 0.05
READ_TICKS = 4
"""Ticks between two reads of what a rank prints."""
REPORT_TICKS = 5
"""Ticks between two reports of its count."""
LATE_S = LAG_S + 2 * REPORT_TICKS * TICK_S
"""Seconds after which a count has been reported for `LAG_S`."""

paces = st.lists(st.sampled_from([0.0, 0.3, 2.0, 11.0, 60.0, 900.0]), min_size=3, max_size=8)
"""Steps a second, two seconds each."""
between_prints = st.sampled_from([1, 2, 10, 57])


class Taken(NamedTuple):
    """What became of the line that was read last: its true step, what was taken, and the counts of now and before."""

    true_step: int
    step: int | None
    counted: int
    counted_before: int
    """`LATE_S` earlier."""


def taken_of(pace: list[float], every: int, label: Callable[[int], int]) -> list[Taken]:
    """Return what is taken of the lines of a rank that prints a label of every n-th step."""
    per_tick = np.repeat(np.array(pace) * TICK_S, round(2 / TICK_S))
    counts = np.floor(np.cumsum(per_tick)).astype(int).tolist()
    lines, printed, found = LineSteps(), 0, []
    for tick, count in enumerate(counts):
        now_s = 100.0 + tick * TICK_S
        if tick % REPORT_TICKS == 0:
            lines.count(count, now_s)
        if tick % READ_TICKS == 0 and (last := count // every * every) > printed:
            printed = last
            before = counts[max(0, tick - round(LATE_S / TICK_S))]
            found.append(Taken(last, lines.own_step(label(last), now_s), count, before))
    return found


@settings(max_examples=40)
@given(paces, between_prints, st.integers(-3, 5000), st.sampled_from([0.25, 1.0, 4.0]))
def test_a_step_that_is_taken_is_never_further_off_than_the_lag(
    pace: list[float], every: int, offset: int, factor: float
) -> None:
    for taken in taken_of(pace, every, lambda step: max(0, int(step * factor) + offset)):
        if taken.step is not None:
            assert abs(taken.step - taken.true_step) <= 2 * (taken.counted - taken.counted_before) + 2


@settings(max_examples=40)
@given(paces, between_prints, st.integers(2, 3000))
def test_a_step_that_restarts_with_each_epoch_is_not_taken_after_the_first_epoch(
    pace: list[float], every: int, epoch_steps: int
) -> None:
    found = taken_of(pace, every, lambda step: (step - 1) % epoch_steps + 1)

    assert [taken for taken in found if taken.counted_before > epoch_steps + 1 and taken.step is not None] == []
    for before, after in pairwise(found):
        assert before.step is None or after.step is None or before.step <= after.step


@settings(max_examples=20)
@given(st.sampled_from([0.4, 3.0, 40.0, 700.0]), between_prints, st.sampled_from([-1, 0, 1]))
def test_the_steps_of_a_job_at_a_steady_pace_are_taken_once_lines_have_agreed(
    per_s: float, every: int, offset: int
) -> None:
    found = taken_of([per_s] * 20, every, lambda step: step + offset)
    num_early = MIN_LINES + sum(taken.counted <= per_s * (TRUSTED_S + LATE_S) for taken in found)
    assert [taken.step for taken in found[num_early:]] == [taken.true_step + offset for taken in found[num_early:]]
