"""Cadences: what people write, and at which boundaries it makes something due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.engine.cadence import Cadence, Progress, Unit, parse_cadence
from ddpcore.errors import CadenceError


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("100 steps", Cadence(100, Unit.STEP)),
        ("1 step", Cadence(1, Unit.STEP)),
        (" 2  epochs ", Cadence(2, Unit.EPOCH)),
        ("1epoch", Cadence(1, Unit.EPOCH)),
        ("90 s", Cadence(90, Unit.SECOND)),
        ("1.5 min", Cadence(90, Unit.SECOND)),
        ("2 h", Cadence(7200, Unit.SECOND)),
    ],
)
def test_a_cadence_is_a_number_and_a_unit(text: str, cadence: Cadence) -> None:
    assert parse_cadence(text) == cadence


@pytest.mark.parametrize("text", ["", "100", "steps", "0 steps", "-5 steps", "1.5 steps", "0 s", "3 weeks"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(CadenceError, match=r"is no cadence: write it like '100 steps' or '1 epoch' or '10 min'"):
        parse_cadence(text)


def test_a_unit_that_makes_no_sense_here_is_refused() -> None:
    with pytest.raises(CadenceError, match=r"'10 min' is no cadence: write it like '100 steps' or '1 epoch'$"):
        parse_cadence("10 min", Unit.STEP, Unit.EPOCH)


@given(amount=st.integers(1, 50), num_steps=st.integers(0, 500))
def test_steps_are_due_at_each_multiple(amount: int, num_steps: int) -> None:
    cadence = Cadence(amount, Unit.STEP)
    due = [step for step in range(1, num_steps + 1) if cadence.is_due(Progress(step - 1, 0), Progress(step, 0))]
    assert due == list(range(amount, num_steps + 1, amount))


def test_epochs_are_due_when_one_has_ended() -> None:
    cadence = Cadence(2, Unit.EPOCH)
    assert not cadence.is_due(Progress(9, 0), Progress(10, 1))
    assert cadence.is_due(Progress(19, 1), Progress(20, 2))
    assert not cadence.is_due(Progress(20, 2), Progress(21, 2))


def test_time_is_due_when_it_has_passed_since_the_last_time() -> None:
    cadence = Cadence(60, Unit.SECOND)
    assert not cadence.is_due(Progress(0, 0, 1000.0), Progress(5, 0, 1059.9))
    assert cadence.is_due(Progress(0, 0, 1000.0), Progress(6, 0, 1060.0))


@pytest.mark.parametrize("unit", list(Unit))
def test_an_end_is_reached_at_its_amount(unit: Unit) -> None:
    cadence = Cadence(3, unit)
    assert not cadence.is_reached(Progress(2, 2, 2.9))
    assert cadence.is_reached(Progress(3, 3, 3.0))
