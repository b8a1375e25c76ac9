from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.jobs.admission import is_prepared, next_attempt, refusal_by_gpus, refusal_to_prepare
from agent.jobs.job import Job
from agent.jobs.lifecycle import CommitReceived, LauncherFailed, LauncherStarted
from agent.wire.commands import PrepareAgain, RefusalReason
from ddpcore.wire import Fault, FaultKind
from tests.support.jobs import make_spec

if TYPE_CHECKING:
    from agent.jobs.lifecycle import Event

PREPARED: list[Event] = []
RUNNING: list[Event] = [CommitReceived(), LauncherStarted()]
FAILED: list[Event] = [*RUNNING, LauncherFailed(1)]


def job_in(way: list[Event]) -> Job:
    job = Job(make_spec(), 0.0)
    for event in way:
        job.handle(event, 0.0)
    return job


def test_the_same_preparation_asked_for_twice_is_one() -> None:
    assert is_prepared(make_spec(), job_in(PREPARED))
    assert not is_prepared(make_spec(workdir="/tmp"), job_in(PREPARED))
    assert not is_prepared(make_spec(), job_in(RUNNING))
    assert not is_prepared(make_spec(), None)


def test_a_new_job_and_a_higher_attempt_of_an_ended_one_are_taken() -> None:
    assert refusal_to_prepare(make_spec(), None) is None
    assert refusal_to_prepare(make_spec(attempt=1), job_in(FAILED)) is None


@pytest.mark.parametrize(("way", "attempt"), [(RUNNING, 1), (FAILED, 0), (PREPARED, 1)])
def test_a_job_that_is_here_already_is_refused(way: list[Event], attempt: int) -> None:
    refused = refusal_to_prepare(make_spec(attempt=attempt), job_in(way))
    assert refused is not None
    assert refused.reason is RefusalReason.JOB_EXISTS


def test_more_ranks_than_gpus_are_refused_unless_they_are_to_share() -> None:
    refused = refusal_by_gpus(make_spec(), 1)
    assert refused is not None
    assert refused.reason is RefusalReason.TOO_FEW_GPUS
    assert "2 ranks would share the 1 GPUs" in refused.message
    assert refusal_by_gpus(make_spec(shares_gpus=True), 1) is None
    for enough in (None, 0, 2, 8):
        assert refusal_by_gpus(make_spec(), enough) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node_rank": 2}, "node_rank 2 of 2 nodes"),
        ({"first_rank": 3}, "ranks 3 to 4 of 4"),
        ({"master_port": 0}, "give the others its master_port"),
        ({"command": ["a\0b"]}, "NUL"),
        ({"env": {"A": "\0"}}, "NUL"),
        ({"env": {"A=B": ""}}, "holds '='"),
        ({"env": {"": "x"}}, "is empty"),
        ({"max_restarts": 1}, "over several nodes max_restarts has to be 0"),
    ],
)
def test_specs_that_contradict_themselves_are_refused(changes: dict[str, object], words: str) -> None:
    refused = refusal_to_prepare(make_spec(**changes), None)
    assert refused is not None
    assert refused.reason is RefusalReason.MALFORMED
    assert words in refused.message


def test_faults_of_a_job_that_does_not_allow_them_are_refused() -> None:
    faults = [Fault(FaultKind.KILL, 2, at_step=3)]
    assert refusal_to_prepare(make_spec(faults=faults), None) is None

    refused = refusal_to_prepare(make_spec(faults=faults, allow_faults=False), None)

    assert refused is not None
    assert refused.reason is RefusalReason.NOT_PERMITTED
    assert "set allow_faults" in refused.message


def test_the_next_attempt_keeps_what_it_is_not_told() -> None:
    spec = make_spec(num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500, faults=[], world_size=4)
    again = next_attempt(spec, PrepareAgain("train", 3, 2, 2, 4))
    assert (again.attempt, again.num_nodes, again.node_rank) == (3, 2, 1)
    assert (again.master_addr, again.master_port, again.workdir) == ("10.0.0.1", 29500, spec.workdir)


def test_the_next_attempt_may_be_of_other_nodes() -> None:
    spec = make_spec(num_nodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29500, world_size=4)
    command = PrepareAgain("train", 1, 0, 2, 2, master_port=0, num_nodes=1, node_rank=0, master_addr="127.0.0.1")
    again = next_attempt(spec, command)
    assert (again.num_nodes, again.node_rank, again.first_rank, again.world_size) == (1, 0, 0, 2)
    assert (again.master_addr, again.master_port) == ("127.0.0.1", 0)


def test_a_job_of_one_node_that_spreads_to_several_leaves_its_budget_of_restarts_behind() -> None:
    spec = make_spec(num_nodes=1, node_rank=0, first_rank=0, world_size=2, max_restarts=3)
    wider = PrepareAgain("train", 1, 0, 2, 4, num_nodes=2, node_rank=0, master_addr="10.0.0.1")
    assert next_attempt(spec, wider).max_restarts == 0
    assert refusal_to_prepare(next_attempt(spec, wider), None) is None
    assert next_attempt(spec, PrepareAgain("train", 1, 0, 2, 2)).max_restarts == 3
