"""Collectives that nobody stands in: of a thread that saves in the background, or polled now and then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.node_reports import group_report
from tests.unit.app.diagnosis.test_diagnosis import Watched


@pytest.mark.parametrize(
    ("ages_ms", "waited_s", "waiting"),
    [
        ([200, 900], 8.0, []),
        ([200, 900], 4.0, [[0, 1, 2]]),
        ([2900, 3600], 60.0, []),
        ([3100, 3600], 60.0, [[0, 1, 2]]),
        ([200], 8.0, [[0, 1, 2]]),
        ([200, 9000], 8.0, [[0, 1, 2]]),
        ([9000, 9900], 8.0, [[0, 1, 2]]),
        ([], 8.0, [[0, 1, 2]]),
    ],
    ids=["steps on", "briefly", "still", "not any more", "one", "one since", "before it", "not known"],
)
def test_a_rank_that_makes_steps_does_not_wait(ages_ms: list[int], waited_s: float, waiting: list[list[int]]) -> None:
    watched = Watched()
    steps: dict[str, Any] = {"step": 50, "steps_done": 50, "step_limit_s": 5.0, "step_age_s": 0.1}
    steps |= {"step_ages_ms": ages_ms, "step_stride": 1}
    group = group_report(3, waited_s, group="1", op="allgather")
    savers = [watched.tick(rank, group_report(90), group, **steps) for rank in (0, 1, 2)]
    slow = watched.tick(3, group_report(90), group_report(2, group="1"), **steps)

    waits = watched.receive(*savers, slow).waits

    assert [wait.waiting.tolist() for wait in waits] == waiting
