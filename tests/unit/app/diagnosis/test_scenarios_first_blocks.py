"""Blocks that one rank runs first: who waits there is a victim, and only the one that goes first can be to blame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause, RankState, Severity
from ddpcore.wire import Phase
from tests.support.sim import SimCluster
from tests.support.sim_program import FirstBlock, Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.sim_program import Action

NODES = ((0, 1), (2, 3))


def states(sim: SimCluster) -> list[RankState]:
    return [row.state for row in sim.view().ranks()]


def test_the_others_are_shown_waiting_for_the_master_under_the_block_s_name() -> None:
    sim = SimCluster(program=FirstBlock(prepare_s=[60.0]))
    sim.run_until(lambda: bool(sim.view().barriers()), 20, "a wait")
    sim.run(1)

    (row,) = sim.view().barriers()
    assert (row.op, row.label, row.waiting, row.missing) == ("barrier", "first: corpus", [1, 2, 3], [0])
    assert row.where == "bytegpt.py:31 in prepare"
    assert row.missing_where == "bytegpt.py:30 in tokenize"
    assert row.text.startswith('ranks 1-3 wait in barrier "first: corpus" #1 for rank 0, ')
    assert states(sim) == [RankState.MISSING, RankState.WAITING, RankState.WAITING, RankState.WAITING]


def test_a_master_that_takes_long_is_named_with_a_warning_and_nobody_else() -> None:
    sim = SimCluster(program=FirstBlock(prepare_s=[40.0]))
    sim.run(20)

    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits, verdict.waiting) == (Cause.STRAGGLER, [0], [1, 2, 3])
    assert verdict.severity is Severity.WARNING
    assert "prepares something that the others wait for" in verdict.hint
    sim.run(45)
    assert {culprits for _, _, culprits in sim.told} == {(0,)}
    assert sim.verdicts() == []


class Moving(FirstBlock):
    """Its first one goes from line to line, eight seconds at each."""

    def __call__(self, rank: int) -> Iterator[Action]:
        for action in super().__call__(rank):
            if isinstance(action, Work) and action.function == "tokenize":
                yield from (Work(Phase.DATA, line, "tokenize", 8.0) for line in (27, 28, 29, 30))
            else:
                yield action


def test_a_master_that_goes_from_line_to_line_or_stands_shortly_is_no_warning() -> None:
    for program in (FirstBlock(prepare_s=[9.0], late=[(0, 4.0)]), Moving(prepare_s=[32.0])):
        sim = SimCluster(program=program)
        severities = set()
        while sim.elapsed_s < 42:
            sim.run(1)
            severities |= {verdict.severity for verdict in sim.verdicts()}
        assert severities == {Severity.QUIET}, "it is said, and is no warning"


def test_a_rank_that_has_not_come_to_the_block_holds_nobody_up_there() -> None:
    sim = SimCluster(program=FirstBlock(prepare_s=[60.0], late=[(3, 50.0)]))
    sim.run(20)

    (row,) = sim.view().barriers()
    assert (row.waiting, row.missing) == ([1, 2], [0])
    assert {culprits for _, _, culprits in sim.told} == {(0,)}


def test_each_node_waits_for_its_own_first_rank() -> None:
    groups: dict[str, tuple[int, ...]] = {FirstBlock(NODES).group_of(first)[0]: (first, first + 1) for first in (0, 2)}
    sim = SimCluster(program=FirstBlock(NODES, prepare_s=[60.0]), groups=groups)
    sim.run(8)

    rows = sorted(sim.view().barriers(), key=lambda row: row.waiting)
    assert [(row.waiting, row.missing) for row in rows] == [([1], [0]), ([3], [2])]


def test_a_frozen_master_is_the_culprit_and_a_frozen_follower_is_not_held_against_the_wait() -> None:
    sim = SimCluster(program=FirstBlock(prepare_s=[600.0]))
    sim.run_until(lambda: [row.waiting for row in sim.view().barriers()] == [[1, 2, 3]], 20, "a wait")
    sim.freeze(0)
    sim.freeze(3)
    sim.run(2)

    waiting = {tuple(verdict.culprits): verdict.waiting for verdict in sim.verdicts()}
    assert waiting == {(0,): [1, 2, 3], (3,): []}
    assert {verdict.cause for verdict in sim.verdicts()} == {Cause.FROZEN}


def test_a_killed_master_is_named_with_its_victims() -> None:
    sim = SimCluster(program=FirstBlock(prepare_s=[600.0]), hangs_on_death=True)
    sim.run_until(lambda: [row.waiting for row in sim.view().barriers()] == [[1, 2, 3]], 20, "a wait")
    sim.kill(0)
    sim.run(3)

    (verdict,) = sim.verdicts()
    assert (verdict.cause, verdict.culprits) == (Cause.EXITED, [0])
    # Rank 1 may be ended by the launcher that they share before it is seen to wait for the dead one.
    assert {2, 3} <= set(verdict.waiting) <= {1, 2, 3}


def test_blocks_that_are_short_and_repeated_are_nobody_s_fault() -> None:
    """They are most of what this program does: it is slow for its input, and that is nobody's fault."""
    sim = SimCluster(program=FirstBlock(prepare_s=[0.002] * 2000))
    sim.run(60)

    assert {(cause, culprits) for _, cause, culprits in sim.told} == {(Cause.INPUT_BOUND, ())}
