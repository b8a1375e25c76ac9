from __future__ import annotations

import math

import msgspec
import pytest

from agent.wire.jobs import JobState, JobStatus
from app.session.control import PATIENCE_S, AssignmentGuard


def shares(*states: JobState, attempt: int = 0) -> dict[str, JobStatus]:
    plain = JobStatus("gpt", attempt, JobState.RUNNING, 1.0, 2 * len(states), len(states), 0, 0, 2)
    return {f"n{node}": msgspec.structs.replace(plain, state=state) for node, state in enumerate(states)}


R, F, L = JobState.RUNNING, JobState.FAILED, JobState.LOST


@pytest.mark.parametrize("ended", [F, L])
def test_what_runs_on_beside_a_failure_is_ended_after_a_while_each_node_once(ended: JobState) -> None:
    guard = AssignmentGuard()
    assert guard.to_end(shares(R, R, R), 0.0) == []
    assert guard.to_end(shares(R, ended, R), 100.0) == []
    assert guard.to_end(shares(R, ended, R), 99.9 + PATIENCE_S) == []
    now = shares(R, ended, R)
    assert guard.to_end(now, 100.0 + PATIENCE_S) == ["n0", "n2"]
    guard.end_has_come(now["n0"], "n0")
    assert guard.to_end(now, 200.0 + PATIENCE_S) == ["n2"]


def test_an_elastic_job_is_left_alone() -> None:
    some = {node: msgspec.structs.replace(one, is_elastic=True) for node, one in shares(R, F).items()}
    assert AssignmentGuard().to_end(some, math.inf) == []


def test_ranks_that_end_by_themselves_meanwhile_are_left_to_it() -> None:
    guard = AssignmentGuard()
    assert guard.to_end(shares(R, F), 0.0) == []
    assert guard.to_end(shares(F, F), 100.0) == []


@pytest.mark.parametrize(
    "states",
    [
        (),
        (R, R),
        (R, JobState.SUCCEEDED),
        (R, JobState.STOPPED),
        (F, JobState.STOPPING),
        (F, JobState.PREPARED),
        (F, JobState.RESTARTING),
    ],
)
def test_nothing_else_is_ended(states: tuple[JobState, ...]) -> None:
    guard = AssignmentGuard()
    for now_s in (0.0, 1000.0, 2000.0):
        assert guard.to_end(shares(*states), now_s) == []


def test_whoever_looks_for_the_last_time_does_not_wait() -> None:
    assert AssignmentGuard().to_end(shares(R, F), math.inf) == ["n0"]


def test_the_next_attempt_has_its_own_time() -> None:
    guard = AssignmentGuard()
    guard.to_end(shares(R, F), 0.0)
    assert guard.to_end(shares(R, F), 100.0) == ["n0"]
    assert guard.to_end(shares(R, F, attempt=1), 200.0) == []
    assert guard.to_end(shares(R, F, attempt=1), 300.0) == ["n0"]
