"""Ranks that stand at the same place come together; who is alone comes first, who waits comes last."""

from __future__ import annotations

import pytest

from agent.wire.stacks import RankStacks, StackSource
from app.stacks.groups import NodeStacks, StackPicture, picture_of, stacks_object
from ddpcore.wire_stacks import Frame, PendingCall
from tests.support.stacks import ALL_REDUCE_57, BACKWARD, answer, frozen, in_step, one_frozen, standing, waiting


def grouped(*ranks: RankStacks) -> list[list[int]]:
    return [group.ranks for group in picture_of([answer("n", *ranks)]).groups]


def test_the_odd_one_comes_first_and_those_who_wait_come_last() -> None:
    picture = picture_of(one_frozen())

    assert [group.ranks for group in picture.groups] == [[2], [0, 1, 3]]
    odd, waiters = picture.groups
    assert (odd.example.state, odd.is_waiting) == ("frozen", False)
    assert (waiters.example.state, waiters.example.waits_in) == ("waiting", "all_reduce #57")


def test_a_rank_that_was_frozen_in_the_same_wait_is_not_one_of_those_who_wait() -> None:
    stuck = standing(1, in_step(41, *BACKWARD), ALL_REDUCE_57, state="T")

    assert grouped(waiting(0), stuck, waiting(2)) == [[1], [0, 2]]


def test_small_groups_come_before_large_ones_and_equal_ones_go_by_rank() -> None:
    def at(rank: int, line: int) -> RankStacks:
        return standing(rank, in_step(line))

    assert grouped(at(0, 1), at(1, 1), at(2, 1), at(3, 5), at(4, 5), at(5, 2), at(6, 4)) == [
        [5],
        [6],
        [3, 4],
        [0, 1, 2],
    ]


def test_the_line_of_every_frame_counts() -> None:
    outer = in_step(41)
    outer[1] = Frame(outer[1].file, 89, "main", is_own=True)

    assert grouped(standing(0, in_step(41)), standing(1, in_step(42)), standing(2, outer)) == [[0], [1], [2]]


def test_ranks_in_the_same_line_at_another_count_stand_apart() -> None:
    ahead = standing(1, in_step(41, *BACKWARD), PendingCall("0", 58, "all_reduce"))

    assert grouped(waiting(0), ahead, waiting(2)) == [[1], [0, 2]]


def test_where_a_node_has_its_files_does_not_count() -> None:
    def below(venv: str, home: str) -> list[Frame]:
        library = Frame(f"{venv}/site-packages/torch/x.py", 7, "f")
        return [library, Frame(f"{home}/train.py", 3, "main", is_own=True)]

    here, there = below("/a/lib/python3.11", "/home/a"), below("/opt/v/lib/python3.12", "/scratch")
    assert grouped(standing(0, here), standing(1, there)) == [[0, 1]]


def test_ranks_of_which_nothing_is_to_be_had_stand_together_whatever_is_said_of_each() -> None:
    mute = [RankStacks(rank, StackSource.NONE, note=f"rank-{rank}.stacks.json is cut") for rank in range(3)]
    (group,) = picture_of([answer("n", *mute)]).groups
    assert group.ranks == [0, 1, 2]
    assert len(group.notes) == 3


def test_only_the_oldest_pending_call_counts() -> None:
    further = standing(1, in_step(41, *BACKWARD), ALL_REDUCE_57, PendingCall("0", 58, "all_reduce"))

    assert grouped(waiting(0), further) == [[0, 1]]


def test_a_rank_seen_from_outside_joins_those_who_have_said_the_same_of_themselves() -> None:
    said = in_step(41, *BACKWARD)
    seen = [
        Frame("/usr/lib/libc.so.6", 0, "poll", is_native=True),
        *(Frame(one.file, one.line, one.function.rpartition(".")[2], one.is_own) for one in said[:-1]),
    ]

    assert grouped(standing(0, said), standing(1, seen, source=StackSource.PY_SPY)) == [[0, 1]]


def test_other_threads_do_not_count() -> None:
    lone = RankStacks(1, StackSource.PROBE, threads=standing(1, in_step(41)).threads[:1])

    assert grouped(standing(0, in_step(41)), lone) == [[0, 1]]


def test_ranks_without_a_process_or_without_frames_are_grouped_by_what_is_known() -> None:
    gone = [RankStacks(rank, StackSource.NONE, note="it has ended") for rank in (4, 1)]
    hidden = RankStacks(2, StackSource.KERNEL, kernel=waiting(2).kernel, note="py-spy may not look")

    picture = picture_of([answer("n", waiting(0), *gone, hidden)])

    assert [(group.ranks, group.example.state) for group in picture.groups] == [
        ([2], "running"),
        ([1, 4], "gone"),
        ([0], "waiting"),
    ]


@pytest.mark.parametrize(
    ("frames", "place"),
    [
        (in_step(41, *BACKWARD), ("/home/me/project/train.py", 41)),
        ([Frame("/usr/lib/python3.11/a.py", 1, "f"), Frame("/usr/lib/python3.11/b.py", 2, "main")], ("b.py", 2)),
        ([Frame("/x/libc.so", 0, "poll", is_native=True)], None),
        ([], None),
    ],
    ids=["own", "a library that is run", "native alone", "nothing"],
)
def test_the_place_is_the_users_innermost_line(frames: list[Frame], place: tuple[str, int] | None) -> None:
    (group,) = picture_of([answer("n", standing(0, frames))]).groups

    found = group.place
    assert (found is None) == (place is None)
    if found and place:
        assert (found.file.endswith(place[0]), found.line) == (True, place[1])


def test_a_node_that_does_not_answer_is_told_beside_those_that_do() -> None:
    picture = picture_of([answer("a", waiting(0), took_s=0.5), NodeStacks("b\x1b[2J", None, "no reply in 10 s")])

    assert (picture.troubles, picture.num_nodes, picture.took_s) == (["b\\x1b[2J: no reply in 10 s"], 2, 0.5)
    assert [group.ranks for group in picture.groups] == [[0]]


def test_nothing_at_all_is_a_picture_without_groups() -> None:
    assert picture_of([]) == StackPicture("", 0, 0.0, [], [], [])


def test_the_object_holds_each_group_and_every_thread_of_every_rank() -> None:
    found = stacks_object(picture_of([answer("n", frozen(1), waiting(0))]))

    assert (found["schema"], found["job_id"]) == (1, "train")
    groups, ranks = found["groups"], found["ranks"]
    assert isinstance(groups, list)
    assert isinstance(ranks, list)
    assert [(group["ranks"], group["state"], group["place"]["line"]) for group in groups] == [
        ([1], "frozen", 38),
        ([0], "waiting", 41),
    ]
    assert [(rank["rank"], rank["source"], len(rank["threads"])) for rank in ranks] == [
        (0, "probe", 2),
        (1, "py-spy", 2),
    ]
