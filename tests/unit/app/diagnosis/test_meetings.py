"""Ranks that do not find each other in `init_process_group`, since each goes elsewhere or comes as another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from app.diagnosis.causes import Cause
from app.view.verdict_hints import hint
from app.view.verdict_text import sentence
from ddpcore.wire import Anomaly, ChildWait, Phase, StoreMeeting
from tests.support.node_reports import group_report
from tests.unit.app.diagnosis.test_diagnosis import Watched

if TYPE_CHECKING:
    from app.diagnosis.verdicts import Verdict


def meeting(rank: int, port: int = 29500, world_size: int = 4) -> StoreMeeting:
    return StoreMeeting("10.0.0.1", port, rank, world_size)


def told(meetings: list[StoreMeeting | None], waited_s: float = 3.0, listener: str = "") -> list[Verdict]:
    watched = Watched()
    beats = [
        replace(
            watched.tick(rank, phase=Phase.JOINING, phase_s=waited_s, store_meeting=one),
            store_port_owner=listener if rank == 0 else "",
        )
        for rank, one in enumerate(meetings)
    ]
    return watched.receive(*beats).verdicts


OWN = [meeting(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("meetings", "culprits", "words"),
    [
        ([OWN[0], meeting(1, 29501), *OWN[2:]], (1,), "rank 1 to 10.0.0.1:29501, ranks 0, 2-3 to 10.0.0.1:29500"),
        ([OWN[0], OWN[1], meeting(0), OWN[3]], (2,), "rank 2 comes to init_process_group as rank 0"),
        ([meeting(rank, world_size=6) for rank in range(4)], (), "than there are (4): ranks 0-3 for 6"),
        ([*OWN[:3], meeting(3, world_size=8)], (3,), "than there are (4): rank 3 for 8, ranks 0-2 for 4"),
    ],
    ids=["another port", "another's number", "a larger world", "one of a larger world"],
)
def test_ranks_that_can_never_meet_are_named_soon(
    meetings: list[StoreMeeting | None], culprits: tuple[int, ...], words: str
) -> None:
    (verdict,) = told(meetings)

    assert (verdict.cause, verdict.culprits, verdict.op) == (Cause.MISMATCH, culprits, "init_process_group")
    assert words in sentence(verdict)
    assert "MASTER_PORT" in hint(verdict, None)


@pytest.mark.parametrize(
    "meetings",
    [
        OWN,
        [meeting(rank) for rank in (2, 0, 3, 1)],
        [meeting(0, 1, 2), meeting(1, 1, 2), meeting(0, 2, 2), meeting(1, 2, 2)],
        [*OWN[:3], None],
    ],
    ids=["all alike", "numbered anew", "two groups of two", "one is not known"],
)
def test_ranks_that_may_still_meet_are_no_mismatch(meetings: list[StoreMeeting | None]) -> None:
    assert told(meetings) == []


@pytest.mark.parametrize(
    ("child", "culprits"),
    [(ChildWait(77, "process"), [(0,)]), (ChildWait(77, "subprocess"), []), (None, [])],
    ids=["joins a process", "runs a launcher", "spawns"],
)
def test_a_rank_that_joins_a_process_while_others_meet_comes_after_it(
    child: ChildWait | None, culprits: list[tuple[int, ...]]
) -> None:
    watched, join = Watched(), {"anomalies": [Anomaly.OWN_RANKS], "phase": Phase.STARTING, "stood_s": 90.0}
    parent = watched.tick(0, child_wait=child, **join)
    others = [watched.tick(rank, phase=Phase.JOINING, phase_s=80.0) for rank in (1, 2, 3)]

    verdicts = watched.receive(parent, *others).verdicts

    assert [verdict.culprits for verdict in verdicts] == culprits
    assert all((verdict.cause, verdict.child) == (Cause.NOT_JOINED, child) for verdict in verdicts)


def told_again(late: dict[str, Any], *, calls: int = 100, world_size: int | None = None) -> list[tuple[int, ...]]:
    """Return who is named where rank 2 does something else while the others open their second group."""
    watched = Watched()
    watched.receive(*[watched.tick(rank, group_report(100), step=50, steps_done=50) for rank in range(4)])
    watched.now_s += 40.0
    facts: dict[str, Any] = {"step": 50, "steps_done": 50, "phase": Phase.OTHER, "stood_s": 30.0, "step_age_s": 40.0}
    facts["step_limit_s"] = 2.0
    ticks = [watched.tick(2, group_report(calls), **facts | late)]
    for rank in (0, 1, 3):
        meeting = None if world_size is None else StoreMeeting("10.0.0.1", 29500, rank, world_size)
        of_init = {"phase": Phase.JOINING, "phase_s": 25.0, "store_meeting": meeting}
        ticks.append(watched.tick(rank, group_report(100), **facts | of_init))
    verdicts = watched.receive(*ticks).verdicts
    assert all(verdict.cause is Cause.NOT_JOINED for verdict in verdicts)
    return [verdict.culprits for verdict in verdicts]


def test_a_rank_that_does_not_come_to_the_second_group_is_named() -> None:
    assert told_again({}) == [(2,)]
    assert told_again({}, world_size=4) == [(2,)]


def test_only_who_is_awaited_is_late_for_the_second_group() -> None:
    assert told_again({"stood_s": 0.0}) == [], "it is on its way"
    assert told_again({"phase": Phase.EVAL}) == []
    assert told_again({"step": 60, "steps_done": 60, "step_age_s": 0.1}) == [], "it trains on without them"
    assert told_again({"is_ending": True}) == []
    assert told_again({}, calls=0) == [], "it is in the second group, which did not wait for the others"
    assert told_again({}, world_size=3) == [], "the others mean to go on as three"


def test_where_all_go_to_one_store_in_vain_its_address_is_named() -> None:
    (verdict,) = told(list(OWN), waited_s=30.0)

    assert verdict.cause is Cause.TRANSPORT
    assert "do not find each other at 10.0.0.1:29500; ranks 0-3 wait" in sentence(verdict)


@pytest.mark.parametrize(
    ("listener", "advice"),
    [
        ("pid 77 (redis-server *:29500)", "choose another MASTER_PORT"),
        ("pid 4000 (python train.py)", "MASTER_PORT"),
        ("", "may listen on port 29500"),
    ],
    ids=["a stranger", "a rank", "not known"],
)
def test_who_listens_where_the_ranks_meet_is_in_the_sentence(listener: str, advice: str) -> None:
    (verdict,) = told(list(OWN), waited_s=30.0, listener=listener)

    assert (f"{listener} listens there" in sentence(verdict)) is bool(listener)
    assert advice in hint(verdict, None)


def test_the_network_is_no_matter_where_a_stranger_listens() -> None:
    assert [told(list(OWN), 30.0, one)[0].num_hosts for one in ("", "pid 4000 (x)", "pid 77 (redis)")] == [1, 1, 0]
