"""Who waits far less than all others, time and again, is slow; uneven is not slow."""

from __future__ import annotations

import numpy as np
import pytest

from agent.wire.digest import LATENESS
from app.diagnosis.slow_ranks import find_laggards
from app.diagnosis.wait_fractions import WINDOW_SLOTS, WaitFractions
from app.model.job_model import JobModel
from ddpcore.wire import Phase
from tests.support.sim import SimCluster

LIMITS = (0.45, 0.25, 0.55)
LATE = {name: place for place, name in enumerate(LATENESS)}


def laggards(*shares: float, observed_s: float = 10.0) -> tuple[int, ...] | None:
    waited = np.array(shares, np.float32) * observed_s
    found = find_laggards(waited, np.full(len(shares), observed_s, np.float32), 5.0, LIMITS)
    return None if found is None else found.ranks


class Watched:
    """A job whose ranks wait given shares of each second."""

    def __init__(self, num_ranks: int = 4) -> None:
        self.job = JobModel("job", 0, num_ranks, 1)
        self.share = WaitFractions(num_ranks)
        self.now_s = 100.0
        self.share.sample(self.job, 0.0, self.now_s, is_clean=True)

    def live(
        self,
        seconds: int,
        *shares: float,
        longest_wait_s: float = 0.3,
        is_clean: bool = True,
        last: tuple[float, ...] = (),
        lost: tuple[float, ...] = (),
        spread: float | tuple[float, ...] = 0.02,
        pieces: float = 4.0,
        beyond: tuple[float, ...] = (),
    ) -> tuple[int, ...]:
        """Let time pass.

        Args:
            seconds: How much.
            shares: Sampled shares of time that each rank waits; without them, the sum of `lost` and `beyond`.
            longest_wait_s: The longest single wait.
            is_clean: Whether nothing else explains waiting.
            last: Share of the collectives to which each comes last.
            lost: Exact shares of time that each waits for later ranks of its node.
            spread: By how much these vary from piece to piece, all or each.
            pieces: Pieces in a second.
            beyond: Exact shares of time behind the node's last call.
        """
        for _ in range(seconds):
            self.now_s += 1.0
            self.job.observed_s += 1.0
            self.job.waited_s += np.array(shares) if shares else np.array(lost) + np.array(beyond or (0.0,) * len(lost))
            if last:
                self.job.num_compared += 20
                self.job.num_last += 20 * np.array(last)
            if lost:
                waited = np.array(lost) / pieces
                self.job.lateness[LATE["spanned_s"]] += 1.0
                self.job.lateness[LATE["waited_s"]] += pieces * waited
                self.job.lateness[LATE["squared_s2"]] += pieces * (waited**2 + (np.array(spread) / pieces) ** 2)
                self.job.lateness[LATE["num_pieces"]] += pieces
            if beyond:
                self.job.lateness[LATE["stepped_s"]] += 1.0
                self.job.lateness[LATE["beyond_s"]] += np.array(beyond)
            self.share.sample(self.job, longest_wait_s, self.now_s, is_clean=is_clean)
        return () if self.share.laggards is None else self.share.laggards.ranks


@pytest.mark.parametrize(
    ("shares", "ranks"),
    [
        ((0.9, 0.9, 0.05, 0.9), (2,)),
        ((0.7, 0.1), (1,)),
        ((0.05, 0.1, 0.9, 0.9), (0, 1)),
        ((0.2, 0.6, 0.6, 0.6), None),
        ((0.2, 0.3, 0.5, 0.6), None),
        ((0.9, 0.9, 0.9, 0.9), None),
        ((0.0, 0.0, 0.0, 0.0), None),
        ((0.4, 0.95, 0.95, 0.95), None),
        ((0.9, 0.05, 0.05, 0.05), None),
        ((0.5,), None),
    ],
)
def test_only_a_wide_gap_between_few_and_the_rest_tells(
    shares: tuple[float, ...], ranks: tuple[int, ...] | None
) -> None:
    assert laggards(*shares) == ranks


def test_little_observed_time_says_nothing() -> None:
    assert laggards(0.9, 0.9, 0.05, 0.9, observed_s=4.0) is None


def test_nobody_is_judged_while_a_tenth_of_the_ranks_is_unknown() -> None:
    observed = np.array([10, 10, 10, 0], np.float32)

    assert find_laggards(observed * 0.9, observed, 5.0, LIMITS) is None


def test_the_cost_is_what_the_least_busy_other_waits_more() -> None:
    found = find_laggards(np.array([9, 8, 0.5], np.float32), np.full(3, 10, np.float32), 5.0, LIMITS)

    assert found is not None
    assert found.cost_frac == pytest.approx(0.75)
    assert found.wait_frac == pytest.approx(0.05)


def test_a_slow_rank_is_named_within_some_seconds_and_cleared_when_it_heals() -> None:
    watched = Watched()
    assert watched.live(20, 0.3, 0.4, 0.3, 0.5) == ()
    assert watched.live(10, 0.9, 0.9, 0.02, 0.9) == (2,)
    assert watched.live(1, 0.9, 0.9, 0.02, 0.9) == (2,)
    assert watched.live(5, 0.3, 0.4, 0.3, 0.5) == ()
    assert watched.live(20, 0.3, 0.4, 0.3, 0.5) == ()


def test_another_slow_rank_takes_its_place() -> None:
    watched = Watched()
    assert watched.live(10, 0.9, 0.9, 0.02, 0.9) == (2,)
    assert watched.live(20, 0.9, 0.02, 0.9, 0.9) == (1,)


def test_one_long_hiccup_is_not_a_habit() -> None:
    watched = Watched()
    for second in range(9):
        watched.live(1, 1.0, 1.0, 0.0, 1.0, longest_wait_s=second + 1.0)

    assert watched.live(WINDOW_SLOTS + 5, 0.3, 0.4, 0.3, 0.5) == ()


def test_time_that_something_else_explains_is_left_out_and_still_shown() -> None:
    watched = Watched()
    assert watched.live(30, 0.9, 0.9, 0.02, 0.9, is_clean=False) == ()
    assert watched.share.recent_frac == pytest.approx([0.9, 0.9, 0.02, 0.9])


def test_a_rank_that_counts_anew_is_not_known_for_a_moment() -> None:
    watched = Watched()
    watched.live(3, 0.5, 0.5, 0.5, 0.5)
    watched.job.observed_s[1] = 0.0
    watched.job.waited_s[1] = 0.0
    watched.now_s += 1.0
    watched.share.sample(watched.job, 0.0, watched.now_s, is_clean=True)

    assert np.isnan(watched.share.recent_frac[1])
    watched.live(1, 0.5, 0.5, 0.5, 0.5)
    assert watched.share.recent_frac[1] == pytest.approx(0.5)


def test_looks_within_one_slot_are_one_sample() -> None:
    watched = Watched(2)
    before = watched.share.recent_frac.copy()
    watched.share.sample(watched.job, 0.0, watched.now_s + 0.1, is_clean=True)

    assert np.array_equal(before, watched.share.recent_frac, equal_nan=True)


LATE_2 = (0.05, 0.05, 0.9, 0.0)


def test_a_rank_that_is_a_little_slower_is_named_by_what_the_others_lose_and_its_cure_shows_soon() -> None:
    watched = Watched()
    assert watched.live(6, lost=(0.2, 0.18, 0.02, 0.2), last=LATE_2) == (2,)

    found = watched.share.laggards
    assert found is not None
    assert found.last_frac == pytest.approx(0.9)
    assert found.cost_frac == pytest.approx(0.18)
    assert watched.live(7, lost=(0.05, 0.05, 0.05, 0.05), last=(0.3, 0.3, 0.2, 0.2)) == ()


@pytest.mark.parametrize(
    ("lost", "last", "spread", "pieces"),
    [
        ((0.2, 0.2, 0.13, 0.2), LATE_2, 0.02, 4.0),
        ((0.2, 0.2, 0.02, 0.2), (0.25, 0.25, 0.25, 0.25), 0.02, 4.0),
        ((0.2, 0.2, 0.02, 0.2), LATE_2, 0.3, 1.0),
        ((0.2, 0.2, 0.02, 0.2), LATE_2, 0.02, 0.2),
    ],
    ids=["it costs next to nothing", "others come last too", "steps vary by more", "too few steps are known"],
)
def test_one_sign_alone_is_not_enough(
    lost: tuple[float, ...], last: tuple[float, ...], spread: float, pieces: float
) -> None:
    assert Watched().live(60, *[0.15] * 4, lost=lost, last=last, spread=spread, pieces=pieces) == ()


def test_a_rank_that_is_slow_in_each_tenth_step_alone_takes_longer_to_be_told_from_chance() -> None:
    watched, lost, last, spread = Watched(), (0.3, 0.02, 0.3, 0.3), (0.23, 0.31, 0.23, 0.23), (0.6, 0.05, 0.6, 0.6)
    assert watched.live(15, lost=lost, last=last, spread=spread) == ()
    assert watched.live(25, lost=lost, last=last, spread=spread) == (1,)

    found = watched.share.laggards
    assert found is not None
    assert found.cost_frac == pytest.approx(0.28)
    assert watched.live(14, lost=(0.05,) * 4, last=(0.25,) * 4) == ()


def test_a_rank_that_was_slow_for_too_short_a_time_to_be_named_is_not_named_afterwards() -> None:
    watched = Watched()
    assert (
        watched.live(15, lost=(0.45, 0.02, 0.45, 0.45), last=(0.23, 0.31, 0.23, 0.23), spread=(0.9, 0.05, 0.9, 0.9))
        == ()
    )
    assert watched.live(30, lost=(0.05,) * 4, last=(0.25,) * 4, spread=0.1) == ()


def test_two_ranks_that_are_equally_slow_are_named_both() -> None:
    watched = Watched()
    assert watched.live(6, lost=(0.23, 0.01, 0.01, 0.23), last=(0.0, 0.5, 0.5, 0.0)) == (1, 2)

    found = watched.share.laggards
    assert found is not None
    assert found.cost_frac == pytest.approx(0.22)
    assert not found.is_in_turns


def test_two_ranks_that_are_slow_by_turns_each_step_cost_as_much_as_one_that_always_is() -> None:
    watched = Watched()
    assert watched.live(6, lost=(0.23, 0.12, 0.11, 0.23), last=(0.0, 0.5, 0.5, 0.0)) == (1, 2)

    found = watched.share.laggards
    assert found is not None
    assert found.cost_frac == pytest.approx(0.23)
    assert found.is_in_turns


def test_ranks_that_are_slow_by_turns_of_half_a_minute_stay_named() -> None:
    watched = Watched()
    named = []
    for turn in range(6):
        slow = 1 + 2 * (turn % 2)
        lost, last = [0.23] * 4, [0.02] * 4
        lost[slow], last[slow] = 0.01, 0.94
        named += [watched.live(1, lost=tuple(lost), last=tuple(last)) for _ in range(30)]
    assert set(named[6:30]) == {(1,)}
    assert set(named[40:]) == {(1, 3)}


def test_one_that_no_longer_takes_turns_is_not_named_for_long() -> None:
    watched = Watched()
    assert watched.live(20, lost=(0.23, 0.01, 0.23, 0.23), last=(0.0, 0.9, 0.0, 0.0)) == (1,)
    assert watched.live(20, lost=(0.23, 0.23, 0.01, 0.23), last=(0.0, 0.0, 0.9, 0.0)) == (1, 2)
    assert watched.live(40, lost=(0.23, 0.23, 0.01, 0.23), last=(0.0, 0.0, 0.9, 0.0)) == (2,)


def test_a_slow_node_is_named_by_what_the_other_nodes_wait_behind_their_last_calls() -> None:
    watched = Watched()
    watched.job.node_of[:] = (0, 0, 1, 1)
    lost = (0.02, 0.02, 0.02, 0.02)
    assert watched.live(20, lost=lost, beyond=(0.18, 0.18, 0.05, 0.05)) == ()
    assert watched.live(12, lost=lost, beyond=(0.28, 0.28, 0.05, 0.05)) == (2, 3)

    found = watched.share.laggards
    assert found is not None
    assert found.cost_frac == pytest.approx(0.23, abs=0.02)
    assert found.last_frac is None


def test_where_nobody_reports_steps_a_slow_node_is_told_by_what_all_its_ranks_wait() -> None:
    watched = Watched(8)
    watched.job.node_of[:] = (0, 0, 0, 0, 1, 1, 1, 1)
    assert watched.live(12, *[0.26] * 4, *[0.02] * 4, lost=(0.02,) * 8) == (4, 5, 6, 7)


@pytest.mark.parametrize("num_waits", [1, 2], ids=["one long wait", "two long waits"])
def test_a_node_that_waits_long_and_rarely_has_no_slow_one_beside_it(num_waits: int) -> None:
    watched = Watched(8)
    watched.job.node_of[:] = (0, 0, 0, 0, 1, 1, 1, 1)
    for _ in range(num_waits):
        assert watched.live(4, *[0.1] * 8, lost=(0.02,) * 8) == ()
        for second in range(4):
            waited = [1.0] * 4 + [0.1] * 4
            assert watched.live(1, *waited, lost=(0.02,) * 8, longest_wait_s=second + 1.0) == ()
    assert watched.live(WINDOW_SLOTS, *[0.1] * 8, lost=(0.02,) * 8) == ()


def test_one_long_step_in_which_a_node_waits_is_one_step_however_long() -> None:
    watched = Watched()
    watched.job.node_of[:] = (0, 0, 1, 1)
    step = 0
    for second in range(70):
        is_long = 20 <= second < 50
        step += 0 if is_long else 5
        watched.job.step[:] = step
        beyond = (0.9, 0.9, 0.05, 0.05) if is_long else (0.2, 0.2, 0.2, 0.2)
        longest_s = 0.9 * (second - 19) if is_long else 0.3
        assert watched.live(1, lost=(0.02,) * 4, beyond=beyond, longest_wait_s=longest_s) == ()


def test_a_node_is_not_slow_while_what_its_ranks_lose_to_each_other_is_uncertain() -> None:
    watched = Watched()
    watched.job.node_of[:] = (0, 0, 1, 1)
    lost, beyond = (0.1,) * 4, (0.4, 0.4, 0.05, 0.05)
    assert watched.live(12, lost=lost, beyond=beyond, spread=1.0, pieces=1.0) == ()
    assert watched.live(WINDOW_SLOTS, lost=lost, beyond=beyond) == (2, 3)


def test_a_rank_that_is_late_on_a_node_which_waits_for_another_one_costs_nothing() -> None:
    watched = Watched()
    watched.job.node_of[:] = (0, 0, 1, 1)
    lost, last = (0.01, 0.01, 0.2, 0.0), (0.5, 0.5, 0.0, 1.0)
    assert watched.live(20, lost=lost, last=last, beyond=(0.05, 0.05, 0.25, 0.25)) == (0, 1)


def test_long_steps_take_longer_to_tell() -> None:
    watched = Watched()
    named: tuple[int, ...] = ()
    for second in range(60):
        watched.job.step[:] = second // 5
        named = watched.live(1, lost=(0.2, 0.18, 0.02, 0.2), last=LATE_2, pieces=0.2)
        if second < 29:
            assert named == ()
    assert named == (2,)


def test_one_long_pause_for_input_is_not_a_habit() -> None:
    watched = Watched()
    data = list(Phase).index(Phase.DATA)
    for second in range(60):
        watched.job.step[:] = 100 * min(second, 20) + 100 * max(0, second - 35)
        watched.job.worked_s[data] += 1.0 if 20 <= second < 35 else 0.1
        watched.live(1, 0.0, 0.0, 0.0, 0.0)
        assert watched.share.input_frac is None


def test_input_that_takes_most_of_every_step_is_told() -> None:
    watched = Watched()
    for second in range(30):
        watched.job.step[:] = 10 * second
        watched.job.worked_s[list(Phase).index(Phase.DATA)] += 0.6
        watched.live(1, 0.0, 0.0, 0.0, 0.0)
    assert watched.share.input_frac == pytest.approx(0.6)


def test_a_verdict_stands_as_long_as_slow_steps_bear_it_out_and_not_behind_a_long_gap() -> None:
    watched = Watched()
    for second in range(600):  # a step takes 20 s, a slot thus 40 s
        watched.job.step[:] = second // 20
        watched.live(1, 0.9, 0.9, 0.05, 0.9)
        assert watched.share.is_fresh(watched.now_s) or second < 45
    assert watched.share.laggards is not None

    watched.live(9, 0.0, 0.0, 0.0, 0.0, is_clean=False)
    assert watched.share.is_fresh(watched.now_s)
    watched.live(3, 0.0, 0.0, 0.0, 0.0, is_clean=False)
    assert not watched.share.is_fresh(watched.now_s)

    watched.live(1, 0.9, 0.9, 0.05, 0.9)
    assert not watched.share.is_fresh(watched.now_s)
    for second in range(600, 660):
        watched.job.step[:] = second // 20
        watched.live(1, 0.9, 0.9, 0.05, 0.9)
    assert watched.share.is_fresh(watched.now_s)


def test_of_three_ranks_two_that_take_turns_are_named_and_not_a_majority_that_is_always_slow() -> None:
    last = (0.0, 0.5, 0.5)
    assert Watched(3).live(12, 0.4, 0.2, 0.2, lost=(0.44, 0.22, 0.22), last=last) == (1, 2)
    assert Watched(3).live(12, 0.4, 0.2, 0.2, lost=(0.44, 0.02, 0.02), last=last) == ()


@pytest.mark.parametrize(("first", "second", "seconds"), [(2, 1, 39), (3, 0, 16)])
def test_a_slow_rank_whose_place_another_one_takes_is_over_with_and_not_slow_in_turns(
    first: int, second: int, seconds: int
) -> None:
    sim = SimCluster()
    sim.run_to_step(20)
    sim.slow(first, 8)
    sim.run(seconds)
    assert [verdict.culprits for verdict in sim.verdicts()] == [[first]]

    sim.slow(first, 1)
    sim.slow(second, 8)
    seen = []
    for _ in range(45):
        sim.run(1)
        seen.append([verdict.culprits for verdict in sim.verdicts()])
    assert {tuple(culprits) for now in seen for culprits in now} == {(first,), (second,)}
    assert all(now == [[second]] for now in seen[25:])
