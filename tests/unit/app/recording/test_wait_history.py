"""The last waits are kept with who waited how long and for whom, each once, however its reports come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.diagnosis.causes import Severity
from app.recording.history import History
from app.recording.wait_history import MAX_WAITS, MIN_WAIT_S, WaitHistory
from tests.support.sim import SimCluster
from tests.support.sim_program import Call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.recording.wait_history import PastWait

LOOK_S = 0.2
TRAINING_S = 12.0


class Watched:
    """A simulated training of which a history is kept."""

    def __init__(self, **how: float) -> None:
        self.sim = SimCluster(num_nodes=2, ranks_per_node=2, **how)  # type: ignore[arg-type]
        self.history = History()
        self.play(TRAINING_S)

    def play(self, seconds: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.sim.run(LOOK_S)
            self.history.observe(self.sim.view())

    def hold_up(self, rank: int, seconds: float) -> None:
        self.sim.freeze(rank)
        self.play(seconds)
        self.sim.thaw(rank)
        self.play(2)

    @property
    def over(self) -> Sequence[PastWait]:
        assert self.history.shown is not None
        return self.history.shown.waits.over


def test_a_wait_that_is_over_is_kept_with_who_was_waited_for_and_how_long_each_waited() -> None:
    watched = Watched()
    watched.hold_up(2, 3)

    (past,) = watched.over
    assert (past.row.op, past.row.missing, past.shown_row.waiting) == ("all_reduce", [2], [0, 1, 3])
    assert past.ranks.tolist() == [0, 1, 3]
    assert [past.is_missing(rank) for rank in range(4)] == [False, False, True, False]
    assert past.waited_by(2) == past.waited_by(99) == 0
    for rank in (0, 1, 3):
        assert past.waited_by(rank) == pytest.approx(2.9, abs=0.5)
    assert past.row.severity is Severity.CRITICAL, "it was a verdict while it stood"
    assert watched.sim.now_s - past.seen_s == pytest.approx(2, abs=0.6)


def test_who_was_in_another_call_is_known_of_a_wait_that_is_over() -> None:
    watched = Watched()
    watched.sim.mismatch(1, Call("broadcast", 18, "main", sizes=((3,),)))
    watched.play(3)
    for rank in range(4):
        watched.sim.kill(rank)
    watched.play(3)

    past = watched.over[-1].shown_row
    assert (past.op, past.in_this_call) == ("all_reduce", [0, 2, 3])
    assert past.other_calls_text == "rank 1 calls broadcast"


def test_a_healthy_training_has_no_waits_worth_keeping() -> None:
    watched = Watched()
    watched.play(20)

    assert list(watched.over) == []


def test_a_wait_that_stands_is_not_over() -> None:
    watched = Watched()
    watched.sim.freeze(1)
    watched.play(5)
    assert list(watched.over) == []

    watched.sim.thaw(1)
    watched.play(2)
    assert [past.row.missing for past in watched.over] == [[1]]


def test_waits_come_in_their_order_and_the_oldest_go_first() -> None:
    watched = Watched()
    for rank in (3, 0, 3):
        watched.hold_up(rank, 1.5)

    assert [past.row.missing for past in watched.over] == [[3], [0], [3]]
    assert [past.row.seq for past in watched.over] == sorted(past.row.seq for past in watched.over)


def test_a_wait_is_kept_once_though_reports_are_lost() -> None:
    watched = Watched(drop=0.3)
    watched.hold_up(2, 8)

    assert len({past.key for past in watched.over}) == len(watched.over)
    assert max(watched.over, key=lambda past: past.row.waited_s).row.missing == [2]


def test_after_a_cut_of_the_network_nobody_who_waited_was_waited_for() -> None:
    watched = Watched()
    watched.sim.cut_network()
    watched.play(2)
    watched.sim.lose_node(1)
    watched.play(12)
    watched.sim.return_node(1)
    watched.play(3)
    watched.sim.mend_network()
    watched.play(3)

    assert max(past.row.waited_s for past in watched.over) > 15
    for past in watched.over:
        assert set(past.row.missing).isdisjoint(past.ranks.tolist())
        assert bool(past.row.missing) or not past.row.missing_where


def test_no_more_are_kept_than_are_told() -> None:
    sim = SimCluster(num_nodes=1, ranks_per_node=2)
    sim.run(TRAINING_S)
    history = WaitHistory()
    for _ in range(MAX_WAITS + 8):
        sim.freeze(1)
        for _ in range(8):
            sim.run(LOOK_S)
            history.observe(sim.view(), "demo")
        sim.thaw(1)
        for _ in range(3):
            sim.run(LOOK_S)
            history.observe(sim.view(), "demo")

    assert len(history.over) == MAX_WAITS
    assert all(past.row.waited_s >= MIN_WAIT_S for past in history.over)


def test_waits_of_another_job_are_not_its_own() -> None:
    sim = SimCluster()
    sim.run(TRAINING_S)
    sim.freeze(1)
    history = WaitHistory()
    for _ in range(20):
        sim.run(LOOK_S)
        history.observe(sim.view(), "another")
    sim.thaw(1)
    sim.run(2)
    history.observe(sim.view(), "another")

    assert list(history.over) == []


def test_a_frozen_picture_keeps_its_waits() -> None:
    watched = Watched()
    watched.hold_up(2, 2)
    still = watched.history.still()
    watched.hold_up(1, 2)

    assert still.shown is not None
    assert [past.row.missing for past in still.shown.waits.over] == [[2]]
    assert [past.row.missing for past in watched.over] == [[2], [1]]
