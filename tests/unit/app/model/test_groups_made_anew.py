"""Groups of a default group that was destroyed: c10d gives their names to those of the next one."""

from __future__ import annotations

from tests.support.node_reports import group_report
from tests.unit.app.diagnosis.test_diagnosis import Watched


def test_a_group_of_the_same_name_and_other_members_is_refused() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(100, group="1", ranks=[0, 1])) for rank in (0, 1)])
    watched.receive(*[watched.tick(rank, group_report(1, group="1", ranks=[0, 2])) for rank in (0, 2)])

    assert watched.cluster.jobs["job"].groups["1"].enqueued.tolist() == [100, 100]


def test_the_groups_of_the_last_two_default_groups_are_kept() -> None:
    watched = Watched()
    for number in range(1, 6):
        pair = group_report(3, group=f"1#{number}" if number > 1 else "1", ranks=[0, 1])
        watched.receive(*[watched.tick(rank, group_report(7), pair) for rank in (0, 1)])

    assert sorted(watched.cluster.jobs["job"].groups) == ["0", "1#4", "1#5"]


def test_a_rank_that_makes_no_call_in_its_second_group_is_the_missing_one() -> None:
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(100, group="1", ranks=[0, 1])) for rank in (0, 1)])
    watched.now_s += 20.0

    first = watched.tick(0, group_report(1, 9.0, group="1#2", ranks=[0, 1]))
    (wait,) = watched.receive(first, watched.tick(1, group_report(0))).waits

    assert (wait.waiting.tolist(), wait.missing.tolist()) == ([0], [1])
