"""A large fleet is heard in rounds: in time, and no more often than that."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model.cluster import GAP_S
from app.session.session import MAX_DRAINED, ROUND_S, DrainRounds

FEWEST_S = 0.05


def received_at_s(num_nodes: int, turns_s: list[float]) -> dict[int, list[float]]:
    """Return when each node is heard, of nodes that always have something new: whoever has waited longest first."""
    rounds, now_s, waiting = DrainRounds(num_nodes), 0.0, list(range(num_nodes))
    heard: dict[int, list[float]] = {node: [] for node in waiting}
    for turn_s in turns_s:
        for _ in range(rounds.num_takes(now_s)):
            taken, waiting = waiting[:MAX_DRAINED], waiting[MAX_DRAINED:]
            waiting += taken
            for node in taken:
                heard[node].append(now_s)
        now_s += turn_s
    return heard


@given(
    num_nodes=st.integers(1, 5000),
    turns_s=st.lists(st.floats(FEWEST_S, 0.3), min_size=60, max_size=120),
)
def test_each_node_is_heard_once_a_round_however_long_the_turns_are(num_nodes: int, turns_s: list[float]) -> None:
    longest_s = max(turns_s)
    # A turn hears so many too few at most as one take holds, and what comes in a turn is heard in the next one.
    slack_s = 2 * longest_s + ROUND_S * MAX_DRAINED / num_nodes
    for times_s in received_at_s(num_nodes, turns_s).values():
        gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
        assert times_s
        assert max(gaps_s, default=0.0) <= ROUND_S + slack_s


def test_2048_nodes_are_heard_as_often_as_a_round_says_and_no_more() -> None:
    num_nodes, num_turns = 2048, 400
    heard = received_at_s(num_nodes, [FEWEST_S] * num_turns)

    times = sum(len(times_s) for times_s in heard.values()) / num_nodes
    assert times == pytest.approx(num_turns * FEWEST_S / ROUND_S, rel=0.02)
    gaps_s = [later - earlier for times_s in heard.values() for earlier, later in pairwise(times_s)]
    assert max(gaps_s) + 0.5 < GAP_S, "at two reports a second nobody counts as having been away"


def test_a_console_that_stood_still_hears_every_node_once_and_goes_on_as_before() -> None:
    rounds = DrainRounds(1024)
    rounds.num_takes(0.0)

    assert rounds.num_takes(60.0) == 1024 // MAX_DRAINED
    assert rounds.num_takes(60.0 + FEWEST_S) == 1


@pytest.mark.parametrize(("num_nodes", "is_one"), [(1, True), (MAX_DRAINED, True), (MAX_DRAINED + 1, False)])
def test_a_small_fleet_is_one_take(num_nodes: int, is_one: bool) -> None:
    assert DrainRounds(num_nodes).is_one_take is is_one
