"""Who waits far less than all others, time and again, is slow; uneven is not slow."""

from __future__ import annotations

import numpy as np
import pytest

from app.diagnosis.wait_share import NUM_SLOTS, WaitShare, find_laggards
from app.model.job_model import JobModel
from ddpcore.wire import Phase

LIMITS = (0.45, 0.25, 0.55)


def laggards(*shares: float, observed_s: float = 10.0) -> tuple[int, ...] | None:
    waited = np.array(shares, np.float32) * observed_s
    found = find_laggards(waited, np.full(len(shares), observed_s, np.float32), 5.0, LIMITS)
    return None if found is None else found.ranks


class Watched:
    """A job whose ranks wait given shares of each second."""

    def __init__(self, num_ranks: int = 4) -> None:
        self.job = JobModel("job", 0, num_ranks, 1)
        self.share = WaitShare(num_ranks)
        self.now_s = 100.0
        self.share.sample(self.job, 0.0, self.now_s, is_clean=True)

    def live(
        self,
        seconds: int,
        *shares: float,
        longest_wait_s: float = 0.3,
        is_clean: bool = True,
        last: tuple[float, ...] = (),
        num_compared: int = 20,
    ) -> tuple[int, ...]:
        for _ in range(seconds):
            self.now_s += 1.0
            self.job.observed_s += 1.0
            self.job.waited_s += np.array(shares)
            if last:
                self.job.num_compared += num_compared
                self.job.num_last += num_compared * np.array(last)
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

    assert watched.live(NUM_SLOTS + 5, 0.3, 0.4, 0.3, 0.5) == ()


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


def test_a_rank_that_is_a_little_slower_is_told_by_the_order_of_arrival() -> None:
    watched = Watched()
    assert watched.live(NUM_SLOTS + 2, 0.3, 0.28, 0.12, 0.3, last=(0.05, 0.05, 0.9, 0.0)) == (2,)

    found = watched.share.laggards
    assert found is not None
    assert found.last_frac == pytest.approx(0.9)
    assert found.cost_frac == pytest.approx(0.18)
    assert watched.live(5, 0.3, 0.28, 0.28, 0.3, last=(0.3, 0.3, 0.2, 0.2)) == ()


@pytest.mark.parametrize(
    ("shares", "last", "num_compared"),
    [
        ((0.3, 0.28, 0.27, 0.3), (0.02, 0.03, 0.95, 0.0), 20),
        ((0.3, 0.28, 0.12, 0.3), (0.2, 0.2, 0.6, 0.0), 20),
        ((0.3, 0.28, 0.12, 0.3), (0.05, 0.05, 0.9, 0.0), 2),
    ],
    ids=["it costs next to nothing", "others come last too", "too little is known"],
)
def test_one_sign_alone_is_not_enough(shares: tuple[float, ...], last: tuple[float, ...], num_compared: int) -> None:
    assert Watched().live(60, *shares, last=last, num_compared=num_compared) == ()


def test_with_long_steps_the_window_grows() -> None:
    watched = Watched()
    named: tuple[int, ...] = ()
    for second in range(120):
        watched.job.step[:] = second // 5
        watched.job.sample_steps(watched.now_s)
        named = watched.live(1, 0.3, 0.28, 0.12, 0.3, last=(0.02, 0.01, 0.97, 0.0))
        if second < 45:
            assert named == ()
    assert named == (2,)


def test_with_few_steps_chance_is_not_taken_for_a_habit() -> None:
    watched = Watched()
    for second in range(200):
        watched.job.step[:] = second // 5
        assert watched.live(1, 0.3, 0.28, 0.12, 0.3, last=(0.1, 0.1, 0.8, 0.0)) == ()


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
