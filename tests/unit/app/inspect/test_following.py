"""Looks at the same processes, one after the other, are joined; a job stays the one it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from app.inspect.comparison import Kind, standing_of
from app.inspect.following import MAX_LOOKS, MIN_LOOKS, SURE_LOOKS, Following, job_now
from app.inspect.seen import HostSeen, SeenFrame, SeenJob
from tests.support.seen_ranks import WAITS, at, rank

if TYPE_CHECKING:
    from app.inspect.comparison import Standing
    from app.inspect.seen import SeenRank


class House:
    """A host that is looked at again and again."""

    def __init__(self) -> None:
        self.following = Following()
        self.now_s = 0.0

    def show(self, *ranks: SeenRank, **fields: Any) -> SeenJob:
        """Let a look show ranks, each with its last look alone, and return the job."""
        self.now_s += 1.0
        looks = [[msgspec.structs.replace(one.looks[-1], at_s=self.now_s, **fields)] for one in ranks]
        seen = [msgspec.structs.replace(one, looks=its) for one, its in zip(ranks, looks, strict=True)]
        self.following.put("h1", HostSeen(seen, {}, "ada", is_root=False, yama=None))
        return self.following.jobs({})[0]

    def stand(self, stack: list[SeenFrame], times: int, **fields: Any) -> Standing:
        jobs = [self.show(rank(0, stack), **fields) for _ in range(times)]
        return standing_of(jobs[-1].ranks[0])


def test_a_rank_that_stands_is_seen_longer_with_each_look() -> None:
    house = House()
    assert house.stand(WAITS, 1).seen_s == 0.0
    assert house.stand(WAITS, 9).seen_s == 9.0
    assert house.stand(WAITS, 2 * MAX_LOOKS).seen_s == MAX_LOOKS - 1, "the oldest looks are forgotten"


def test_a_rank_moves_for_as_long_as_its_last_looks_differ() -> None:
    house = House()
    moving = [house.stand(at(14, step), 1) for step in range(10, 20)][-1]
    assert moving.is_moving
    assert len(moving.rank.looks) == MIN_LOOKS
    assert house.stand(WAITS, 1).is_moving
    standing = house.stand(WAITS, MIN_LOOKS - 1)
    assert not standing.is_moving
    assert (standing.kind, standing.seen_s) == (Kind.WAITS, MIN_LOOKS - 1)


def test_a_rank_that_stays_within_one_function_is_seen_longer_with_each_look_until_it_stands() -> None:
    house = House()
    looping = [house.stand(at(line), 1) for line in (14, 15, 15, 15, 16) * 8][-1]
    assert (looping.is_in_loop, looping.seen_s) == (True, 39.0)
    standing = house.stand(at(16), SURE_LOOKS - 1)
    assert (standing.is_moving, standing.seen_s) == (False, SURE_LOOKS - 1)


def test_a_loop_with_a_short_one_within_is_seen_longer_with_each_look() -> None:
    house = House()
    stacks = [[SeenFrame("/home/u/load.py", 3 + i % 2, "parse", {"i": i}), *at(9)] for i in (1, 4, 3, 5, 6) * 4]
    looping = [house.stand(stack, 1) for stack in stacks]
    assert (looping[-1].is_in_loop, looping[-1].seen_s) == (True, 19.0)


def test_a_rank_that_came_back_to_its_line_has_moved() -> None:
    house = House()
    last = [house.stand(WAITS, 1, switches=100 * count) for count in range(20)][-1]
    assert last.is_moving, "its main thread has run"
    assert len(last.rank.looks) == MIN_LOOKS
    assert not house.stand(WAITS, MIN_LOOKS, switches=1900).is_moving


def test_another_process_under_the_same_pid_has_no_past() -> None:
    house = House()
    house.show(rank(0, WAITS, start=1))
    job = house.show(rank(0, WAITS, start=2))
    assert len(job.ranks[0].looks) == 1


def test_a_rank_that_is_gone_is_kept_as_ended() -> None:
    house = House()
    before = house.show(rank(0, WAITS), rank(1, at(14)))
    now = job_now(before, [house.show(rank(0, WAITS))])
    assert [standing_of(one).kind for one in now.ranks] == [Kind.WAITS, Kind.ENDED]
    assert standing_of(now.ranks[1]).place == standing_of(before.ranks[1]).place
    over = job_now(now, [])
    assert [standing_of(one).kind for one in over.ranks] == [Kind.ENDED, Kind.ENDED]


def test_a_job_that_its_launcher_has_restarted_is_the_same_one() -> None:
    house = House()
    before = house.show(rank(0, WAITS), rank(1, WAITS))
    now = job_now(before, [house.show(rank(0, WAITS, pid=7), rank(1, WAITS, pid=8))])
    assert [one.pid for one in now.ranks] == [7, 8]


def test_another_job_of_the_same_kind_on_another_host_is_not_taken_for_it() -> None:
    before = House().show(rank(0, WAITS), rank(1, WAITS))
    other = SeenJob("k", "torchrun", 4, [rank(0, WAITS, pid=9, host="h9")])
    assert [standing_of(one).kind for one in job_now(before, [other]).ranks] == [Kind.ENDED] * 2


def test_ranks_of_spawn_keep_their_numbers_when_one_is_gone() -> None:
    house = House()
    before = house.show(*(rank(number, WAITS, how="spawn") for number in range(3)))
    left = [rank(0, WAITS, how="spawn"), rank(1, WAITS, how="spawn", pid=102)]
    now = job_now(before, [house.show(*left)])
    assert [(one.rank, one.pid, standing_of(one).kind) for one in now.ranks] == [
        (0, 100, Kind.WAITS),
        (1, 101, Kind.ENDED),
        (2, 102, Kind.WAITS),
    ]
