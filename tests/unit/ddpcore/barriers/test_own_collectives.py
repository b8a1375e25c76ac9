"""What a rank tells of the collective that it stands in."""

from __future__ import annotations

from typing import Any, cast

import pytest

from ddpcore.barriers.own_collectives import OwnCollectives
from ddpcore.probe.samples import GroupMembers, RecorderDump, RecorderEntry

C10D = "/site-packages/torch/distributed/distributed_c10d.py"
DDP = "/site-packages/torch/nn/parallel/distributed.py"
RANKS = (4, 5, 6, 7)


class OneCall:
    """A recorder with one collective under way in one group."""

    def __init__(self, op: str, members: GroupMembers, backend: str = "gloo") -> None:
        self._entry = RecorderEntry((backend, 0), "7", 3, f"{backend}:{op}", ((4,),), is_p2p=False, is_retired=False)
        self._members = members

    def dump(self) -> RecorderDump:
        return RecorderDump([self._entry], {})

    def members(self) -> dict[str, GroupMembers]:
        return {"7": self._members}


def needed(rank: int, op: str, frame: tuple[str, str], members: GroupMembers, backend: str = "gloo") -> tuple[int, ...]:
    own = OwnCollectives(rank, cast("Any", OneCall(op, members, backend)))
    wait = own.blocking([(frame[0], 1, frame[1])], None)
    assert wait is not None
    assert (wait.label, wait.count, wait.ranks) == (op, 3, members.ranks)
    return wait.needed


BUFFERS = (DDP, "_distributed_broadcast_coalesced")


def test_in_ddp_s_broadcast_a_rank_waits_for_its_neighbours_in_gloo_s_tree() -> None:
    members = GroupMembers(RANKS)
    assert [needed(rank, "broadcast", BUFFERS, members) for rank in RANKS] == [(5, 6), (4, 7), (4,), (4, 5)]


def test_with_nccl_only_the_source_is_waited_for() -> None:
    members = GroupMembers(RANKS)
    assert [needed(rank, "broadcast", BUFFERS, members, "nccl") for rank in RANKS] == [(), (4,), (4,), (4,)]


def test_where_the_source_or_the_order_of_ranks_is_not_known_nobody_is_waited_for() -> None:
    assert needed(4, "broadcast", (C10D, "broadcast"), GroupMembers(RANKS)) == ()
    assert needed(4, "broadcast", BUFFERS, GroupMembers(RANKS, is_sorted=False)) == ()


def test_of_two_ranks_each_waits_for_the_other() -> None:
    for is_sorted in (True, False):
        assert needed(4, "broadcast", (C10D, "broadcast"), GroupMembers((4, 5), is_sorted=is_sorted)) == (5,)


@pytest.mark.parametrize("function", ["recv", "send", "monitored_barrier", "init_process_group"])
def test_who_stands_in_what_the_recorder_does_not_hold_is_not_blocked_by_a_collective_behind_it(function: str) -> None:
    own = OwnCollectives(4, cast("Any", OneCall("all_reduce", GroupMembers(RANKS))))
    assert own.blocking([(C10D, 1, function)], None) is None
    assert own.blocking([(C10D, 1, "all_reduce")], None) is not None
