"""What a rank's GPU stands in, by the order of NCCL's calls in torch's recorder."""

from __future__ import annotations

import pytest

from ddpcore.probe.gpu import NCCL, GpuTransfers, GpuWaits, first_open, with_batches
from ddpcore.probe.group_track import GroupTrack
from ddpcore.probe.samples import CounterKey, GroupMembers, RecorderEntry
from ddpcore.wire import DEFAULT_GROUP, PeerCall, PeerWait

KEY: CounterKey = (NCCL, 0)
OTHER: CounterKey = (NCCL, 1)
MEMBERS = {DEFAULT_GROUP: GroupMembers((0, 1, 2, 3)), "pair": GroupMembers((2, 3))}


def call(
    op: str,
    seq: int,
    *,
    over: bool = False,
    p2p_seq: int = 0,
    key: CounterKey = KEY,
    begun: bool | None = None,
    on_gpu_us: int = -1,
) -> RecorderEntry:
    """Return an entry as NCCL's recorder has it."""
    group = DEFAULT_GROUP if key == KEY else "pair"
    is_p2p = p2p_seq > 0 and op != "coalesced"
    return RecorderEntry(
        key, group, seq, f"nccl:{op}", ((4,),), is_p2p, over, p2p_seq=p2p_seq, has_begun=begun, on_gpu_us=on_gpu_us
    )


def stands_in(ring: list[RecorderEntry], latest: list[PeerCall], completed: int = 7) -> PeerWait | None:
    """Return the sends and receives that a GPU stands in, two seconds after anything has moved."""
    transfers = GpuTransfers()
    counters = {KEY: (9, completed), OTHER: (9, 9)}
    transfers.learn(with_batches(ring), counters, latest, MEMBERS, 100.0)
    return transfers.wait(102.0, counters)


def test_a_receive_that_is_not_over_is_what_the_gpu_stands_in_with_its_peer_and_number() -> None:
    ring = [
        call("recv 2<-1", 7, over=True, p2p_seq=11),
        call("recv 2<-1", 7, p2p_seq=12),
        call("send 2->3", 7, p2p_seq=13),
        call("recv 2<-1", 8, p2p_seq=14),
    ]
    latest = [PeerCall("recv", 1, number=6), PeerCall("send", 3, number=5)]
    assert stands_in(ring, latest) == PeerWait([PeerCall("recv", 1, number=5)], 2.0, is_on_gpu=True)


def test_peers_are_told_by_their_ranks_in_the_job() -> None:
    ring = [call("send 0->1", 4, p2p_seq=1, key=OTHER)]
    found = stands_in(ring, [PeerCall("send", 3, "pair", number=1)])
    assert found is not None
    assert found.calls == [PeerCall("send", 3, "pair", number=1)]


def test_a_batch_is_over_with_the_entry_that_ends_it() -> None:
    latest = [PeerCall("send", 3, number=5), PeerCall("recv", 1, number=5)]
    batch = [call("send 2->3", 7, p2p_seq=12), call("recv 2<-1", 7, p2p_seq=12)]
    assert stands_in([*batch, call("coalesced", 7, over=True, p2p_seq=12)], latest) is None
    found = stands_in([*batch, call("coalesced", 7, p2p_seq=12)], latest)
    assert found is not None
    assert set(found.calls) == set(latest)


def test_collectives_of_a_batch_are_over_with_it() -> None:
    gathered = [call("_broadcast_oop", 7), call("_broadcast_oop", 7), call("ALLGATHER_coalesced", 7, over=True)]
    assert first_open(with_batches(gathered)) is None


def test_behind_a_collective_that_is_not_over_no_receive_is_waited_in() -> None:
    ring = [call("all_reduce", 7), call("recv 2<-1", 7, p2p_seq=12)]
    assert stands_in(ring, [PeerCall("recv", 1, number=5)]) is None


def test_calls_that_nobody_has_counted_and_those_that_may_be_over_by_now_are_not_told() -> None:
    ring = [call("recv 2<-1", 7, p2p_seq=12)]
    assert stands_in(ring, []) is None
    transfers = GpuTransfers()
    transfers.learn(ring, {KEY: (12, 7)}, [PeerCall("recv", 1, number=5)], MEMBERS, 100.0)
    assert transfers.wait(102.0, {KEY: (12, 7)}) is not None
    assert transfers.wait(102.0, {KEY: (12, 12)}) is None


def test_a_call_behind_another_groups_is_told_as_queued() -> None:
    ring = [call("all_reduce", 3, key=OTHER), call("all_reduce", 8)]
    first = first_open(ring)
    tracks = [GroupTrack(is_in_order=True) for _ in range(2)]
    for at, track in enumerate(tracks):
        for now_s in (100.0, 100.2, 100.4):
            track.observe(8, 7, now_s)
        track.learn([ring[at]], (8, 7), (), first)
    told = [track.report("group", [], 101.0) for track in tracks]
    assert [(one.is_waiting, one.is_queued) for one in told] == [(True, False), (True, True)]


@pytest.mark.parametrize("begun", [None, True, False])
def test_a_call_that_its_gpu_has_not_come_to_is_behind_work_of_the_rank_itself(*, begun: bool | None) -> None:
    ring = [call("all_reduce", 8, begun=begun), call("all_reduce", 9, begun=None if begun is None else False)]
    track = GroupTrack(is_in_order=True)
    for now_s in (100.0, 100.2, 100.4):
        track.observe(9, 7, now_s)
    track.learn(ring, (9, 7), (), first_open(ring))

    reported = track.report("group", [], 101.0)
    assert (reported.is_waiting, reported.is_queued, reported.is_behind_work) == (True, False, begun is False)
    assert track.is_held_up == (begun is not False)


def test_a_send_that_its_gpu_has_not_come_to_holds_nobody_up() -> None:
    ring = with_batches([call("send 2->3", 7, p2p_seq=12), call("coalesced", 7, p2p_seq=12, begun=False)])
    assert stands_in(ring, [PeerCall("send", 3, number=5)]) is None
    transfers = GpuTransfers()
    transfers.learn(ring, {KEY: (12, 7)}, [], MEMBERS, 100.0)
    assert not transfers.has_open


def test_calls_that_come_and_go_count_as_no_wait_though_the_counters_show_them_as_pending() -> None:
    track = GroupTrack(is_in_order=True)
    for second in range(1, 20):
        track.observe(second + 2, second, float(second))
        assert track.is_pending
        assert not track.is_held_up


def test_the_part_of_its_time_that_a_gpu_is_in_collectives_is_that_of_all_since_the_last_look() -> None:
    waits = GpuWaits()
    waits.learn([call("all_reduce", 4, over=True, on_gpu_us=900_000)], 100.0)
    assert waits.frac == 0.0
    # The ring holds two of ten.
    later = [call("all_reduce", seq, over=True, on_gpu_us=20_000) for seq in (4, 13, 14)]
    waits.learn([*later, call("all_reduce", 15)], 102.0)
    assert waits.frac == pytest.approx(10 * 0.02 / 2.0)
    waits.learn(later, 104.0)
    assert waits.frac == 0.0
    waits.learn([call("all_reduce", 16, over=True, on_gpu_us=9_000_000)], 105.0)
    assert waits.frac == 1.0


def test_what_a_gpu_waits_in_is_not_known_while_its_calls_end_one_after_another() -> None:
    track = GroupTrack(is_in_order=True)
    for completed, now_s in ((5, 100.0), (5, 100.2), (6, 100.4), (6, 100.6)):
        track.observe(9, completed, now_s)
        if now_s == 100.2:
            track.learn([call("all_reduce", seq, over=seq < 6) for seq in range(4, 10)], (9, 5))
            assert track.is_waiting
    told = track.report("group", [], 100.6)
    assert not told.is_waiting
    track.learn([call("all_reduce", seq, over=seq < 7) for seq in range(4, 10)], (9, 6))
    told = track.report("group", [], 100.6)
    assert told.is_waiting
    assert (told.completed_seq, round(told.waiting_s, 3)) == (6, 0.2)


def test_a_send_after_a_collective_leaves_lower_numbers_in_the_counters_and_is_pending_all_the_same() -> None:
    track = GroupTrack(is_in_order=True)
    track.observe(50, 50, 100.0)
    track.observe(12, 50, 100.2)
    assert track.is_pending
    track.observe(12, 12, 100.4)
    assert not track.is_pending
