"""Ranks that stand outside collectives, in a simulated cluster: who stands where, and who waits for whom."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from agent.wire.digest import decode_frame
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from ddpcore.wire import Phase
from tests.support.long_tests import one_in
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Linger, Peer, Training, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HANG_S = 12.0
LONG_S = 3600.0


def steps(num_steps: int, step_s: float = 0.1) -> Iterator[Action]:
    for step in range(1, num_steps + 1):
        yield BeginStep(step)
        yield Work(Phase.FORWARD, 138, "train_step", step_s)
        yield Call("all_reduce", 142, "train_step", sizes=((1000,),), phase=Phase.BACKWARD)
        yield EndStep(step, 1.0, 0)


def then(after: Callable[[int], Iterator[Action]], num_steps: int = 60) -> Callable[[int], Iterator[Action]]:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(num_steps)
        yield from after(rank)

    return program


def until_named(sim: SimCluster, within_s: float = HANG_S) -> float:
    """Let time pass from the last step to the first verdict; return how long that took."""
    sim.run_until(lambda: all(rank.begun_step == 60 for rank in sim.ranks), 60)
    return sim.run_until(lambda: bool(sim.causes()), within_s + 0.2, "a verdict")


def blamed(sim: SimCluster) -> set[tuple[Cause, tuple[int, ...]]]:
    """Return every verdict that has ever stood."""
    return {(cause, culprits) for _, cause, culprits in sim.told}


@pytest.mark.parametrize("ranks", [1, 3, pytest.param(64, marks=pytest.mark.slow)])
def test_ranks_that_all_stand_at_one_line_are_told_with_that_line_and_nobody_is_blamed(ranks: int) -> None:
    sim = SimCluster(1, ranks, program=then(lambda _: iter([Work(Phase.OTHER, 30, "shard", LONG_S, is_standing=True)])))
    until_named(sim)
    sim.run(20)

    assert sim.causes() == {(Cause.STANDSTILL, ())}
    (verdict,) = sim.diagnosis.verdicts
    assert [(side.ranks, side.place.line if side.place else 0) for side in verdict.sides] == [(tuple(range(ranks)), 30)]
    assert verdict.severity is Severity.CRITICAL
    assert verdict.step == 60


@pytest.mark.parametrize(
    ("is_computing", "cpu", "why"),
    [(True, "uses 9\\d % of a CPU", "a loop may not end"), (False, "uses no CPU", "a file system, lock or server may")],
)
def test_a_rank_that_hangs_in_its_own_code_is_named_with_what_its_process_does(
    is_computing: bool, cpu: str, why: str
) -> None:
    def after(rank: int) -> Iterator[Action]:
        if rank == 1:
            yield Work(Phase.OTHER, 30, "spin", LONG_S, is_standing=True, is_computing=is_computing)
        yield from steps(1)

    sim = SimCluster(1, 2, program=then(after))
    until_named(sim)

    (row,) = sim.view().verdicts()
    assert (row.cause, row.culprits) == (Cause.STRAGGLER, [1])
    assert re.search(f"; rank 1 is at bytegpt.py:30 in spin and {cpu}$", row.text), "what it does accounts for it"
    assert row.hint.startswith(why)
    assert row.hint.endswith("; s in the console, or rankdeck stacks demo, shows its stack; x stops or restarts")


def test_a_job_that_loops_at_one_line_is_named_after_a_minute_as_one_that_computes() -> None:
    spin = Work(Phase.OTHER, 30, "spin", LONG_S, is_standing=True, is_computing=True)
    sim = SimCluster(1, 1, program=then(lambda _: iter([spin])))
    sim.run_until(lambda: bool(sim.causes()), 100, "a verdict")

    (row,) = sim.view().verdicts()
    assert row.cause is Cause.STANDSTILL
    assert "; rank 0 uses 86 % of a CPU" in row.text
    assert row.hint.startswith("look at these lines: a loop may not end")


def test_the_few_that_stand_elsewhere_are_named() -> None:
    def stand(rank: int) -> Iterator[Action]:
        yield Work(Phase.OTHER, 50 if rank == 2 else 30, "shard", LONG_S, is_standing=True)

    sim = SimCluster(2, 4, program=then(stand))
    until_named(sim)

    assert sim.causes() == {(Cause.STANDSTILL, (2,))}


@pytest.mark.parametrize("line_of", [lambda rank: 30 + rank % 2, lambda rank: 30 + rank])
def test_ranks_that_stand_at_as_many_places_as_there_are_halves_blame_nobody(line_of: Callable[[int], int]) -> None:
    def stand(rank: int) -> Iterator[Action]:
        yield Work(Phase.OTHER, line_of(rank), "shard", LONG_S, is_standing=True)

    sim = SimCluster(2, 2, program=then(stand))
    until_named(sim)

    assert sim.causes() == {(Cause.STANDSTILL, ())}


@pytest.mark.parametrize(
    "work",
    [
        Work(Phase.OTHER, 30, "shuffle", 8.0, is_standing=True),
        Work(Phase.OTHER, 30, "evaluate", 60.0),
        Work(Phase.EVAL, 30, "evaluate", 60.0, is_standing=True),
        Work(Phase.CHECKPOINT, 30, "save", 60.0, is_standing=True),
    ],
)
def test_a_pause_work_that_moves_and_phases_that_take_their_time_are_no_standstill(work: Work) -> None:
    def pause(rank: int) -> Iterator[Action]:
        yield work
        yield from steps(60)

    sim = SimCluster(1, 2, program=then(pause), noise=0.01)
    sim.run(100)

    assert sim.alarms == []


def test_once_a_rank_has_ended_the_first_line_says_who_is_left_and_five_minutes_of_standing_are_told() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(60)
        if rank != 3:
            yield Work(Phase.OTHER, 50 if rank == 1 else 30, "upload", LONG_S, is_standing=True)

    sim = SimCluster(1, 4, program=program)
    sim.run_until(lambda: not sim.ranks[3].is_alive, 60, "the end of a rank")
    sim.run(4)
    headline = sim.view().headline().text
    assert headline.startswith("3 of 4 ranks training, step ")
    assert headline.endswith("; rank 3 has ended, ranks 0-2 are left, rank 0 at bytegpt.py:30 in upload")
    sim.run(280)
    assert sim.alarms == []
    sim.run(20)

    assert blamed(sim) == {(Cause.STANDSTILL, (1,))}
    (verdict,) = sim.diagnosis.verdicts
    assert (verdict.ended, verdict.severity) == ((3,), Severity.WARNING)
    assert "no rank that is left has moved for" in sim.view().headline().text
    assert "rank 3 has ended (exit code 0)" in sim.view().headline().text


def test_of_two_ranks_the_one_that_is_left_and_stands_is_told_after_five_minutes() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("barrier", 88, "main")
        if rank == 0:
            yield Work(Phase.OTHER, 30, "upload", LONG_S, is_standing=True)

    sim = SimCluster(1, 2, program=program)
    sim.run(290)
    assert sim.alarms == []
    sim.run(20)

    assert blamed(sim) == {(Cause.STANDSTILL, ())}
    assert "rank 0 stands at bytegpt.py:30" in sim.view().headline().text


def test_a_step_is_overdue_only_after_ten_usual_ones() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(10, step_s=4.0)
        yield Work(Phase.OTHER, 30, "shard", LONG_S, is_standing=True)

    sim = SimCluster(1, 2, program=program)
    sim.run_to_step(10)
    took_s = sim.run_until(lambda: bool(sim.causes()), 60)

    assert sim.causes() == {(Cause.STANDSTILL, ())}
    assert 38 < took_s < 52


def test_a_rank_that_stands_while_the_others_wait_for_it_is_named_by_them_as_ever() -> None:
    def stand(rank: int) -> Iterator[Action]:
        if rank == 1:
            yield Work(Phase.DATA, 30, "shard", LONG_S, is_standing=True, child_pid=77)
        yield from steps(60)

    sim = SimCluster(1, 3, program=then(stand))
    until_named(sim)

    assert sim.causes() == {(Cause.STRAGGLER, (1,))}
    (verdict,) = sim.diagnosis.verdicts
    assert verdict.child is not None
    assert verdict.child.pid == 77


@pytest.mark.parametrize("num_steps", [0, 60])
def test_most_that_stand_while_a_few_wait_for_them_are_told_with_their_lines_and_nobody_is_blamed(
    num_steps: int,
) -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(num_steps)
        if rank != 0:
            yield Work(Phase.OTHER, 30, "take_lock", LONG_S, is_standing=True)
        yield Call("barrier", 31, "hold_lock")

    sim = SimCluster(1, 3, program=program)
    sim.run_until(lambda: bool(sim.causes()), 60 + HANG_S, "a verdict")
    sim.run(20)

    assert blamed(sim) == {(Cause.STANDSTILL, ())}
    (verdict,) = sim.diagnosis.verdicts
    assert [(side.ranks, side.place.line if side.place else 0) for side in verdict.sides] == [((1, 2), 30)]
    assert (verdict.waiting, verdict.op) == ((0,), "barrier")
    assert verdict.severity is (Severity.CRITICAL if num_steps else Severity.WARNING)


def test_most_that_stand_are_told_without_a_gap_when_the_few_time_out() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(60)
        if rank != 0:
            yield Work(Phase.OTHER, 30, "read", LONG_S, is_standing=True)
        yield Call("all_reduce", 31, "main", sizes=((1000,),))

    sim = SimCluster(1, 3, program=program, timeout_s=16.0)
    sim.run_until(lambda: bool(sim.causes()), 60, "a verdict")
    sim.run_until(lambda: not sim.ranks[0].is_alive, 30, "the end")
    sim.run(3)

    assert blamed(sim) == {(Cause.STANDSTILL, ())}
    (verdict,) = sim.diagnosis.verdicts
    assert verdict.aftermath is not None
    assert verdict.aftermath.ranks == (0,)


def test_a_rank_that_is_interrupted_while_others_wait_for_it_has_not_left_them() -> None:
    def stand(rank: int) -> Iterator[Action]:
        if rank == 1:
            yield Work(Phase.OTHER, 30, "read", LONG_S, is_standing=True)
        yield from steps(60)

    sim = SimCluster(1, 3, program=then(stand))
    until_named(sim)
    sim.leave(1, teardown_s=2.0)
    sim.run(1.5)
    sim.kill(1, signal=2)
    sim.run(5)

    assert blamed(sim) == {(Cause.STRAGGLER, (1,))}


def test_of_two_in_different_calls_the_one_that_has_left_out_its_message_before_is_named() -> None:
    def program(rank: int) -> Iterator[Action]:
        for iteration in range(20):
            yield Call("broadcast", 88, "main", sizes=((1000,),))
            if rank == 0:
                yield from (Peer("recv", actor, 40, "learn") for actor in (1, 2, 3))
                continue
            yield Work(Phase.OTHER, 30, "act", 0.2)
            if rank == 2 and iteration == 12:
                break
            yield Peer("send", 0, 35, "act")
        yield Call("barrier", 60, "main")

    sim = SimCluster(1, 4, program=program)
    sim.run_until(lambda: bool(sim.causes()), 30, "a verdict")
    sim.run(10)

    assert blamed(sim) == {(Cause.MISMATCH, (2,))}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_waits_for_a_message_of_one_that_trains_on_is_no_trouble(ranks: int) -> None:
    trainers = tuple(range(ranks - 1))

    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        if rank == ranks - 1:
            yield Peer("recv", 0, 40, "evaluate")
        for step in range(1, 300 if rank < ranks - 1 else 0):
            yield BeginStep(step)
            yield Work(Phase.FORWARD, 138, "train_step", 0.1)
            yield Call("all_reduce", 142, "train_step", sizes=((1000,),), phase=Phase.BACKWARD, group="1")
            yield EndStep(step, 1.0, 0)
        if rank == 0:
            yield Peer("send", ranks - 1, 50, "main")
        yield Call("barrier", 60, "main")

    sim = SimCluster(1, ranks, program=program, groups={"1": trainers})
    sim.run(50)

    assert sim.alarms == []


def test_most_that_still_move_while_one_waits_for_them_are_no_standstill() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        yield from steps(60)
        if rank != 0:
            yield Work(Phase.OTHER, 30, "evaluate", 25.0)
        yield Call("barrier", 31, "main")
        yield from steps(60)

    sim = SimCluster(1, 3, program=program)
    sim.run(60)

    assert Cause.STANDSTILL not in {cause for _, cause, _ in sim.alarms}


def test_two_ranks_that_receive_from_each_other_are_both_named() -> None:
    def exchange(rank: int) -> Iterator[Action]:
        yield Peer("recv", 1 - rank, 30 + rank, "exchange")
        yield Peer("send", 1 - rank, 40, "exchange")

    sim = SimCluster(1, 2, program=then(exchange))
    until_named(sim, within_s=3.0)
    sim.run(20)

    assert blamed(sim) == sim.causes() == {(Cause.MISMATCH, (0, 1))}
    (verdict,) = sim.diagnosis.verdicts
    assert [(side.ranks, side.op, side.peer_call.peer if side.peer_call else None) for side in verdict.sides] == [
        ((0,), "recv", 1),
        ((1,), "recv", 0),
    ]


def test_a_ring_in_which_all_receive_first_is_told_as_a_whole() -> None:
    def ring(rank: int) -> Iterator[Action]:
        yield Peer("recv", (rank - 1) % 4, 30, "ring")
        yield Peer("send", (rank + 1) % 4, 31, "ring")

    sim = SimCluster(2, 2, program=then(ring))
    until_named(sim, within_s=3.0)
    sim.run(20)

    assert sim.causes() == {(Cause.MISMATCH, (0, 1, 2, 3))}


def test_a_send_that_nobody_receives_stands_against_the_barrier_of_the_others() -> None:
    def send(rank: int) -> Iterator[Action]:
        if rank == 0:
            yield Peer("send", 2, 30, "statistics")
        yield Call("barrier", 31, "main")

    sim = SimCluster(1, 3, program=then(send))
    until_named(sim, within_s=3.5)
    sim.run(20)

    assert sim.causes() == {(Cause.MISMATCH, (0,))}
    (verdict,) = sim.diagnosis.verdicts
    assert verdict.waiting == (1, 2)


def test_tags_that_differ_never_meet() -> None:
    def exchange(rank: int) -> Iterator[Action]:
        yield Peer("send" if rank == 0 else "recv", 1 - rank, 30, "halo", tag=rank)

    sim = SimCluster(1, 2, program=then(exchange))
    until_named(sim, within_s=3.0)

    assert sim.causes() == {(Cause.MISMATCH, (0, 1))}


def pipeline(rank: int, num_ranks: int, stage_s: float = 0.05, stuck_at: int = -1) -> Iterator[Action]:
    yield Call("broadcast", 88, "main", sizes=((1000,),))
    for batch in range(400):
        if rank:
            yield Peer("recv", rank - 1, 20, "forward")
        if batch == stuck_at and rank == 1:
            yield Work(Phase.OTHER, 22, "stage", LONG_S, is_standing=True)
        yield Work(Phase.FORWARD, 21, "stage", stage_s * (3 if rank == 0 else 1))
        if rank < num_ranks - 1:
            yield Peer("send", rank + 1, 23, "forward")


def test_a_pipeline_whose_first_stage_is_slow_is_healthy() -> None:
    sim = SimCluster(1, 4, program=lambda rank: pipeline(rank, 4))
    sim.run(60)

    assert sim.alarms == []


def test_the_stage_of_a_pipeline_that_stands_is_named_and_no_stage_that_waits_for_it() -> None:
    sim = SimCluster(1, 4, program=lambda rank: pipeline(rank, 4, stuck_at=100))
    sim.run_until(lambda: bool(sim.alarms), 60)
    sim.run(20)

    assert blamed(sim) == {(Cause.STRAGGLER, (1,))}
    (verdict,) = sim.diagnosis.verdicts
    assert verdict.waiting == (0, 2, 3)


def test_a_frozen_stage_of_a_pipeline_is_named_with_those_that_wait_for_it() -> None:
    sim = SimCluster(1, 4, program=lambda rank: pipeline(rank, 4))
    sim.run(10)
    sim.freeze(2)
    sim.run(15)

    assert sim.causes() == {(Cause.FROZEN, (2,))}
    assert set(sim.diagnosis.verdicts[0].waiting) == {0, 1, 3}


def test_a_process_that_a_thread_keeps_from_ending_is_named_with_that_thread() -> None:
    def linger(rank: int) -> Iterator[Action]:
        if rank == 1:
            yield Linger("uploader", 77, LONG_S)

    sim = SimCluster(1, 2, program=then(linger))
    until_named(sim, within_s=16)

    assert sim.causes() == {(Cause.NOT_EXITING, (1,))}
    (verdict,) = sim.diagnosis.verdicts
    assert verdict.exit_wait is not None
    assert verdict.exit_wait.name == "uploader"


@pytest.mark.parametrize("program", one_in(3, [Training(), Training(checkpoint_s=25.0), Training(eval_s=25.0)]))
def test_training_with_its_evaluations_and_checkpoints_raises_no_alarm(program: Training) -> None:
    sim = SimCluster(2, 2, program=program)
    sim.run(60)

    assert sim.alarms == []


def test_a_rank_that_stands_before_the_process_group_is_named_long_before_a_slow_import_is() -> None:
    standing, importing = SimCluster(1, 2), SimCluster(1, 2)
    standing.ranks[1].stands_before_joining = True
    for sim in (standing, importing):
        sim.come_late(1, LONG_S)
        sim.run(20)

    assert standing.causes() == {(Cause.NOT_JOINED, (1,))}
    assert importing.causes() == set()


def test_a_rank_for_which_others_wait_in_a_monitored_barrier_is_named() -> None:
    def meet(rank: int) -> Iterator[Action]:
        if rank == 2:
            yield Work(Phase.OTHER, 30, "download", LONG_S, is_standing=True)
        yield Work(Phase.BARRIER, 31, "meet", LONG_S, is_in_monitored_barrier=True)

    sim = SimCluster(1, 3, program=then(meet))
    took_s = until_named(sim)
    sim.run(20)

    assert blamed(sim) == {(Cause.STRAGGLER, (2,))}
    assert took_s < HANG_S
    (verdict,) = sim.diagnosis.verdicts
    assert (verdict.op, verdict.waiting) == ("monitored_barrier", (0, 1))


def test_the_last_stage_of_a_pipeline_that_comes_last_to_each_barrier_is_no_straggler() -> None:
    def stages(rank: int) -> Iterator[Action]:
        for _ in range(300):
            for _ in range(4):
                if rank:
                    yield Peer("recv", rank - 1, 20, "forward")
                yield Work(Phase.FORWARD, 21, "stage", 0.02)
                if rank < 2:
                    yield Peer("send", rank + 1, 23, "forward")
            yield Call("barrier", 30, "main")

    sim = SimCluster(1, 3, program=stages)
    sim.run(40)

    assert sim.alarms == []


def excluding_last_node(sim: SimCluster) -> None:
    """Let the console watch all nodes but the last one."""
    sim.cluster = Cluster([node.name for node in sim.nodes[:-1]])


def test_a_rank_of_a_host_that_is_not_watched_is_no_longer_starting_once_the_others_have_called_with_it() -> None:
    sim = SimCluster(2, 1)
    excluding_last_node(sim)
    sim.run_to_step(20)

    view = sim.view()
    assert [row.state for row in view.ranks()] == ["running", "unprobed"]
    job = view.job()
    assert job is not None
    assert (sim.causes(), job.state) == (set(), "running")

    sim.nodes[1].is_lost = True
    sim.run(HANG_S)
    (verdict,) = sim.view().verdicts()
    assert (verdict.cause, verdict.culprits, verdict.severity) == (Cause.STRAGGLER, [1], Severity.WARNING)
    assert verdict.text.startswith("rank 1 holds the others up; rank 0 waits for it in all_reduce")
    assert verdict.text.endswith("; no host that is watched here reports it")
    assert verdict.hint == "its host may be off: name it by --host too, or leave --exclude out"


def test_a_rank_of_a_host_that_is_not_watched_may_be_starting_while_the_others_wait_for_it() -> None:
    sim = SimCluster(2, 1)
    excluding_last_node(sim)
    sim.ranks[1].is_blocked = True
    sim.run(8)

    assert [row.state for row in sim.view().ranks()] == ["starting", "starting"]


def test_a_console_that_attaches_late_judges_a_rank_that_stands_as_gravely_as_one_that_has_watched_it() -> None:
    def hang(rank: int) -> Iterator[Action]:
        if rank == 1:
            yield Work(Phase.DATA, 30, "load", LONG_S, is_standing=True)
        yield from steps(1)

    sim = SimCluster(1, 3, program=then(hang))
    until_named(sim)
    sim.run(60)
    cluster, late = Cluster([node.name for node in sim.nodes]), Diagnoser()
    arrived_s, name, frame = sim.heard[-1]
    cluster.apply(name, decode_frame(frame), arrived_s)

    (watched,), (attached,) = sim.diagnosis.verdicts, late.observe(cluster, sim.now_s).verdicts
    assert (attached.cause, attached.culprits, attached.severity) == (Cause.STRAGGLER, (1,), Severity.CRITICAL)
    assert watched.severity is Severity.CRITICAL
