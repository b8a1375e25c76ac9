"""Several process groups in a simulated cluster, whose calls ranks await at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause
from ddpcore.wire import Phase
from tests.support.sim import SimCluster
from tests.support.sim_program import Action, BeginStep, Call, EndStep, Work

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
