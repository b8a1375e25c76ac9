"""Collectives that nobody stands in: of a thread that saves in the background, or polled now and then."""

from __future__ import annotations

from typing import Any

import pytest

from app.diagnosis.diagnoser import Diagnosis, Thresholds
from app.diagnosis.waits import find_waits
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
    waits = saving(Watched(), ages_ms, waited_s).waits

    assert [wait.waiting.tolist() for wait in waits] == waiting


def test_no_report_is_read_to_see_that_ranks_make_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    facts = saving(watched, [200, 900], 8.0).jobs["job"].facts
    job = watched.cluster.jobs["job"]
    monkeypatch.setattr(job, "worker", None)

    assert find_waits(job, facts, Thresholds(), watched.now_s) == []


def saving(watched: Watched, ages_ms: list[int], waited_s: float) -> Diagnosis:
    """Let three ranks wait in a thread, for a fourth that saves, for so long; their latest steps ended so long ago."""
    steps: dict[str, Any] = {"step": 50, "steps_done": 50, "step_limit_s": 5.0, "step_age_s": 0.1}
    steps |= {"step_ages_ms": ages_ms, "step_stride": 1}
    group = group_report(3, waited_s, group="1", op="allgather")
    savers = [watched.tick(rank, group_report(90), group, **steps) for rank in (0, 1, 2)]
    slow = watched.tick(3, group_report(90), group_report(2, group="1"), **steps)

    return watched.receive(*savers, slow)
