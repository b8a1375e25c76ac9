"""The words in which ranks are told of each other, and what is made of a beat."""

from __future__ import annotations

import pytest

from ddpcore.agreement import ranks_text
from ddpcore.barriers.rank_status import (
    BarrierKind,
    Call,
    ProcessState,
    RankHeartbeat,
    Sighting,
    Wait,
    decode_heartbeat,
    encode_heartbeat,
    missing_ranks_text,
    ordinal,
    silence_s,
)
from ddpcore.wire import Place

HERE = Place("/home/user/train.py", 33, "step")
EPOCH = Call(BarrierKind.BARRIER, "epoch", 2, Place("/home/user/train.py", 12, "main"))


def tick(**facts: object) -> RankHeartbeat:
    known = {"uptime_s": 10.0, "period_s": 2.0, "host": "node-1", "machine": "m", "pid": 77, "started_ticks": 5}
    return RankHeartbeat(**{**known, "place": HERE, "calls": (EPOCH,), **facts})  # type: ignore[arg-type]


def told(sighting: Sighting, kind: BarrierKind = BarrierKind.BARRIER, label: str = "epoch") -> str:
    return missing_ranks_text(kind, label, {1: sighting})


def test_ranks_are_listed_and_runs_of_three_and_more_are_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([1, 2]) == "ranks 1-2"
    assert ranks_text([0, 1, 2, 3, 7, 9, 10]) == "ranks 0-3, 7, 9-10"


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")]
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_a_rank_that_has_ended_is_told_with_its_calls_and_their_line() -> None:
    words = "rank 1 has ended after 2 calls of barrier 'epoch' (the last at train.py:12 in main)"
    assert told(Sighting(tick(has_left=True))) == words
    error = tick(has_left=True, error="ValueError: boom")
    assert told(Sighting(error)) == words.replace("ended", "ended with ValueError: boom")


def test_a_rank_that_has_never_come_is_told_with_the_gate_it_came_to_last() -> None:
    words = told(Sighting(tick(has_left=True)), label="load")

    assert words == (
        "rank 1 has ended without a call of barrier 'load' "
        "(its last barrier: barrier 'epoch', 2nd call at train.py:12 in main)"
    )


def test_a_process_that_has_gone_or_stopped_is_told_with_where_it_was_seen() -> None:
    seen = "last seen at train.py:33 in step after 2 calls of barrier 'epoch' (the last at train.py:12 in main)"
    assert told(Sighting(tick(), ProcessState.GONE)) == f"rank 1 has died, {seen}"
    stopped = told(Sighting(tick(), ProcessState.STOPPED))
    assert stopped == f"rank 1 is stopped (SIGSTOP; pid 77 on node-1), {seen}"


def test_silence_is_told_with_its_length_and_never_as_an_end() -> None:
    sighting = Sighting(tick(), silent_s=12.4)

    assert "rank 1 has been silent for 12 s (pid 77 on node-1), last seen at train.py:33 in step" in told(sighting)
    assert not sighting.has_ended


def test_a_rank_that_waits_elsewhere_is_told_with_gate_and_line() -> None:
    wait = Wait(BarrierKind.BARRIER, "load", 3, place=HERE)
    assert told(Sighting(tick(wait=wait))) == "rank 1 waits in its 3rd call of barrier 'load' at train.py:33 in step"
    collective = Wait(BarrierKind.COLLECTIVE, "all_reduce", 57, group="0", place=HERE)
    assert told(Sighting(tick(wait=collective, block="first 'corpus'"))) == (
        "rank 1 waits in all_reduce #57 of group 0 at train.py:33 in step inside first 'corpus'"
    )


def test_a_rank_in_another_first_block_is_told_with_that_one() -> None:
    other = Call(BarrierKind.FIRST, "train.py:10", 1, Place("train.py", 10, "main"))
    sighting = Sighting(tick(wait=Wait(BarrierKind.BARRIER, "load", 1, place=HERE), calls=(EPOCH, other)))

    assert told(sighting, BarrierKind.FIRST, "train.py:11").endswith(
        ", its last first was 'train.py:10' at train.py:10 in main"
    )


def test_a_rank_that_has_told_nothing_is_said_to_have() -> None:
    assert told(Sighting()) == "rank 1 has reported nothing: it has come to no barrier of ddpcore yet"


def test_ranks_of_one_fate_are_told_together_and_many_fates_are_counted() -> None:
    alike = {rank: Sighting(tick(place=None, calls=())) for rank in (1, 2, 3)}
    assert (
        missing_ranks_text(BarrierKind.BARRIER, "x", alike)
        == "each of ranks 1-3 is alive, without a call of barrier 'x'"
    )

    different = {rank: Sighting(tick(place=Place("a.py", rank, "f"))) for rank in range(12)}
    assert missing_ranks_text(BarrierKind.BARRIER, "x", different).endswith("; and 4 others differently")


def test_a_beat_crosses_the_store_and_nonsense_there_is_no_beat() -> None:
    whole = tick(
        wait=Wait(BarrierKind.BARRIER, "load", 3, place=HERE), error="\udcff".encode(errors="replace").decode()
    )

    assert decode_heartbeat(encode_heartbeat(whole).encode()) == whole
    assert decode_heartbeat(b"") is None
    assert decode_heartbeat(b'{"uptime_s": "x"}') is None
    assert decode_heartbeat(b"[" * 100_000) is None


def test_silence_is_what_the_sender_s_uptime_lacks_of_the_observer_s_time() -> None:
    first = (100.0, tick(uptime_s=10.0))

    assert silence_s(first, tick(uptime_s=10.0), 104.0) is None
    assert silence_s(first, tick(uptime_s=10.0), 106.0) == 6.0
    assert silence_s(first, tick(uptime_s=40.0), 131.5) is None
    assert silence_s(first, tick(uptime_s=40.0), 150.0) == 20.0
