"""Each cause, provoked in a simulated cluster: the culprit is named in time, and nobody else."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.diagnosis.causes import Cause, RankState, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.diagnosis.rank_facts import Thresholds
from app.errors import ExitCode
from app.model.cluster import Cluster
from app.model.unreachable_reason import UnreachableKind, UnreachableReason
from app.view.summary import exit_code
from app.view.view import View
from ddpcore.wire import Phase
from tests.support.long_tests import one_in
from tests.support.node_reports import group_report, job_status, node_report, rank_report, worker_report
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Training, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGABRT, SIGKILL, SIGTERM = 6, 9, 15


def until_told(sim: SimCluster, cause: Cause, culprits: tuple[int, ...], within_s: float) -> None:
    sim.run_until(lambda: (cause, culprits) in sim.causes(), within_s, f"{cause} {culprits}")


def blamed(sim: SimCluster) -> set[tuple[Cause, tuple[int, ...]]]:
    """Return every verdict that has ever stood."""
    return {(cause, culprits) for _, cause, culprits in sim.told}


def test_a_frozen_rank_is_named_within_two_seconds_with_place_and_victims() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.freeze(2)

    until_told(sim, Cause.FROZEN, (2,), within_s=0.5)
    sim.run(1.8)

    (verdict,) = sim.verdicts()
    assert (verdict.culprits, verdict.waiting, verdict.node) == ([2], [0, 1, 3], "demo-1")
    assert verdict.severity is Severity.CRITICAL
    assert re.fullmatch(
        r"rank 2 on demo-1 is frozen \(SIGSTOP\) for [12]\.\d s; "
        r"ranks 0-1, 3 wait for it in all_reduce #31 for [12]\.\d s; "
        r"last seen at bytegpt\.py:1\d\d in (next_batch|train_step)",
        verdict.text,
    )
    assert verdict.hint.startswith("thaw it: kill -CONT 4002 on demo-1")
    assert sim.view().headline().text == verdict.text


def test_thawing_clears_the_verdict_within_a_second_and_leaves_no_other_behind() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.freeze(2)
    sim.run(15)
    sim.thaw(2)

    sim.run_until(lambda: not sim.causes(), within_s=1.0)
    sim.run(20)

    assert blamed(sim) == {(Cause.FROZEN, (2,))}
    assert sim.view().headline().text.startswith("4 ranks training")


def test_a_rank_frozen_while_nobody_waits_yet_is_named_all_the_same() -> None:
    sim = SimCluster(program=Training(data_s=5.0))
    sim.run(5)
    sim.freeze(1)

    until_told(sim, Cause.FROZEN, (1,), within_s=0.5)

    (verdict,) = sim.verdicts()
    assert verdict.waiting == []
    assert "nobody waits for it yet" in verdict.text


def test_two_frozen_ranks_of_two_nodes_get_a_verdict_each() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(10)
    sim.freeze(1)
    sim.freeze(6)
    sim.freeze(7)
    sim.run(2)

    assert sim.causes() == {(Cause.FROZEN, (1,)), (Cause.FROZEN, (6, 7))}
    assert "ranks 6-7 on demo-1 are frozen" in sim.verdicts()[1].text
    assert sim.view().headline().text.endswith("(and 1 more)")


def test_a_rank_frozen_during_the_start_is_named_while_the_others_wait_to_begin() -> None:
    sim = SimCluster()
    sim.run(2)
    sim.freeze(3)
    sim.run(3)

    assert sim.causes() == {(Cause.FROZEN, (3,))}


@pytest.mark.parametrize("hangs_on_death", [False, True])
def test_a_killed_rank_is_named_as_exited_with_its_signal_and_its_victims_never_are(hangs_on_death: bool) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4, hangs_on_death=hangs_on_death)
    sim.kill(5, at_step=40)
    until_told(sim, Cause.EXITED, (5,), within_s=10)
    sim.run(30)

    assert blamed(sim) == {(Cause.EXITED, (5,))}
    (verdict,) = sim.verdicts()
    assert verdict.text.startswith("rank 5 on demo-1 was killed by SIGKILL after step ")
    assert "memory" in verdict.hint


def test_a_death_is_told_at_once_and_stays_told_after_the_job_has_failed() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.kill(2)

    until_told(sim, Cause.EXITED, (2,), within_s=0.5)
    sim.run(60)

    job = sim.view().job()
    assert job is not None
    assert (job.state, job.exit_code, job.severity) == ("failed", 1, Severity.CRITICAL)
    (verdict,) = sim.verdicts()
    assert verdict.waiting
    assert set(verdict.waiting) <= {0, 1, 3}, "one that lost its connection at once has not been seen to wait"
    assert "lost their connection to it" in verdict.text
    rows = sim.view().ranks()
    assert [row.state for row in rows] == [RankState.EXITED] * 4
    assert [row.severity for row in rows] == [Severity.WARNING, Severity.WARNING, Severity.CRITICAL, Severity.WARNING]
    assert rows[2].detail == "killed by SIGKILL"
    assert rows[2].rss_bytes is None


def test_an_exit_code_comes_with_its_error_line() -> None:
    sim = SimCluster()
    sim.exit(1, at_step=40, code=3)
    sim.run(10)

    assert blamed(sim) == {(Cause.EXITED, (1,))}
    assert "exited with code 3 after step" in sim.verdicts()[0].text
    assert "ValueError: boom" in sim.verdicts()[0].text
    assert sim.verdicts()[0].hint == "the whole traceback: rankdeck logs demo --rank 1"


def test_ranks_on_one_gpu_that_each_name_themselves_first_are_told_together_while_they_fail_and_after() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    for rank, other in ((0, 1), (1, 0)):
        why = f"Duplicate GPU detected : rank {rank} and rank {other} both on CUDA device 60"
        error = "DistBackendError: NCCL error in: x.cpp:93, invalid usage, NCCL version 2.28.9\nncclInvalidUsage: This"
        sim.ranks[rank]._leave((1, None, f"{error}\nLast error:\n{why}"), sim.now_s + 2.0)

    told = set()
    for _ in range(12):
        sim.run(0.5)
        told |= {verdict.text.partition(";")[0] for verdict in sim.verdicts()}
    error = "DistBackendError: NCCL invalid usage: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    assert told == {f"ranks 0-1 on demo-0 {how} after step 19: {error}" for how in ("fail", "exited with code 1")}


def test_a_rank_ended_by_sigterm_from_outside_is_named_though_its_launcher_ends_others_so_too() -> None:
    sim = SimCluster()
    sim.kill(1, at_step=40, signal=SIGTERM)
    sim.run(12)

    assert blamed(sim) == {(Cause.EXITED, (1,))}
    assert "killed by SIGTERM" in sim.verdicts()[0].text


def test_ranks_that_wait_for_a_dead_one_are_told_when_they_do_not_lose_their_connection() -> None:
    sim = SimCluster(num_nodes=4, ranks_per_node=1, hangs_on_death=True)
    sim.kill(2, at_step=40, signal=SIGABRT)
    sim.run(10)

    (verdict,) = sim.verdicts()
    assert verdict.waiting == [0, 1, 3]
    assert "killed by SIGABRT" in verdict.text
    assert "ranks 0-1, 3 waited for it in all_reduce #41" in verdict.text
    assert "sizes or types differ" in verdict.hint


def test_killing_a_frozen_rank_turns_the_verdict_into_its_death() -> None:
    sim = SimCluster()
    sim.freeze(2, at_step=30)
    sim.run(10)
    sim.kill(2)
    sim.thaw(2)
    sim.run(5)

    assert sim.causes() == {(Cause.EXITED, (2,))}


def test_a_frozen_rank_stays_the_cause_when_the_others_give_up() -> None:
    sim = SimCluster()
    sim.freeze(2, at_step=30)
    sim.run(10)
    for rank in (0, 1, 3):
        sim.ranks[rank].end = (1, None, "RuntimeError: Timed out waiting 10000ms for recv operation to complete")
    sim.run(5)

    assert blamed(sim) == {(Cause.FROZEN, (2,))}
    assert sim.causes() == {(Cause.FROZEN, (2,))}


@pytest.mark.parametrize("hangs_on_death", [False, True])
@pytest.mark.parametrize("step", [3, 50])
def test_a_rank_that_leaves_early_with_code_0_is_named_and_not_those_it_leaves(hangs_on_death: bool, step: int) -> None:
    sim = SimCluster(hangs_on_death=hangs_on_death)
    sim.exit(1, at_step=step)
    sim.run(15)

    assert blamed(sim) == {(Cause.FEWER_CALLS, (1,))}
    assert "rank 1 on demo-0 finished (exit code 0)" in sim.verdicts()[0].text
    assert set(sim.verdicts()[0].waiting) <= {0, 2, 3}
    assert sim.verdicts()[0].waiting


def test_ranks_that_loop_fewer_times_are_named_when_the_last_one_waits_alone() -> None:
    short, long = Training(num_steps=20), Training(num_steps=21)
    sim = SimCluster(program=lambda rank: long(rank) if rank == 3 else short(rank), hangs_on_death=True)
    sim.run(20)

    assert sim.causes() <= {(Cause.FEWER_CALLS, (0, 1, 2)), (Cause.MISMATCH, (3,))}
    assert sim.causes()


def test_a_rank_slowed_eight_times_is_named_within_15_seconds_with_its_cost() -> None:
    sim = SimCluster()
    sim.run_to_step(40)
    sim.slow(3, 8)

    until_told(sim, Cause.STRAGGLER, (3,), within_s=15)

    (verdict,) = sim.verdicts()
    assert verdict.severity is Severity.WARNING
    assert "rank 3 on demo-1 is slow and costs the others about" in verdict.text
    assert "slowed 8x on request" in verdict.text
    assert verdict.where.startswith("bytegpt.py:")
    row = sim.view().ranks([3])[0]
    assert (row.severity, row.detail) == (Severity.WARNING, "slowed 8x on request")
    assert row.wait_frac is not None
    assert row.wait_frac < 0.1


@pytest.mark.parametrize("seed", one_in(4, range(4)))
@pytest.mark.parametrize("factor", one_in(3, [1.2, 1.5, 2.2]))
def test_a_rank_that_is_a_little_slower_is_named_within_15_seconds_with_its_place(factor: float, seed: int) -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4, seed=seed)
    sim.run_to_step(100)
    sim.slow(6, factor)

    until_told(sim, Cause.STRAGGLER, (6,), within_s=15)

    (verdict,) = sim.verdicts()
    assert verdict.severity is Severity.WARNING
    assert "rank 6 on demo-1 is slow and costs the others about" in verdict.text
    assert "comes last to" in verdict.text
    assert verdict.where.startswith("bytegpt.py:")
    sim.run(20)
    sim.slow(6, 1)
    sim.run_until(lambda: not sim.causes(), within_s=15)
    sim.run(20)
    assert blamed(sim) == {(Cause.STRAGGLER, (6,))}


@pytest.mark.slow
def test_of_a_rank_that_gets_slower_it_is_told_what_it_cost_before() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4)
    sim.run_to_step(100)
    sim.slow(6, 1.5)
    until_told(sim, Cause.STRAGGLER, (6,), within_s=15)
    sim.run(40)
    assert " ago: " not in sim.verdicts()[0].text, "it is much as it was"

    sim.slow(6, 4)
    sim.run(60)

    (verdict,) = sim.verdicts()
    assert re.search(r"of the step time, up from \d+ % 1 min \d+ s ago, mostly at or below ", verdict.text)


def test_a_straggler_that_heals_is_cleared_and_no_other_is_named() -> None:
    sim = SimCluster()
    sim.run_to_step(40)
    sim.slow(3, 8)
    until_told(sim, Cause.STRAGGLER, (3,), within_s=15)
    sim.slow(3, 1)

    sim.run_until(lambda: not sim.causes(), within_s=15)
    sim.run(30)

    assert blamed(sim) == {(Cause.STRAGGLER, (3,))}


def test_a_whole_slow_node_is_named_together() -> None:
    sim = SimCluster(num_nodes=3, ranks_per_node=2)
    sim.run_to_step(20)
    sim.slow(2, 8)
    sim.slow(3, 8)
    sim.run(20)

    assert blamed(sim) == {(Cause.STRAGGLER, (2, 3))}
    assert "ranks 2-3 on demo-1 are slow and cost the others" in sim.verdicts()[0].text
    assert "they wait" in sim.verdicts()[0].text


def test_a_live_rank_that_does_not_come_is_a_straggler_after_the_stall_threshold() -> None:
    sim = SimCluster()
    sim.run_to_step(40)
    sim.slow(3, 4000)

    sim.run(9)
    assert sim.causes() == set()
    until_told(sim, Cause.STRAGGLER, (3,), within_s=3)

    (verdict,) = sim.verdicts()
    assert verdict.severity is Severity.CRITICAL
    assert verdict.text.startswith(
        "rank 3 on demo-1 holds the others up; ranks 0-2 wait for it in all_reduce #41 for 10 s"
    )
    assert blamed(sim) == {(Cause.STRAGGLER, (3,))}


def test_a_checkpoint_that_takes_its_usual_time_is_no_trouble_and_one_that_does_not_is() -> None:
    sim = SimCluster(program=Training(checkpoint_s=18, epoch_steps=20, longer_checkpoints=[(60, 200.0)]), noise=0)
    sim.run(17)
    (first,) = sim.verdicts()
    assert (first.cause, first.culprits, first.severity) == (Cause.CHECKPOINTING, [0], Severity.QUIET)
    assert first.text.startswith("rank 0 on demo-0 is saving a checkpoint for 1")
    assert 'ranks 1-3 wait for it in barrier "epoch" #1' in first.text
    assert first.text.endswith("at bytegpt.py:170 in save")
    sim.run_until(lambda: not sim.causes(), 15)

    sim.run_until(lambda: bool(sim.causes()), 20)
    assert "(the longest so far took 18 s)" in sim.verdicts()[0].text
    sim.run_until(lambda: not sim.causes(), 15)
    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.CHECKPOINTING, (0,))}

    sim.run_until(lambda: bool(sim.causes()), 20)
    assert sim.verdicts()[0].severity is Severity.QUIET
    sim.run(35)
    assert sim.verdicts()[0].severity is Severity.WARNING
    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.CHECKPOINTING, (0,))}


def saves_long(rank: int) -> Iterator[Action]:
    """Save in the first rank for longer than a stall, which then does something else for a while before it comes."""
    for step in (1, 2, 3):
        yield BeginStep(step)
        yield Call("all_reduce", 142, "train_step", sizes=((60_000,),), phase=Phase.BACKWARD)
        yield EndStep(step, 1.0, 0)
        if rank == 0:
            yield Work(Phase.CHECKPOINT, 170, "save", 15.0)
            yield Work(Phase.OTHER, 175, "train", 3.0 if step == 1 else 1000.0)


def test_a_rank_that_comes_out_of_a_checkpoint_is_not_named_on_its_way_and_one_that_does_not_come_is() -> None:
    sim = SimCluster(program=saves_long)
    sim.run_until(lambda: len(sim.told) == 2, 60, "both are said")
    assert [(cause, culprits) for _, cause, culprits in sim.told] == [(Cause.CHECKPOINTING, (0,))] * 2
    sim.run_until(lambda: (Cause.STRAGGLER, (0,)) in sim.causes(), 25, "it stands behind the second one")


def test_an_evaluation_of_one_rank_is_told_as_that() -> None:
    sim = SimCluster(program=Training(eval_s=25, epoch_steps=20))
    sim.run_to_step(19)
    sim.slow(0, 3)
    sim.run_until(lambda: bool(sim.causes()), 60)

    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.severity) == (Cause.EVALUATING, Severity.QUIET)
    assert verdict.text.startswith("rank 0 on demo-0 is evaluating for ")


def test_a_job_that_waits_for_its_input_is_told_so_and_nobody_is_blamed() -> None:
    sim = SimCluster(program=Training(data_s=0.05))

    until_told(sim, Cause.INPUT_BOUND, (), within_s=20)
    sim.run(20)

    (verdict,) = sim.verdicts()
    assert verdict.severity is Severity.WARNING
    assert verdict.text.startswith("the ranks spend ")
    assert verdict.text.endswith("% of their time waiting for input; at bytegpt.py:120 in next_batch")
    assert "loader workers" in verdict.hint


def test_of_a_rank_that_is_slow_it_is_told_what_it_does_more_than_the_others() -> None:
    sim = SimCluster(num_nodes=2, ranks_per_node=4, program=Training(slow_input=[(6, 0.015)]))

    until_told(sim, Cause.STRAGGLER, (6,), within_s=25)

    (verdict,) = sim.verdicts()
    assert "; it spends " in verdict.text
    assert "of its time loading data, the others " in verdict.text
    assert (
        verdict.hint == "its input is late: look at the line that loads it, at the disk and at loader workers on demo-1"
    )


def test_a_rank_whose_gil_is_held_is_silent_once_others_wait_for_it() -> None:
    sim = SimCluster()
    sim.hold_gil(3, at_step=40)

    until_told(sim, Cause.SILENT, (3,), within_s=15)
    sim.run(15)

    assert blamed(sim) == {(Cause.SILENT, (3,))}
    assert "though its process lives" in sim.verdicts()[0].text
    assert "py-spy dump --pid 4003" in sim.verdicts()[0].hint
    assert sim.view().ranks([3])[0].state is RankState.SILENT


def test_a_rank_in_uninterruptible_sleep_is_silent_and_it_is_said_why() -> None:
    sim = SimCluster()
    sim.block(3, at_step=40)
    sim.run(15)

    assert blamed(sim) == {(Cause.SILENT, (3,))}
    assert "hangs in the kernel" in sim.verdicts()[0].text
    assert "dmesg" in sim.verdicts()[0].hint
    assert sim.view().ranks([3])[0].detail == "in uninterruptible sleep"


def test_a_silent_rank_that_speaks_again_is_cleared_and_not_called_a_straggler() -> None:
    sim = SimCluster()
    sim.hold_gil(3, at_step=40)
    sim.run(25)
    sim.release_gil(3)

    sim.run_until(lambda: not sim.causes(), within_s=1.5)
    sim.run(15)

    assert blamed(sim) == {(Cause.SILENT, (3,))}


def test_a_lost_node_is_named_with_its_ranks_and_cleared_when_it_returns() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.lose_node(1)

    sim.run(4)
    assert sim.causes() == set()
    assert sim.view().headline().text.startswith("demo-1 has not reported for")
    assert sim.view().nodes()[1].state == "stale"
    until_told(sim, Cause.NODE_LOST, (2, 3), within_s=4)
    assert [row.state for row in sim.view().ranks([2, 3])] == [RankState.LOST] * 2
    assert sim.verdicts()[0].text.startswith("demo-1 has not reported for 6.")
    assert sim.view().nodes()[1].severity is Severity.CRITICAL
    sim.return_node(1)
    sim.run_until(lambda: not sim.causes(), within_s=1)
    sim.run(20)

    assert blamed(sim) == {(Cause.NODE_LOST, (2, 3))}


def test_who_waits_for_a_lost_node_stays_on_the_first_line_whatever_becomes_known_of_the_node() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.lose_node(1)
    sim.run(3)
    assert re.fullmatch(
        r"demo-1 has not reported for [\d.]+ s; whether ranks 2-3 still run is not known; "
        r"ranks 0-1 wait in all_reduce #\d+ for others, [\d.]+ s",
        sim.view().headline().text,
    )
    for why in ("", "port 22 refuses connections"):
        if why:
            sim.cluster.put_unreachable("demo-1", UnreachableReason(why))
        sim.run(8)
        (verdict,) = sim.diagnosis.verdicts
        assert (verdict.cause, verdict.culprits, verdict.waiting) == (Cause.NODE_LOST, (2, 3), (0, 1))
        text = sim.view().headline().text
        assert why in text
        assert "ranks 2-3" in text
        assert re.search(r"ranks 0-1 wait for them in all_reduce #\d+ for \d+ s", text)


@pytest.mark.parametrize("is_whole_job", [True, False])
def test_ranks_of_a_node_that_was_started_again_are_lost_and_not_running_for_ever(*, is_whole_job: bool) -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    for node in sim.nodes if is_whole_job else sim.nodes[1:]:
        node.reboot(sim.now_s)
    sim.run(10)
    states = [row.state for row in sim.view().ranks()]
    assert states[2:] == [RankState.LOST] * 2
    assert (RankState.RUNNING in states) is False
    assert sim.view().ranks([2])[0].detail == "how it ended is not known"


def test_ranks_of_a_node_that_never_came_are_lost_once_the_job_is_over_and_their_node_is_named() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.stop()
    sim.run(5)
    cluster, diagnoser = heard_of_only(sim, "demo-0")
    view = View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s)
    rows = view.ranks([2, 3])
    assert [(row.state, row.node, row.detail) for row in rows] == [(RankState.LOST, "demo-1", "not known")] * 2


def heard_of_only(sim: SimCluster, *nodes: str) -> tuple[Cluster, Diagnoser]:
    """Return what a console knows that has reached only these nodes of a cluster."""
    cluster = Cluster(list(sim.cluster.nodes))
    for name in nodes:
        report = sim.cluster.nodes[name].report
        assert report is not None
        cluster.apply(name, report, sim.now_s)
    return cluster, Diagnoser()


@pytest.mark.parametrize("is_left_out", [True, False])
def test_a_node_that_a_restart_has_left_out_makes_neither_the_first_line_nor_the_title_old(
    *, is_left_out: bool
) -> None:
    sim = SimCluster(num_nodes=1 if is_left_out else 2)
    sim.run_to_step(30)
    cluster, diagnoser = Cluster(["demo-0", "demo-1"]), Diagnoser()
    report = sim.cluster.nodes["demo-0"].report
    assert report is not None
    cluster.apply("demo-1", node_report(1, [], []), sim.now_s - 87.0)
    cluster.put_unreachable("demo-1", UnreachableReason("the connection is lost"))
    cluster.apply("demo-0", report, sim.now_s)
    view = View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s)

    assert view.nodes()[1].state == "lost", "the table of nodes still shows it"
    assert view.oldest_age_s == (0.0 if is_left_out else 87.0), "it may run the ranks that no other node has"
    assert ("no connection to demo-1" in view.headline().text) is not is_left_out


def test_a_node_that_was_never_reached_is_lost_with_the_ranks_that_no_other_has() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    cluster, diagnoser = heard_of_only(sim, "demo-0")

    assert View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s).nodes()[1].state == "connecting"
    cluster.put_unreachable("demo-1", UnreachableReason("port 22 refuses connections"))
    view = View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s)

    assert [node.state for node in view.nodes()] == ["up", "lost"]
    assert [(row.state, row.detail) for row in view.ranks([2, 3])] == [(RankState.LOST, "not known")] * 2
    (verdict,) = view.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.node) == (Cause.NODE_LOST, [2, 3], "demo-1")
    assert verdict.text.startswith("no connection to demo-1: port 22 refuses connections; ranks 2-3 train on unseen")
    assert verdict.severity is Severity.WARNING

    sim.freeze(3)
    sim.run(Thresholds().stall_s + 1)
    cluster, diagnoser = heard_of_only(sim, "demo-0")
    cluster.put_unreachable("demo-1", UnreachableReason("port 22 refuses connections"))
    (verdict,) = View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s).verdicts()
    assert (verdict.cause, verdict.severity) == (Cause.NODE_LOST, Severity.CRITICAL)
    assert "whether ranks 2-3 still run is not known" in verdict.text


def test_the_ranks_of_an_adopted_job_on_a_node_that_was_never_reached_are_lost_too() -> None:
    cluster, diagnoser = Cluster(["gpu1", "gpu2"]), Diagnoser()
    job = job_status(world_size=2, num_nodes=1, local_world_size=1, ranks=[0])
    rank = rank_report(0, 2, step=9, groups=[group_report(5)])
    cluster.apply("gpu1", node_report(1, [job], [worker_report(0, rank)]), 1.0)
    before = View(cluster, diagnoser.observe(cluster, 1.1), 1.1)
    assert (before.verdicts(), exit_code(before)) == ([], ExitCode.WELL)

    cluster.put_unreachable("gpu2", UnreachableReason("no route to host"))
    view = View(cluster, diagnoser.observe(cluster, 1.2), 1.2)

    (verdict,) = view.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.node) == (Cause.NODE_LOST, [1], "gpu2")
    assert exit_code(view) is ExitCode.VERDICT_STANDS


def test_where_no_job_is_known_each_node_that_is_away_is_named_with_its_cause() -> None:
    cluster = Cluster(["gpu1", "gpu2", "gpu3"])
    for name, trouble in (("gpu2", "port 22 refuses connections"), ("gpu3", "no route to host\x1b")):
        cluster.put_unreachable(name, UnreachableReason(trouble))
    view = View(cluster, Diagnoser().observe(cluster, 5.0), 5.0)

    told = r"gpu2 (port 22 refuses connections) and gpu3 (no route to host\x1b)"
    assert view.headline().text == f"no connection to {told}"
    assert [row.trouble for row in view.nodes()] == ["", "port 22 refuses connections", r"no route to host\x1b"]


def test_a_node_whose_agent_has_ended_is_not_said_to_be_out_of_reach() -> None:
    cluster = Cluster(["gpu1", "gpu2"])
    cluster.apply("gpu1", node_report(1, workers=[], jobs=[]), 12.0)
    cluster.apply("gpu2", node_report(1, workers=[], jobs=[]), 0.0)
    cluster.put_unreachable(
        "gpu2", UnreachableReason("nothing is known of jobs there (rankdeck up gpu2)", UnreachableKind.AGENT)
    )
    view = View(cluster, Diagnoser().observe(cluster, 12.0), 12.0)

    assert view.headline().text == "no agent on gpu2 for 12 s: nothing is known of jobs there (rankdeck up gpu2)"
    assert [row.trouble for row in view.nodes()] == ["", "no agent: nothing is known of jobs there (rankdeck up gpu2)"]


def headline_of_absent(**whys: str) -> str:
    """Return the headline of nodes without agents, and one with."""
    cluster = Cluster(["gpu0", *whys])
    for name in cluster.nodes:
        cluster.apply(name, node_report(1, workers=[], jobs=[]), 0.0 if name in whys else 12.0)
    for name, why in whys.items():
        cluster.put_unreachable(name, UnreachableReason(why, UnreachableKind.AGENT))
    return View(cluster, Diagnoser().observe(cluster, 12.0), 12.0).headline().text


@pytest.mark.parametrize(
    ("num_absent", "names", "typed"),
    [
        (2, "h1 and h2", "h1 h2"),
        (3, "h1, h2 and h3", "h1 h2 h3"),
        (40, "h1, h2 and 38 more", "h1 h2 h3 h4 ..."),
    ],
)
def test_agents_that_are_absent_alike_have_one_reason_and_one_command(num_absent: int, names: str, typed: str) -> None:
    hosts = [f"h{number}" for number in range(1, num_absent + 1)]
    told = headline_of_absent(**{host: f"nothing is known of jobs there (rankdeck up {host})" for host in hosts})

    assert told == f"no agent on {names} for 12 s: nothing is known of jobs there (rankdeck up {typed})"


def test_brackets_of_reasons_that_differ_are_not_nested() -> None:
    told = headline_of_absent(h1="it ended (rankdeck up h1)", h2="it was killed", h3="it ended (its node: srun)")

    assert (
        told
        == "no agent on h1 (it ended; rankdeck up h1), h2 (it was killed) and h3 (it ended; its node: srun) for 12 s"
    )
    same = headline_of_absent(h1="it ended (rankdeck up h1)", h2="it ended (its node: srun)")
    assert same == "no agent on h1 and h2 for 12 s: it ended (rankdeck up h1; its node: srun)"


def test_of_several_nodes_each_is_told_by_what_it_lacks_and_since_when() -> None:
    cluster = Cluster(["gpu1", "gpu2", "gpu3", "gpu4"])
    for name, last_report_s in (("gpu1", 2.0), ("gpu2", 0.0), ("gpu3", 4.0)):
        cluster.apply(name, node_report(1, workers=[], jobs=[]), last_report_s)
    cluster.put_unreachable("gpu1", UnreachableReason("nothing is known of jobs there", UnreachableKind.AGENT))
    cluster.put_unreachable("gpu2", UnreachableReason("no route to host"))
    cluster.put_unreachable("gpu3", UnreachableReason("nothing is known of jobs there", UnreachableKind.AGENT))
    cluster.put_unreachable(
        "gpu4", UnreachableReason("the agent speaks wire version 1, this console 2", UnreachableKind.FITTING_AGENT)
    )
    view = View(cluster, Diagnoser().observe(cluster, 12.0), 12.0)

    assert view.headline().text == (
        "no connection to gpu2 for 12 s: no route to host; "
        "no agent on gpu1 and gpu3 for 10 s: nothing is known of jobs there; "
        "no agent that fits on gpu4: the agent speaks wire version 1, this console 2"
    )


def test_what_is_said_of_the_ranks_of_a_node_without_an_agent_is_that_its_agent_is_gone() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    cluster, diagnoser = heard_of_only(sim, "demo-0")
    cluster.put_unreachable(
        "demo-1", UnreachableReason("nothing is known of jobs there (rankdeck up demo-1)", UnreachableKind.AGENT)
    )

    (verdict,) = View(cluster, diagnoser.observe(cluster, sim.now_s), sim.now_s).verdicts()

    assert verdict.cause is Cause.NODE_LOST
    assert verdict.text.startswith(
        "no agent on demo-1: nothing is known of jobs there (rankdeck up demo-1); ranks 2-3 train on unseen"
    )


def test_a_node_that_was_never_reached_is_not_blamed_for_a_job_that_it_has_no_part_in() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    cluster = Cluster([*sim.cluster.nodes, "spare"])
    for name, node in sim.cluster.nodes.items():
        assert node.report is not None
        cluster.apply(name, node.report, sim.now_s)
    cluster.put_unreachable("spare", UnreachableReason("port 22 refuses connections"))

    view = View(cluster, Diagnoser().observe(cluster, sim.now_s), sim.now_s)

    assert view.verdicts() == []
    assert view.nodes()[2].state == "lost"


def test_ranks_that_die_of_a_lost_node_are_its_victims() -> None:
    sim = SimCluster()
    sim.run_to_step(30)
    sim.lose_node(1)
    sim.run(1)
    for rank in (0, 1):
        sim.ranks[rank].end = (1, None, "RuntimeError: Connection closed by peer [10.0.0.2]:999")
    sim.run(20)

    assert blamed(sim) == {(Cause.NODE_LOST, (2, 3))}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("broadcast", 201, "oops", sizes=((3,),)), "rank 2 calls broadcast #21 at bytegpt.py:201 in oops"),
        (
            Call("all_reduce", 201, "oops", sizes=((3,),)),
            "rank 2 calls all_reduce #21 with 3 elements at bytegpt.py:201",
        ),
    ],
)
def test_a_different_call_at_one_seq_names_the_odd_one_out_with_both_lines(call: Call, words: str) -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.mismatch(2, call)

    until_told(sim, Cause.MISMATCH, (2,), within_s=2)
    sim.run(15)

    assert blamed(sim) == {(Cause.MISMATCH, (2,))}
    (verdict,) = sim.verdicts()
    assert words in verdict.text
    assert "ranks 0-1, 3 call all_reduce #21" in verdict.text
    assert "bytegpt.py:142 in train_step" in verdict.text
    assert verdict.waiting == [0, 1, 3]


def test_two_barriers_of_different_names_at_one_seq_are_a_mismatch() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Work(Phase.DATA, 10, "load", 1.0)
        yield Call("barrier", 20 + rank, "sync", "rankdeck.barrier", "left" if rank == 0 else "right")

    sim = SimCluster(num_nodes=1, ranks_per_node=2, program=program)
    sim.run(8)

    assert sim.causes() == {(Cause.MISMATCH, (0, 1))}
    assert sim.verdicts()[0].text.startswith(
        'rank 0 calls barrier "left" #1 at bytegpt.py:20 in sync, '
        'rank 1 calls barrier "right" #1 at bytegpt.py:21 in sync: '
    )
    assert sim.verdicts()[0].waiting == []


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_as_a_contradiction() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.mismatch(1, Call("barrier", 300, "sync", "rankdeck.barrier", "mine"))
    sim.run(20)

    assert blamed(sim) == {(Cause.MISMATCH, (1,))}
    assert 'rank 1 calls barrier "mine" #1 at bytegpt.py:300 in sync' in sim.verdicts()[0].text


def test_a_rank_that_skips_a_call_is_found_where_the_calls_part() -> None:
    sim = SimCluster(program=Training(skipped_calls=[(2, 50)], epoch_steps=60))
    sim.run(25)

    assert blamed(sim) == {(Cause.MISMATCH, (2,))}


def test_transport_is_told_after_the_stall_threshold_without_a_culprit() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.cut_network()

    sim.run(9)
    assert sim.causes() == set()
    until_told(sim, Cause.TRANSPORT, (), within_s=3)

    (verdict,) = sim.verdicts()
    assert verdict.waiting == [0, 1, 2, 3]
    assert verdict.text.startswith("every member has called all_reduce #")
    assert "check the network" in verdict.hint


def test_after_a_node_was_away_its_connections_are_given_time_to_go_on() -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.cut_network()
    sim.run(2)
    sim.lose_node(1)
    sim.run(20)
    sim.return_node(1)
    until_told(sim, Cause.TRANSPORT, (), within_s=10)

    (verdict,) = sim.verdicts()
    assert re.search(r"; demo-1 did not report for (19|2\d) s, until \S+ s ago; ranks 0-3 wait for", verdict.text)
    assert "wait before you restart" in verdict.hint
    sim.run(70)
    (verdict,) = sim.verdicts()
    assert verdict.hint.startswith("check the network")


def test_the_end_of_a_chain_of_groups_is_blamed_and_not_its_links() -> None:
    """Rank 1 waits in the pair for rank 2: it is missing for the others, and a victim like them."""
    pair = Call("barrier", 300, "pair_sync", "5", sizes=((1,),))
    sim = SimCluster(groups={"5": (1, 2)})
    sim.run_to_step(20)
    sim.mismatch(1, pair)
    sim.slow(2, 5000)
    sim.run(30)

    assert blamed(sim) == {(Cause.STRAGGLER, (2,))}
    (verdict,) = sim.verdicts()
    assert verdict.waiting == [0, 1, 3]
    rows = sim.view().ranks()
    assert [row.state for row in rows] == [RankState.WAITING, RankState.WAITING, RankState.MISSING, RankState.WAITING]
    assert {row.group for row in rows} == {"0", "5"}


def test_a_frozen_member_of_a_sub_group_is_blamed_for_those_who_wait_for_its_victims() -> None:
    pair = Call("barrier", 300, "pair_sync", "5", sizes=((1,),))
    sim = SimCluster(groups={"5": (1, 2)})
    sim.run_to_step(20)
    sim.mismatch(1, pair)
    sim.freeze(2)
    sim.run(12)

    assert blamed(sim) == {(Cause.FROZEN, (2,))}
    assert sim.verdicts()[0].waiting == [0, 1, 3]


@pytest.mark.parametrize("trains_on", [True, False])
def test_two_that_wait_for_each_other_in_two_groups_are_told_and_not_those_that_train_on(*, trains_on: bool) -> None:
    """Rank 1 calls in the group of all what its pair calls in its own; the other pair, awaited too, need not come."""

    def pairs(rank: int) -> Iterator[Action]:
        group = "5" if rank < 2 else "6"
        for step in range(1, 400):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 20, "train_step", 0.1 if trains_on or rank < 2 or step < 40 else 500.0)
            is_wrong = rank == 1 and step == 40
            yield Call("all_reduce", 30, "train_step", "0" if is_wrong else group, sizes=((4,),))
            yield EndStep(step, 1.0, 0)

    sim = SimCluster(program=pairs, groups={"5": (0, 1), "6": (2, 3)})
    sim.run_to_step(38)
    sim.run(30)

    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.MISMATCH, (1,) if trains_on else ())}
    (verdict,) = sim.diagnosis.verdicts
    assert {(side.ranks, side.group) for side in verdict.sides} == {((1,), "0"), ((0,), "5")}

    if trains_on:
        sim.run_until(lambda: sim.ranks[2].end is not None, 60, "the others are done")
        sim.run(20)
        assert sim.ranks[1].end is not None, "it has lost them"
        assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.MISMATCH, (1,))}
        assert sim.causes() == {(Cause.MISMATCH, (1,))}


def test_a_rank_that_the_kernel_killed_for_memory_is_told_as_that() -> None:
    sim = SimCluster()
    sim.kill_for_memory(2, at_step=40)
    until_told(sim, Cause.OOM, (2,), within_s=10)
    sim.run(20)

    assert blamed(sim) == {(Cause.OOM, (2,))}
    (verdict,) = sim.verdicts()
    assert verdict.text.startswith("rank 2 on demo-1 was killed by SIGKILL after step ")
    assert ", when the kernel was out of memory; it held 308 MiB" in verdict.text
    assert (
        verdict.hint == "see the Memory view: fewer loader workers, smaller batches or fewer ranks on demo-1 need less"
    )


def test_a_rank_that_does_not_come_to_the_process_group_is_named_and_those_who_wait_are_not() -> None:
    sim = SimCluster(thresholds=Thresholds(join_s=10.0))
    sim.come_late(3, 70.0)
    sim.run(6)
    assert sim.view().headline().text == "waiting for rank 3 on demo-1 to open the process group (3 of 4 ready)"

    until_told(sim, Cause.NOT_JOINED, (3,), within_s=10)
    (verdict,) = sim.verdicts()
    assert verdict.severity is Severity.WARNING
    assert verdict.text.startswith("rank 3 on demo-1 has not come to init_process_group; ranks 0-2 wait for it there ")
    assert verdict.text.endswith("rank 3 is at bytegpt.py:60 in main")
    sim.run(40)
    assert sim.verdicts()[0].severity is Severity.CRITICAL

    sim.run_until(lambda: sim.causes() == set(), 30, "the rank has come")
    sim.run(5)
    assert sim.view().headline().text.startswith("4 ranks training")
    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.NOT_JOINED, (3,))}


def test_ranks_that_meet_and_do_not_find_each_other_are_told_as_a_matter_of_the_network() -> None:
    sim = SimCluster()
    sim.cut_network()

    until_told(sim, Cause.TRANSPORT, (), within_s=65)

    (verdict,) = sim.verdicts()
    assert verdict.text.startswith(
        "every rank has come to init_process_group and they do not find each other; ranks 0-3 wait"
    )
    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.TRANSPORT, ())}
