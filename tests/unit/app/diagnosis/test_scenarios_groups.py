"""Several process groups in a simulated cluster, whose calls ranks await at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.diagnosis.causes import Cause
from ddpcore.wire import Phase
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, WaitBehind, Work

if TYPE_CHECKING:
    from collections.abc import Iterator


def steps(first: int, last: int, group: str = "0") -> Iterator[Action]:
    for step in range(first, last + 1):
        yield BeginStep(step)
        yield Work(Phase.FORWARD, 138, "train_step", 0.1)
        yield Call("all_reduce", 142, "train_step", group, sizes=((1000,),), phase=Phase.BACKWARD)
        yield EndStep(step, 1.0, 0)


def test_of_culprits_in_different_groups_it_is_told_how_long_others_wait() -> None:
    groups: dict[str, tuple[int, ...]] = {"a": (0, 1, 2), "b": (3, 4, 5)}
    sim = SimCluster(1, 6, groups=groups, program=lambda rank: steps(1, 999, "a" if rank < 3 else "b"))
    sim.run_to_step(20)
    sim.freeze(1)
    sim.freeze(4)
    sim.run(8)

    (row,) = sim.view().verdicts()
    assert (row.cause, row.culprits) == (Cause.FROZEN, [1, 4])
    assert "; ranks 0, 2-3, 5 wait for them for 7." in row.text


def test_of_culprits_in_different_groups_the_verdict_stays_while_those_that_time_out_end() -> None:
    def program(rank: int) -> Iterator[Action]:
        if rank in (1, 4):
            yield Work(Phase.OTHER, 30, "read", 3600.0, is_standing=True)
        yield Call("all_reduce", 50, "meet", "a" if rank < 3 else "b", sizes=((10,),))

    groups: dict[str, tuple[int, ...]] = {"a": (0, 1, 2), "b": (3, 4, 5)}
    sim = SimCluster(1, 6, groups=groups, program=program, timeout_s=12.0, seed=1)
    sim.run(40)

    assert [culprits for _, _, culprits in sim.told].count((1, 4)) == 1
    assert sim.causes() == {(Cause.STRAGGLER, (1, 4))}


SAVE = Call("all_gather", 50, "save", "save", sizes=((10,),), is_behind=True)


@pytest.mark.parametrize(("pause_s", "named"), [(7.0, []), (3600.0, [(Cause.STRAGGLER, (1,))])])
def test_a_rank_that_pauses_while_threads_wait_for_a_slow_saver_contradicts_nobody(
    pause_s: float, named: list[tuple[Cause, tuple[int, ...]]]
) -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        if rank != 3:
            yield SAVE
        yield from steps(1, 80)
        if rank == 1:
            yield Work(Phase.DATA, 30, "next", pause_s, is_standing=True)
        yield from steps(81, 120)
        if rank == 3:
            yield SAVE
        yield from steps(121, 9999)

    sim = SimCluster(2, 2, program=program, groups={"save": (0, 1, 2, 3)})
    sim.run(40)

    assert [(cause, culprits) for _, cause, culprits in sim.alarms] == named
    assert sim.causes() == set(named)
    assert all("ranks 0, 2-3 wait for it in all_reduce #82" in row.text for row in sim.verdicts())


def test_ranks_that_make_steps_before_they_wait_for_a_call_wait_in_it_then() -> None:
    def program(rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((1000,),))
        if rank != 3:
            yield SAVE
        yield from steps(1, 80)
        yield Work(Phase.DATA, 30, "next", 3600.0, is_standing=True) if rank == 3 else WaitBehind(51, "save")

    sim = SimCluster(2, 2, program=program, groups={"save": (0, 1, 2, 3)})
    sim.run(40)

    (row,) = sim.verdicts()
    assert (row.cause, row.culprits) == (Cause.STRAGGLER, [3])
    assert "; ranks 0-2 wait for it in all_gather #1 of group save for " in row.text
