"""What can be done to a job, in words."""

from __future__ import annotations

import pytest

from app.model.cluster import Cluster
from app.view.actions import JobAction, action_question, action_title, whom
from tests.support.sim import SimCluster


@pytest.fixture(scope="module")
def sim() -> SimCluster:
    sim = SimCluster()
    sim.run(12)
    return sim


@pytest.mark.parametrize(
    ("action", "title"),
    [
        (JobAction.STOP, "Stop job demo"),
        (JobAction.STOP_NOW, "Stop job demo now"),
        (JobAction.KILL, "Kill job demo"),
        (JobAction.RESTART, "Restart job demo"),
        (JobAction.RESTART_NOW, "Restart job demo now"),
    ],
)
def test_a_button_says_what_it_does(sim: SimCluster, action: JobAction, title: str) -> None:
    job = sim.view().job()
    assert job is not None
    assert action_title(action, job, has_ended=False) == title
    question = action_question(action, sim.view(), job, has_ended=False, num_ranks=4)
    assert question.startswith(f"{title}? Ranks 0-1 on demo-0 (pids 4000, 4001) and ranks 2-3 on demo-1 (pids")


def test_another_number_of_ranks_is_said_beside_the_old_one(sim: SimCluster) -> None:
    job = sim.view().job()
    assert job is not None
    told = action_question(JobAction.RESTART, sim.view(), job, has_ended=False, num_ranks=1)
    assert told.endswith("then the job restarts with 1 rank instead of 4.")
    told = action_question(JobAction.RESTART, sim.view(), job, has_ended=True, num_ranks=8)
    assert told.startswith("Start job demo again? Its next attempt has 8 ranks instead of 4, and goes on from its")


def test_of_many_nodes_and_ranks_a_few_are_named() -> None:
    sim = SimCluster(num_nodes=6, ranks_per_node=8)
    sim.run(12)
    said = whom(sim.view())
    assert said.startswith("Ranks 0-7 on demo-0 (pids 4000, 4001, 4002, 4003, ...), ranks 8-15 on demo-1")
    assert said.endswith(" and those of 3 more nodes")


def test_before_any_rank_has_a_process_it_says_so() -> None:
    sim = SimCluster()
    sim.cluster = Cluster([node.name for node in sim.nodes])
    assert whom(sim.view()) == "No rank has a process yet"
