"""Jobs whose ranks torchrun's c10d rendezvous numbers, and begins again by itself: two agents, real ranks."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from agent.wire.commands import Accepted, Commit, Prepare, Refused, Stop
from agent.wire.jobs import ENDED_STATES, JobState, JobStatus
from agent.wire.logs import LAUNCHER_RANK, LogChunk, LogStream, ReadLog
from agent.wire.reports import ProcessState
from tests.support.agents import RunningAgent
from tests.support.jobs import make_local_spec
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agent.wire.jobs import JobSpec
    from agent.wire.reports import NodeReport, WorkerReport

START_S = 90.0
END_S = 60.0

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(4 * START_S)]

TURNS = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
print("attempt", os.environ["RANKDECK_ATTEMPT"], "rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
while True:
    is_over = torch.tensor(float(os.path.exists(sys.argv[1])))
    dist.all_reduce(is_over)
    if is_over:
        break
    time.sleep(0.02)
dist.barrier()
"""


class Pair:
    """Two agents, an elastic job over both, and a file whose existence ends it."""

    def __init__(self, first: RunningAgent, second: RunningAgent, tmp_path: Path) -> None:
        self.first, self.second = first, second
        self.over = tmp_path / "over"
        (tmp_path / "turns.py").write_text(TURNS)
        self._tmp_path = tmp_path

    def start(self, **changes: Any) -> None:
        """Prepare and commit the job on both nodes."""
        plan: JobSpec = make_local_spec(
            self._tmp_path,
            command=["turns.py", str(self.over)],
            num_nodes=2,
            **{"world_size": 4, "elastic_min_nodes": 2, "max_restarts": 3, **changes},
        )
        share: dict[str, Any] = {}
        for node_rank, agent in enumerate((self.first, self.second)):
            share |= {"node_rank": node_rank, "first_rank": plan.local_world_size * node_rank}
            self.newest_share = msgspec.structs.replace(plan, **share)
            prepared = agent.ask(Prepare(self.newest_share))
            assert isinstance(prepared, Accepted)
            share["master_port"] = prepared.master_port
        for agent in (self.first, self.second):
            assert isinstance(agent.ask(Commit("train")), Accepted)

    def wait_for_attempt(self, attempt: int, *agents: RunningAgent) -> list[NodeReport]:
        """Wait until all ranks of an attempt report collectives, and return the nodes' reports."""
        return [
            agent.wait_until(lambda report: _is_moving(report, attempt), START_S, f"attempt {attempt}")
            for agent in agents or (self.first, self.second)
        ]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with RunningAgent(node="a") as first, RunningAgent(node="b") as second:
        yield Pair(first, second, tmp_path)


def _is_moving(report: NodeReport, attempt: int) -> bool:
    job = report.jobs[0]
    assert job.state is JobState.RUNNING, job
    told = [worker.report for worker in report.workers if worker.attempt == attempt and worker.report]
    return (
        job.attempt == attempt
        and len(told) == job.local_world_size
        and all(rank.attempt == attempt and rank.groups and rank.groups[0].completed_seq > 3 for rank in told)
    )


def _ranks(reports: list[NodeReport]) -> list[int]:
    return sorted(worker.rank for report in reports for worker in report.workers)


def _worker(report: NodeReport) -> WorkerReport:
    return next(worker for worker in report.workers if worker.process is not ProcessState.EXITED)


def _job(agent: RunningAgent) -> JobStatus:
    return agent.report().jobs[0]


@pytest.mark.slow
def test_a_rank_that_dies_is_begun_again_with_all_others_and_no_console(pair: Pair) -> None:
    pair.start(local_world_size=1, world_size=2)
    before = pair.wait_for_attempt(1)
    assert _ranks(before) == [0, 1]
    assert {report.jobs[0].node_rank for report in before} == {0, 1}

    psutil.Process(_worker(before[1]).pid).kill()
    after = pair.wait_for_attempt(2)

    assert _ranks(after) == [0, 1]
    assert {(report.jobs[0].state, report.jobs[0].num_restarts) for report in after} == {(JobState.RUNNING, 1)}
    assert {worker.pid for report in before for worker in report.workers}.isdisjoint(
        worker.pid for report in after for worker in report.workers
    )
    pair.over.touch()
    for agent in (pair.first, pair.second):
        ended = agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, END_S, "the end").jobs[0]
        assert (ended.state, ended.exit_code, ended.root_cause) == (JobState.SUCCEEDED, 0, None)
    # What each attempt has printed is kept, and the launcher's words are found beside both.
    rank = after[0].workers[0].rank
    for attempt in (1, 2):
        found = pair.first.ask(ReadLog("train", rank=rank, stream=LogStream.STDOUT, attempt=attempt))
        if isinstance(found, LogChunk):
            assert re.fullmatch(rf"attempt {attempt} rank {rank} of 2\n", found.text)
        else:
            assert attempt == 1, found  # torchrun numbers nodes as it likes
    assert isinstance(pair.first.ask(ReadLog("train", rank=LAUNCHER_RANK, stream=LogStream.STDERR)), LogChunk)


@pytest.mark.slow
def test_an_agent_that_begins_anew_knows_the_ranks_of_the_newest_round(pair: Pair) -> None:
    pair.start()
    before = pair.wait_for_attempt(1)
    psutil.Process(_worker(before[0]).pid).kill()
    pair.wait_for_attempt(2)

    pair.first.process.kill()
    pair.first.process.wait()
    with RunningAgent(node="a", directory=pair.first.directory) as heir:
        (report,) = pair.wait_for_attempt(2, heir)
        assert (report.jobs[0].state, report.jobs[0].num_restarts) == (JobState.RUNNING, 1)
        pair.over.touch()
        ended = heir.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, END_S, "the end").jobs[0]
        assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0)


@pytest.mark.slow
def test_training_goes_on_with_the_nodes_that_are_left_and_takes_in_new_ones(pair: Pair) -> None:
    pair.start(elastic_min_nodes=1)
    both = pair.wait_for_attempt(1)
    assert both[0].jobs[0].world_size == 4

    # The second node goes, its agent first, which would report the end of the rest.
    lost = pair.second.processes()
    pair.second.process.kill()
    for process in lost:
        with contextlib.suppress(psutil.NoSuchProcess):  # what it has lost has ended it meanwhile
            process.kill()
    (alone,) = pair.wait_for_attempt(2, pair.first)

    job = alone.jobs[0]
    assert (job.world_size, job.num_nodes, job.node_rank, job.first_rank) == (2, 1, 0, 0)
    assert _ranks([alone]) == [0, 1]

    with RunningAgent(node="c") as third:
        assert isinstance(third.start_job(pair.newest_share), Accepted)
        together = pair.wait_for_attempt(3, pair.first, third)
        assert _ranks(together) == [0, 1, 2, 3]
        pair.over.touch()
        for agent in (pair.first, third):
            ended = agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, END_S, "the end").jobs[0]
            assert (ended.state, ended.exit_code) == (JobState.SUCCEEDED, 0)


@pytest.mark.slow
def test_a_job_out_of_restarts_fails_and_says_of_what(pair: Pair) -> None:
    pair.start(max_restarts=0)
    before = pair.wait_for_attempt(1)

    victim = _worker(before[1])
    psutil.Process(victim.pid).kill()

    ended = pair.second.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, END_S, "the end").jobs[0]
    assert ended.state is JobState.FAILED
    assert ended.root_cause is not None
    assert (ended.root_cause.rank, ended.root_cause.end) == (victim.rank, "was killed by SIGKILL")
    until(lambda: _job(pair.first).state in ENDED_STATES, END_S, "the other node's end")


@pytest.mark.slow
def test_a_stop_ends_an_elastic_job_on_every_node(pair: Pair) -> None:
    pair.start()
    pair.wait_for_attempt(1)

    # The first one hosts the store, without which the other's job would fail before it could be stopped.
    for agent in (pair.second, pair.first):
        assert isinstance(agent.ask(Stop("train")), Accepted)

    for agent in (pair.first, pair.second):
        ended = agent.wait_until(lambda report: report.jobs[0].state in ENDED_STATES, END_S, "the end").jobs[0]
        assert ended.state is JobState.STOPPED


def test_more_nodes_than_there_are_is_refused(tmp_path: Path) -> None:
    with RunningAgent() as agent:
        refused = agent.ask(Prepare(make_local_spec(tmp_path, elastic_min_nodes=2)))
    assert isinstance(refused, Refused)
    assert refused.message == "job train: at least 2 of 1 nodes"
