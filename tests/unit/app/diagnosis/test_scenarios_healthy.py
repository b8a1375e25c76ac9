"""Healthy life in a simulated cluster: noise, loss, slow phases, starts, ends and stops bring no verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.wire.machine import HostReport
from app.diagnosis.causes import Cause, RankState, Severity
from ddpcore.wire import Phase
from tests.support.long_tests import one_in
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Training, Work

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("seed", one_in(4, range(4)))
def test_a_minute_of_noisy_training_with_lost_and_reordered_reports_brings_no_verdict(seed: int) -> None:
    sim = SimCluster(seed=seed, noise=0.6, drop=0.1, delay_s=0.4)
    sim.run(60)

    assert sim.told == []
    assert sim.view().headline().severity is Severity.OK


@pytest.mark.parametrize("seed", one_in(3, range(3)))
def test_ranks_that_share_cores_and_wait_unevenly_bring_no_verdict(seed: int) -> None:
    """Four ranks on two cores wait 20 to 60 % of the time."""
    sim = SimCluster(noise=0.95, seed=seed)
    sim.run(60)

    assert sim.told == []


def test_a_rank_that_does_a_little_more_than_the_others_brings_no_verdict() -> None:
    sim = SimCluster()
    sim.slow(0, 1.05)
    sim.run(60)

    assert sim.told == []


def test_ranks_alone_on_their_nodes_that_differ_a_little_bring_no_verdict() -> None:
    sim = SimCluster(num_nodes=4, ranks_per_node=1)
    for rank, factor in enumerate((1.0, 1.1, 1.15, 1.2)):
        sim.slow(rank, factor)
    sim.run(60)

    assert sim.told == []


def test_a_checkpoint_below_the_stall_threshold_brings_no_verdict_and_is_said() -> None:
    sim = SimCluster(program=Training(checkpoint_s=8, epoch_steps=40))
    sim.run(60)

    assert sim.told == []
    sim.run_until(lambda: "rank 0 is saving a checkpoint" in sim.view().headline().text, within_s=15)
    assert sim.view().headline().text.startswith('ranks 1-3 wait in barrier "epoch" #')


def test_a_single_hiccup_below_the_stall_threshold_brings_no_verdict() -> None:
    sim = SimCluster()
    sim.run_to_step(60)
    sim.slow(1, 250)
    sim.run(0.05)
    sim.slow(1, 1)
    sim.run(30)

    assert sim.told == []


@pytest.mark.parametrize("pauses", one_in(3, [(60, 3.0), (40, 2.0), (90, 6.0)]))
def test_few_long_pauses_as_for_saving_are_no_slowness_and_the_cost_of_many_is_told_right(
    pauses: tuple[int, float],
) -> None:
    """The rank that pauses also comes last to every call, by a little."""
    every, pause_s = pauses

    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        for step in range(1, 1001):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 138, "train_step", 0.102 if rank == 0 else 0.1)
            yield Call("all_reduce", 142, "train_step", sizes=((1000,),), phase=Phase.BACKWARD)
            yield EndStep(step, 1.0, 0)
            if step % every == 0:
                yield Work(Phase.OTHER, 150, "save", pause_s if rank == 0 else 0.0)
                yield Call("barrier", 152, "main")

    period_s = 0.102 * every + pause_s
    sim = SimCluster(1, 3, program=program, noise=0.0)
    sim.run(4 * period_s)
    assert sim.told == []
    sim.run(60)

    for verdict in sim.diagnosis.verdicts:
        assert (verdict.cause, verdict.culprits) == (Cause.STRAGGLER, (0,))
        assert verdict.cost_frac == pytest.approx(pause_s / period_s, abs=0.05)


def test_a_job_that_ends_well_brings_no_verdict() -> None:
    sim = SimCluster(program=Training(num_steps=120), noise=0.5, drop=0.05)
    sim.run(30)

    assert sim.told == []
    view = sim.view()
    job = view.job()
    assert job is not None
    assert (job.state, job.exit_code, job.severity) == ("succeeded", 0, Severity.OK)
    assert view.headline().text.startswith("job demo succeeded: 4 ranks, step ")
    assert {row.state for row in view.ranks()} == {RankState.DONE}
    assert view.barriers() == []


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_job_that_is_stopped_brings_no_verdict_even_if_a_rank_was_frozen(is_frozen: bool) -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    if is_frozen:
        sim.freeze(2)
        sim.run(3)
    sim.stop()
    sim.run(0.3)
    assert sim.view().headline().text == "job demo is stopping: 4 of 4 ranks are left"
    sim.run(5)

    assert sim.causes() == set()
    view = sim.view()
    job = view.job()
    assert job is not None
    assert job.state == "stopped"
    assert view.headline().text.startswith("job demo was stopped")
    assert {row.state for row in view.ranks()} == {RankState.STOPPED}
    assert view.ranks([0])[0].detail == "killed by SIGTERM on request"


def test_the_start_says_what_is_being_waited_for() -> None:
    sim = SimCluster()
    said: list[str] = []

    sim.each_view = lambda view: said.append(view.headline().text)
    sim.run(7)

    steps = list(dict.fromkeys(text.split(",")[0] for text in said))
    assert steps[0].startswith("waiting for the agent")
    assert "job demo is prepared on demo-0 and demo-1" in steps
    assert "waiting for ranks 0-3 to be started (0 of 4 ready)" in steps
    assert "waiting for ranks 0-3 to import torch (0 of 4 ready)" in steps
    assert any(text.endswith("to import torch (3 of 4 ready)") for text in steps)
    assert any("to open the process group (" in text for text in steps)
    assert steps[-1] == "4 ranks training"
    assert sim.told == []


def test_a_slow_import_is_starting_and_not_silent() -> None:
    sim = SimCluster()
    sim.run(2.5)
    sim.hold_gil(3)
    sim.run(30)

    assert sim.told == []
    assert sim.view().ranks([3])[0].state is RankState.STARTING
    assert "waiting for rank 3 on demo-1 to import torch (3 of 4 ready)" in sim.view().headline().text


def test_a_probe_that_is_late_on_a_crowded_machine_is_not_silent_and_one_that_stays_away_is() -> None:
    sim = SimCluster()
    for node in sim.nodes:
        node.host = HostReport(load_1min=8 * 7.5)
    sim.run_to_step(40)
    sim.hold_gil(3)
    sim.run(5)
    assert sim.alarms == []

    took_s = sim.run_until(lambda: (Cause.SILENT, (3,)) in sim.causes(), within_s=6, what="the silent rank")
    assert sim.view().verdicts()[0].culprits == [3]
    assert took_s > 1


def test_a_new_attempt_starts_clean() -> None:
    sim = SimCluster()
    sim.kill(2, at_step=30)
    sim.run(10)
    assert sim.causes()
    sim.next_attempt()
    sim.run(1)

    assert sim.causes() == set()
    sim.run(12)
    view = sim.view()
    job = view.job()
    assert job is not None
    assert (job.attempt, job.state) == (1, "running")
    assert {row.state for row in view.ranks()} <= {RankState.RUNNING, RankState.WAITING, RankState.MISSING}
    assert len(sim.told) == 1


def test_an_agent_that_restarts_and_counts_anew_is_followed() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.restart_agent(1)
    sim.run(15)

    assert sim.told == []
    row = sim.view().ranks([2])[0]
    assert row.step is not None
    assert row.step > 60


def test_two_simulations_with_one_seed_are_equal() -> None:
    def texts() -> list[str]:
        sim = SimCluster(seed=5, drop=0.2, delay_s=0.3)
        said: list[str] = []
        sim.each_view = lambda view: said.append(view.headline().text)
        sim.freeze(1, at_step=20)
        sim.run(10)
        return said

    assert texts() == texts()
