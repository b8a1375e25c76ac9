"""Who is taken for slow, and who only loses less than others."""

from __future__ import annotations

import numpy as np

from app.diagnosis.rank_pace import Habit, LostTime
from app.diagnosis.slow_ranks import KEEP, NEW, Laggards, UsualPlace, find_slow
from ddpcore.wire import Phase, Place
from tests.support.node_reports import group_report, rank_report

OBSERVED_S = 12.0


def slow(frac: list[float], last: list[float], waited: list[float] | None = None) -> Laggards | None:
    """Return who is slow of ranks on nodes of two, from what they lose, and how often each comes last to 100 calls."""
    lost = LostTime(np.array(frac), np.full(len(frac), 0.01), 0.01, np.array(frac))
    window = np.zeros((10, len(frac)), np.float32)
    window[0], window[1] = OBSERVED_S, OBSERVED_S * np.array(frac if waited is None else waited)
    window[2], window[3], window[7] = 100.0, last, 50.0
    owners = np.arange(len(frac)) // 2
    found = {find_slow(window, lost, owners, limits) for limits in (NEW, KEEP)}
    assert len(found) == 1, "a longer look is no weaker"
    return found.pop()


def test_a_rank_that_waits_all_the_time_is_not_slow_whatever_its_calls_tell() -> None:
    """Ranks of NCCL that queue steps ahead: when they call has nothing to do with their GPUs."""
    frac, last = [0.07, 0.20], [78.0, 22.0]
    assert slow(frac, last, [1.0, 1.0]) is None
    named = slow(frac, last)
    assert named is not None
    assert named.ranks == (0,)


def test_a_rank_that_passes_on_what_a_slow_one_sends_is_not_slow_beside_it() -> None:
    others = [0.19, 0.19, 0.18, 0.19, 0.19, 0.18]
    victim = slow([0.08, 0.03, *others, 0.19, 0.0], [5.0, 95.0, *[50.0] * 6, 0.0, 100.0])
    assert victim is None or victim.ranks == (9,)
    both = slow([0.19, 0.0, *others, 0.19, 0.0], [5.0, 95.0, *[50.0] * 6, 0.0, 100.0])
    assert both is not None
    assert both.ranks == (1, 9)


LOADING = Habit(Phase.DATA, 0.5, 0.1)
LOADS, TRAINS = Place("/home/u/data.py", 22, "augment"), Place("/home/u/train.py", 39, "main")


def test_the_line_that_is_seen_most_often_is_named_not_the_last_one() -> None:
    usual = UsualPlace()
    seen = [(LOADS, Phase.DATA), (TRAINS, Phase.BACKWARD), (LOADS, Phase.DATA), (TRAINS, Phase.DATA)] * 3

    reports = [rank_report(1, place=place, phase=phase) for place, phase in seen]
    named = [usual.take((1,), report, [], LOADING) for report in reports]

    assert named[:5] == [None] * 5
    assert named[-1] == LOADS
    assert usual.take((1,), reports[-1], [], LOADING) == LOADS
    assert usual.take((2,), None, [], LOADING) is None


def place_named(
    own: list[Place], peers: list[Place], habit: Habit | None = None, *, waits: bool = False
) -> Place | None:
    """Return the line that is named of rank 1 after many looks at it and two others, which may wait at their lines."""
    usual, named = UsualPlace(), None
    groups = [group_report(waiting_s=0.2)] if waits else []
    for place, other in zip(own * 30, peers * 30, strict=True):
        others = [rank_report(rank, place=other, groups=groups) for rank in (0, 2)]
        named = usual.take((1,), rank_report(1, place=place), others, habit)
    return named


def test_a_line_where_the_peers_are_as_often_is_not_named() -> None:
    assert place_named([TRAINS, TRAINS, LOADS], [TRAINS, TRAINS, LOADS]) is None
    assert place_named([TRAINS, TRAINS, LOADS], [TRAINS, TRAINS, TRAINS]) == LOADS, "though it is elsewhere more often"


def test_peers_that_wait_at_the_line_of_the_slow_rank_are_not_at_work_there() -> None:
    assert place_named([TRAINS], [TRAINS], waits=True) == TRAINS
    assert place_named([TRAINS], [TRAINS]) is None


def test_of_a_phase_that_takes_the_slow_rank_longer_its_line_is_named_though_the_peers_stand_there_too() -> None:
    assert place_named([TRAINS], [TRAINS], Habit(Phase.FORWARD, 0.47, 0.1)) == TRAINS
    even = Habit(Phase.FORWARD, 0.4, 0.3)
    assert place_named([TRAINS, TRAINS, LOADS], [TRAINS, TRAINS, TRAINS], even) == LOADS
