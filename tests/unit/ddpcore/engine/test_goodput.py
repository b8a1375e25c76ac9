"""Goodput: time in steps that count, over all the time since the first attempt began."""

from __future__ import annotations

import json

import pytest

from ddpcore.engine.goodput import Goodput
from ddpcore.errors import CheckpointContentError


def test_steps_are_productive_and_the_rest_is_not() -> None:
    goodput = Goodput(wall_time=1000.0)
    goodput.add_step(20.0)
    goodput.add_step(10.0)
    assert goodput.productive_s == 30.0
    assert goodput.frac(1040.0) == 0.75


def test_lost_work_and_downtime_count_against_it() -> None:
    first = Goodput(wall_time=1000.0)
    first.add_step(50.0)
    saved = json.loads(json.dumps(first.state_dict()))
    first.add_step(40.0)  # lost: the checkpoint does not hold it

    second = Goodput(wall_time=1150.0)
    second.load_state_dict(saved)
    second.add_step(50.0)

    assert second.num_attempts == 2
    assert second.frac(1200.0) == 0.5


def test_a_clock_that_was_set_back_does_not_make_it_exceed_one() -> None:
    goodput = Goodput(wall_time=1000.0)
    goodput.add_step(10.0)
    assert goodput.frac(900.0) == 1.0
    assert Goodput(wall_time=5.0).frac(5.0) == 0.0


@pytest.mark.parametrize("state", [None, {}, {"began_wall_time": "x", "productive_s": 1.0, "num_attempts": 1}, [1, 2]])
def test_a_state_that_makes_no_sense_is_refused(state: object) -> None:
    with pytest.raises(CheckpointContentError, match="goodput makes no sense"):
        Goodput(wall_time=0.0).load_state_dict(state)
