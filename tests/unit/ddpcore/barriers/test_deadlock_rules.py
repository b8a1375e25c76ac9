"""Which waits are given up before their time: only those whose time-out is certain."""

from __future__ import annotations

import pytest

from ddpcore.barriers.arrivals import barrier_key, go_key, readers_key, value_key
from ddpcore.barriers.deadlock_check import OwnCalls, gives_up_first, needs, never_text
from ddpcore.barriers.own_collectives import gloo_tree
from ddpcore.barriers.rank_status import BarrierKind, Call, RankHeartbeat, Sighting, Wait
from ddpcore.wire import Place

GATES = [BarrierKind.BARRIER, BarrierKind.EXCHANGE]


CALLS = {(BarrierKind.BARRIER, "epoch"): 2, (BarrierKind.EXCHANGE, "epoch"): 2}
FINISHED = {(BarrierKind.FIRST, "corpus"): 1, (BarrierKind.LOCAL_FIRST, "corpus"): 1}
OWN = OwnCalls(lambda *call: CALLS.get(call, 0), lambda *call: FINISHED.get(call, 0), lambda group: 2 * (group == "0"))
"""Of rank 0, which has called everything twice, and finished one block."""


def is_needed(wait: Wait, rank: int = 0) -> bool:
    return needs(wait, rank, OWN)


@pytest.mark.parametrize("kind", GATES)
def test_a_gate_that_this_rank_has_not_come_to_needs_it_and_one_it_has_passed_or_given_up_does_not(
    kind: BarrierKind,
) -> None:
    assert is_needed(Wait(kind, "epoch", 3))
    assert not is_needed(Wait(kind, "epoch", 2))


@pytest.mark.parametrize("kind", [BarrierKind.FIRST, BarrierKind.LOCAL_FIRST])
def test_a_first_block_needs_its_master_until_that_has_finished_it(kind: BarrierKind) -> None:
    assert is_needed(Wait(kind, "corpus", 2, master=0))
    assert not is_needed(Wait(kind, "corpus", 1, master=0))
    assert not is_needed(Wait(kind, "corpus", 2, master=4))


def test_a_collective_needs_its_members_that_have_not_called_it() -> None:
    assert is_needed(Wait(BarrierKind.COLLECTIVE, "all_reduce", 3, group="0"))
    assert is_needed(Wait(BarrierKind.COLLECTIVE, "all_reduce", 3, group="0", ranks=(0, 2)))
    assert not is_needed(Wait(BarrierKind.COLLECTIVE, "all_reduce", 3, group="0", ranks=(1, 2)))
    assert not is_needed(Wait(BarrierKind.COLLECTIVE, "all_reduce", 2, group="0"))


def test_a_broadcast_needs_only_those_of_whom_that_is_certain_and_that_have_not_called_it() -> None:
    assert not is_needed(Wait(BarrierKind.COLLECTIVE, "broadcast", 3, group="0"))
    assert not is_needed(Wait(BarrierKind.COLLECTIVE, "broadcast", 3, group="0", needed=(1, 2)))
    assert not is_needed(Wait(BarrierKind.COLLECTIVE, "broadcast", 2, group="0", needed=(0,)))
    assert is_needed(Wait(BarrierKind.COLLECTIVE, "broadcast", 3, group="0", needed=(0, 2)))


def test_in_gloo_s_broadcast_a_rank_waits_for_all_above_it_and_for_those_right_below() -> None:
    # Measured with torch 2.13: who stood while one rank did not come.
    assert [gloo_tree(place, 2) for place in range(2)] == [[1], [0]]
    assert [gloo_tree(place, 4) for place in range(4)] == [[1, 2], [0, 3], [0], [0, 1]]
    assert [sorted(place for place in range(8) if absent in gloo_tree(place, 8)) for absent in (4, 5)] == [[0], [1]]


def wait(timeout_s: float | None, left_s: float | None) -> Wait:
    return Wait(BarrierKind.BARRIER, "epoch", 1, timeout_s=timeout_s, left_s=left_s)


def test_of_two_waits_the_shorter_one_is_given_up_so_that_the_program_may_go_on_to_the_other() -> None:
    assert gives_up_first(wait(0.3, 0.1), wait(60.0, 50.0))
    assert not gives_up_first(wait(60.0, 50.0), wait(0.3, 0.1))
    assert gives_up_first(wait(60.0, 50.0), wait(60.0, 20.0))
    assert not gives_up_first(wait(None, None), wait(60.0, 20.0))


def test_of_two_long_waits_both_are_given_up() -> None:
    assert gives_up_first(wait(None, None), wait(1800.0, 1700.0))
    assert gives_up_first(wait(1800.0, 1700.0), wait(None, None))


def test_a_collective_cannot_be_given_up_so_the_gate_is() -> None:
    assert gives_up_first(wait(1800.0, 1700.0), Wait(BarrierKind.COLLECTIVE, "all_reduce", 3, group="0"))


def test_the_words_name_who_never_comes_and_who_waits_with_counts_and_lines() -> None:
    mine = Wait(BarrierKind.BARRIER, "epoch", 2, place=Place("/home/user/train.py", 20, "main"))
    call = Call(BarrierKind.BARRIER, "epoch", 1, Place("/home/user/train.py", 12, "main"))
    gone = Sighting(RankHeartbeat(9.0, 2.0, "node-1", "m", 7, 8, calls=(call,), has_left=True))

    assert never_text(mine, 0, {1: gone}) == (
        "barrier 'epoch' can never be passed: rank 1 has ended after 1 call of barrier 'epoch' "
        "(the last at train.py:12 in main); rank 0 waits in its 2nd call of barrier 'epoch' at train.py:20 in main"
    )
    block = Wait(BarrierKind.FIRST, "corpus", 1, master=1)
    assert never_text(block, 0, {1: gone}).startswith(
        "first 'corpus' can never end: rank 1 has ended without a call of"
    )


def test_no_two_gates_share_a_key() -> None:
    labels = ["epoch", "epoch|go", "1/epoch", "e" * 201, "e" * 202, "\xfc", ""]
    named_barriers = [
        f"{start}{number}{end}"
        for kind in BarrierKind
        for scope in ("", "0@node")
        for label in labels
        for start, end in [barrier_key(kind, scope, label)]
        for number in (1, 2, 11)
    ]
    keys = [
        key
        for gate in named_barriers
        for key in (go_key(gate), readers_key(gate), value_key(gate, 0), value_key(gate, 1))
    ]

    assert len(set(keys)) == len(keys)
