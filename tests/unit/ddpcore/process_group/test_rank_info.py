"""What follows from all ranks' cards."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpcore.errors import (
    ContradictoryLaunchError,
    DdpcoreError,
    RanksMissingError,
    StaleRendezvousError,
    UnequalRanksError,
)
from ddpcore.process_group.rank_info import (
    Presence,
    RankInfo,
    Refusal,
    Seat,
    Verdict,
    decode,
    duplicate_text,
    encode,
    error_of,
    judge,
    judge_presences,
    local_places,
    missing_text,
    seats,
    stale_text,
    unknown_claim_text,
    vanished_text,
    who_has_come,
    world_text,
)


def info(rank: int, host: str = "a", **more: Any) -> RankInfo:
    options: dict[str, Any] = {
        "world_size": 4,
        "pid": 100 + rank,
        "machine": f"boot-{host} pid:[1]",
        "started_ticks": 7,
    } | more
    return RankInfo(rank=rank, host=host, **options)


def infos(hosts: str, **more: Any) -> list[RankInfo]:
    return [info(rank, host, address=f"10.0.0.{ord(host)}", **more) for rank, host in enumerate(hosts)]


def test_everything_comes_back_as_it_was_sent() -> None:
    one = info(1, local_rank=0, strict={"torch": "2.13.0"}, soft={"Python": "3.11"}, allows_unequal=True)
    (seat,) = seats([info(0, world_size=1)])
    verdict = Verdict(Refusal.MISSING, "gone", [2], 5.0)

    assert decode(encode(one).encode(), RankInfo) == one
    assert decode(encode(seat).encode(), Seat) == seat
    assert decode(encode(Presence("GPU-1")).encode(), Presence) == Presence("GPU-1")
    assert decode(encode(verdict).encode(), Verdict) == verdict
    assert decode(encode(Verdict()).encode(), Verdict).refusal is None


def test_without_a_launcher_ranks_of_one_machine_are_a_node() -> None:
    placed = [(seat.local_rank, seat.local_world_size, seat.node_rank) for seat in seats(infos("baba"))]

    assert placed == [(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)]


def test_ranks_are_placed_by_their_nodes() -> None:
    assert local_places(["b", "a", "b", "a", "b"]) == [(0, 3, 0), (0, 2, 1), (1, 3, 0), (1, 2, 1), (2, 3, 0)]


def test_containers_of_one_machine_are_nodes_of_their_own() -> None:
    ranks = [info(0, "c1", machine="boot pid:[1]"), info(1, "c2", machine="boot pid:[2]")]

    assert [seat.node_rank for seat in seats(ranks)] == [0, 1]
    assert {seat.num_machines for seat in seats(ranks)} == {2}


def test_what_a_launcher_says_counts() -> None:
    pretended = [info(rank, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2) for rank in range(4)]

    assert [(seat.local_rank, seat.local_world_size, seat.node_rank) for seat in seats(pretended)] == [
        (0, 2, 0),
        (1, 2, 0),
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert judge(pretended) == Verdict()


def test_each_machine_is_told_an_address_of_another() -> None:
    first, second, third = seats(infos("abb"))

    assert first.peer_address == "10.0.0.98"
    assert second.peer_address == third.peer_address == "10.0.0.97"
    assert seats(infos("aa"))[0].peer_address == ""


def test_different_backends_are_a_contradiction() -> None:
    ranks = [info(0, backend="cpu:gloo,cuda:nccl"), info(1, backend="cpu:gloo,cuda:nccl"), info(2, "b", backend="gloo")]

    verdict = judge(ranks)

    assert verdict.refusal is Refusal.CONTRADICTION
    assert (
        "the ranks would use different backends; backend differs: cpu:gloo,cuda:nccl on ranks 0-1 (a), "
        "gloo on rank 2 (b)"
    ) in verdict.text


def test_one_local_rank_twice_on_a_machine_is_a_contradiction() -> None:
    verdict = judge([info(0, local_rank=0), info(1, "b", local_rank=0), info(2, "b", local_rank=0), info(3)])

    assert verdict.text.startswith("rank 1 (pid 101 on b) and rank 2 (pid 102 on b) both have LOCAL_RANK=0")


def test_different_code_is_refused_unless_it_is_allowed() -> None:
    ranks = [info(0, strict={"torch": "2.13.0"}), info(1, "b", strict={"torch": "2.12.1"}, soft={"Python": "3.12"})]

    verdict = judge(ranks)

    assert verdict.refusal is Refusal.UNEQUAL
    assert verdict.differences == ["torch differs: 2.13.0 on rank 0 (a), 2.12.1 on rank 1 (b)"]

    allowed = [info(0, strict={"torch": "2.13.0"}, allows_unequal=True), ranks[1]]
    assert judge(allowed).refusal is None
    assert judge(allowed).differences == [
        "Python differs: nothing on rank 0 (a), 3.12 on rank 1 (b)",
        "torch differs: 2.13.0 on rank 0 (a), 2.12.1 on rank 1 (b)",
    ]


def test_what_may_differ_refuses_nothing() -> None:
    ranks = [info(0, strict={"torch": "2.13.0"}), info(1, "b", strict={"torch": "2.13.0"}, soft={"Python": "3.12"})]

    assert judge(ranks) == Verdict(differences=["Python differs: nothing on rank 0 (a), 3.12 on rank 1 (b)"])


def test_one_gpu_for_two_ranks_is_a_contradiction() -> None:
    ranks = infos("aab")
    shared = [Presence("GPU-1"), Presence("GPU-1"), Presence("GPU-2")]

    assert judge_presences(ranks, [Presence("GPU-1"), Presence("GPU-3"), Presence("GPU-2")]) == Verdict()
    assert judge_presences(ranks, [Presence()] * 3) == Verdict()
    verdict = judge_presences(ranks, shared)
    assert verdict.refusal is Refusal.CONTRADICTION
    assert "rank 0 (pid 100 on a) and rank 1 (pid 101 on a) would use one GPU, GPU-1" in verdict.text


def test_a_process_is_told_from_another_with_its_number() -> None:
    assert info(0).is_process_of(info(0, world_size=8))
    assert not info(0).is_process_of(info(0, started_ticks=8))


def test_lines_for_people() -> None:
    where, path = "file:///shared/meet", "/shared/meet"
    old = info(1, joined_at="at 2026-01-01 00:00:00 UTC")

    assert duplicate_text(old, info(1, "b"), where).startswith(
        "two processes claim rank 1 at file:///shared/meet: rank 1 (pid 101 on a), at 2026-01-01 00:00:00 UTC, was "
        "there before pid 101 on b: "
    )
    assert "another rank 1 was there before" in duplicate_text(None, info(1), where)
    assert "Remove it (rm /shared/meet) and start all ranks again" in stale_text(old, where, path)
    assert "End all ranks and start them again" in stale_text(old, "tcp://gpu1:4711", "")
    assert "remove the file (rm /shared/meet)" in unknown_claim_text(old, info(1, "b"), where, path)
    assert "end all ranks" in unknown_claim_text(old, info(1, "b"), "tcp://gpu1:4711", "")
    assert "in a world of 4, rank 1 (pid 101 on b) in a world of 3" in world_text(
        old, info(1, "b", world_size=3), where
    )
    assert missing_text([1], [info(0)], where, 60).startswith(
        "rank 1 of 2 has not come to file:///shared/meet in 60 s; rank 0 (pid 100 on a) is there. Look at how it was"
    )
    assert "ranks 0-1 of 2 have not come to" in missing_text([0, 1], [], where, 60)
    assert "nobody is there" in missing_text([0, 1], [], where, 60)
    assert vanished_text([info(2)], where, 60).startswith("rank 2 (pid 102 on a) had come to file:///shared/meet, and")


def test_many_ranks_are_told_by_their_machines() -> None:
    assert who_has_come(infos("a" * 9 + "b" * 3)) == "ranks 0-8 on a, ranks 9-11 on b"


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        (Verdict(Refusal.MISSING, "missing", [2, 3], 60.0), RanksMissingError),
        (Verdict(Refusal.STALE, "stale"), StaleRendezvousError),
        (Verdict(Refusal.UNEQUAL, "unequal", differences=["torch differs"]), UnequalRanksError),
        (Verdict(Refusal.CONTRADICTION, "contradiction"), ContradictoryLaunchError),
        (Verdict(Refusal.FAILED, "failed"), ContradictoryLaunchError),
    ],
)
def test_a_verdict_is_raised_as_what_it_is(verdict: Verdict, kind: type[DdpcoreError]) -> None:
    error = error_of(verdict)

    assert type(error) is kind
    assert str(error) == verdict.text
    if isinstance(error, RanksMissingError):
        assert (error.missing, error.timeout_s) == ([2, 3], 60.0)
    if isinstance(error, UnequalRanksError):
        assert error.differences == ["torch differs"]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_places_number_each_node_s_ranks_and_the_nodes_without_gaps(hosts: list[str]) -> None:
    placed = seats(infos("".join(hosts)))

    for host in set(hosts):
        mine = [seat for seat, other in zip(placed, hosts, strict=True) if other == host]
        assert [seat.local_rank for seat in mine] == list(range(len(mine)))
        assert {seat.local_world_size for seat in mine} == {len(mine)}
        assert len({seat.node_rank for seat in mine}) == 1
    assert {seat.node_rank for seat in placed} == set(range(len(set(hosts))))
    assert {seat.num_machines for seat in placed} == {len(set(hosts))}
    assert judge(infos("".join(hosts))) == Verdict()


def test_of_very_many_machines_the_first_are_told() -> None:
    told = who_has_come([info(rank, f"h{rank}") for rank in range(12)])

    assert told.endswith("rank 7 on h7, and those on 4 more hosts")
