"""The ranks' steps as of one moment: their reports are of different ages, and a fast job makes steps between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster, still_cluster
from app.view.view import View
from tests.support.node_reports import dead_worker, job_status, node_report, rank_report, worker_report
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.model.job_model import JobModel

BOTH = job_status(world_size=2, num_nodes=1, local_world_size=2)


def spread(steps: list[int]) -> int:
    return max(steps) - min(steps)


def steps_now(sim: SimCluster) -> list[int]:
    """Return the steps of all ranks as their rows show them; empty while one is not known."""
    rows = sim.view().ranks()
    return [row.step for row in rows if row.step is not None] if all(row.step for row in rows) else []


def latest_spread(sim: SimCluster) -> int:
    """Return how far apart the latest reported steps are."""
    return spread(sim.cluster.jobs["demo"].step.tolist())


@pytest.mark.parametrize("delay_s", [0.01, 0.3])
def test_ranks_that_train_together_are_shown_at_most_one_step_apart(delay_s: float) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2, delay_s=delay_s)
    sim.run_to_step(100)  # how long reports are under way is known after some
    shown, latest = [], []
    for _ in range(60):
        sim.run(seconds=0.1)
        steps = steps_now(sim)
        job = sim.view().job()
        assert job is not None
        assert job.step == min(steps)
        assert all(step <= rank.begun_step for step, rank in zip(steps, sim.ranks, strict=True))
        assert min(steps) >= sim.ranks[0].begun_step - 32  # a second's
        shown.append(spread(steps))
        latest.append(latest_spread(sim))

    assert max(latest) > 5
    assert max(shown) <= 1


def test_ranks_that_were_killed_have_come_at_least_so_far() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.run_to_step(60)
    assert not any(row.is_step_least for row in sim.view().ranks())
    sim.stop()
    sim.run(seconds=8)

    assert latest_spread(sim) > 1
    latest = sim.cluster.jobs["demo"].step.tolist()
    assert [row.step_text for row in sim.view().ranks()] == [f"{step}+" for step in latest]
    job = sim.view().job()
    assert job is not None
    assert job.step_text == f"{min(latest)}+"
    assert f"step {min(latest)}+" in sim.view().headline().text


def test_a_rank_that_sent_its_last_report_has_its_last_step() -> None:
    done, killed = rank_report(0, 2, step=30, is_ending=True), rank_report(1, 2, step=28, step_ages_ms=[20])
    cluster = Cluster(["a"])
    cluster.apply("a", node_report(1, [BOTH], [dead_worker(0, done, code=0), dead_worker(1, killed, signal=9)]), 100.0)

    rows = View(cluster, Diagnoser().observe(cluster, 100.0), 100.0).ranks()
    assert [row.step_text for row in rows] == ["30", "28+"]


@pytest.mark.parametrize(("steps", "text"), [((30, 28), "28+"), ((28, 30), "28"), ((28, 28), "28")])
def test_the_step_of_a_job_is_exact_where_one_of_the_ranks_behind_has_sent_its_last(
    steps: tuple[int, int], text: str
) -> None:
    done = rank_report(0, 2, step=steps[0], is_ending=True)
    killed = rank_report(1, 2, step=steps[1], step_ages_ms=[20])
    cluster = Cluster(["a"])
    cluster.apply("a", node_report(1, [BOTH], [dead_worker(0, done, code=0), dead_worker(1, killed, signal=9)]), 100.0)

    job = View(cluster, Diagnoser().observe(cluster, 100.0), 100.0).job()
    assert job is not None
    assert job.step_text == text


def test_a_frozen_rank_holds_nobody_back_for_long() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2)
    sim.freeze(2, at_step=40)
    sim.run_to_step(40)
    sim.run(seconds=1.5)

    assert steps_now(sim) == sim.cluster.jobs["demo"].step.tolist()
    assert sim.cluster.jobs["demo"].step[[0, 1, 3]].tolist() == [39] * 3


def test_a_rank_that_was_killed_does_not_hold_back_those_that_came_further() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=2, hangs_on_death=True)
    sim.kill(2, at_step=40)
    sim.run_to_step(40)
    sim.run(seconds=3)

    assert [steps_now(sim)[rank] for rank in (0, 1, 3)] == [39] * 3
    assert steps_now(sim)[2] <= 39


def put(cluster: Cluster, seq: int, now_s: float, *ranks: dict[str, Any]) -> JobModel:
    """Let a node report its ranks: `age_s` of the report, and fields of it; it has known them for `now_s`."""
    workers = []
    for rank, fields in enumerate(ranks):
        age_s, number = fields.pop("age_s", 0.0), fields.pop("number", seq)
        report = rank_report(rank, 2, report_seq=number, **fields)
        workers.append(worker_report(rank, report, report_age_s=age_s, seen_s=now_s))
    cluster.apply("a", node_report(seq, [BOTH], workers), 100.0 + now_s)
    return cluster.jobs["job"]


def test_a_newer_report_shows_the_step_of_when_the_other_was_made() -> None:
    cluster = Cluster(["a"])
    fast = {"step": 44, "step_ages_ms": [20, 80, 140, 200], "number": 7}
    job = put(cluster, 1, 10.0, fast, {"step": 42, "age_s": 0.1, "step_ages_ms": [10], "number": 8})

    assert job.step.tolist() == [44, 42]
    assert job.shown_step.tolist() == [42, 42]
    assert job.lowest_shown_step(np.ones(job.world_size, np.bool_)) == 42
    assert still_cluster(cluster).jobs["job"].shown_step.tolist() == [42, 42]

    job = put(cluster, 2, 10.1, fast | {"age_s": 0.1}, {"step": 44, "step_ages_ms": [50, 120]})
    assert job.shown_step.tolist() == [44, 43]


def test_only_steps_that_a_rank_has_been_at_are_shown() -> None:
    by_ten = {"step": 400, "step_ages_ms": [20, 80], "step_stride": 10}
    job = put(Cluster(["a"]), 1, 10.0, by_ten, {"step": 390, "age_s": 0.05})
    assert job.shown_step.tolist() == [390, 390]

    # What is not known of longer ago is not made up, and a peer's nonsense shows no step below 0.
    job = put(Cluster(["a"]), 1, 10.0, {"step": 400, "step_ages_ms": [20]}, {"step": 390, "age_s": 0.5})
    assert job.shown_step.tolist() == [399, 390]
    absurd = {"step": 1, "step_ages_ms": [0, 0], "step_stride": 2**31 - 1}
    assert put(Cluster(["a"]), 1, 10.0, absurd, {"step": 1, "age_s": 0.5}).shown_step.tolist() == [0, 1]


def test_last_reports_are_final_and_old_ones_hold_nobody_back() -> None:
    ages = {"step_ages_ms": [20, 80, 140, 200]}
    done = {"step": 50, "is_ending": True, **ages}
    assert put(Cluster(["a"]), 1, 10.0, done, {"step": 48, "age_s": 0.15}).shown_step.tolist() == [50, 48]
    assert put(Cluster(["a"]), 1, 10.0, done, done).shown_step.tolist() == [50, 50]
    old = {"step": 48, "age_s": 2.5}
    assert put(Cluster(["a"]), 1, 10.0, {"step": 50, **ages}, old).shown_step.tolist() == [50, 48]


def test_a_report_that_was_under_way_for_long_is_dated_by_the_node_s_clock() -> None:
    cluster = Cluster(["a"])
    put(cluster, 1, 10.0, {"step": 40}, {"step": 40})
    workers = [
        worker_report(0, rank_report(0, 2, report_seq=5, step=44, step_ages_ms=[20, 80, 140]), seen_s=10.5),
        worker_report(1, rank_report(1, 2, report_seq=5, step=43), report_age_s=0.05, seen_s=10.5),
    ]
    cluster.apply("a", node_report(2, [BOTH], workers), 100.0 + 11.4)
    job = cluster.jobs["job"]

    assert job.shown_step.tolist() == [43, 43]
    assert np.allclose(job.steps_together._made_s, [110.5, 110.45], atol=0.01)


def test_the_mean_loss_has_the_lowest_step_of_the_losses_in_it() -> None:
    cluster = Cluster(["a"])
    assert put(cluster, 1, 10.0, {"step": 43}, {"step": 43}).mean_loss() == (None, None)
    job = put(cluster, 2, 10.1, {"step": 43, "loss": 2.0, "loss_step": 40}, {"step": 43, "loss": 3.0, "loss_step": 41})
    assert job.mean_loss() == (2.5, 40)
    job = put(cluster, 3, 10.2, {"step": 43, "loss": 2.0}, {"step": 43, "loss": 3.0, "loss_step": 41})
    assert job.mean_loss() == (2.5, None)
