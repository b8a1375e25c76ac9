"""Slow ranks are named soon, and what they cost is what the program's construction says.

Of a rank that takes `factor` times as long, the others lose 1 - 1 / factor of every step while work fills it. Programs
differ in the length of a step, in how many collectives it has, in whether these run behind backward, and in whether
anybody reports steps.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from app.diagnosis.causes import Cause
from tests.support.paced_program import Factor, Paced
from tests.support.sim import SimCluster

WARM_S = 12.0
WITHIN_S = 15.0
POINTS = 0.05
"""By which a cost may be off."""
START_S = 1000.0


class Story(NamedTuple):
    """Who is slow in which program."""

    factor: float
    slow: tuple[int, ...] = (1,)
    shape: tuple[int, int] = (1, 4)
    """Nodes, and ranks on each."""
    step_s: float = 0.2
    num_buckets: int = 1
    is_behind: bool = True
    reports_steps: bool = True
    noise: float = 0.02
    within_s: float = WITHIN_S


STORIES = [
    Story(1.3, shape=(1, 2), reports_steps=False, is_behind=False),
    Story(1.2, shape=(1, 2), num_buckets=12, noise=0.2),
    Story(1.2, step_s=1.5, num_buckets=4, within_s=22.0),
    Story(2.0, shape=(1, 2), is_behind=False, num_buckets=3, reports_steps=False),
    Story(1.3, slow=(1, 2)),
    Story(1.3, slow=(4, 5, 6, 7), shape=(2, 4)),
    Story(1.3, shape=(2, 1), num_buckets=12),
]
SLOW_STORIES = [
    Story(1.3, num_buckets=12),
    Story(1.3, noise=0.2),
    Story(1.2, step_s=1.0, is_behind=False, reports_steps=False),
    Story(2.0, num_buckets=12),
    Story(1.3, slow=(1, 2), num_buckets=3, is_behind=False, reports_steps=False),
    Story(1.3, slow=(4, 5, 6, 7), shape=(2, 4), num_buckets=12),
    Story(1.3, shape=(2, 4), slow=(6,), is_behind=False, num_buckets=3),
]
"""Not in every run."""


def cluster(story: Story) -> SimCluster:
    sim: SimCluster | None = None

    def factor(_: int) -> float:
        return story.factor if sim is not None and sim.elapsed_s >= WARM_S else 1.0

    factors: dict[int, float | Factor] = dict.fromkeys(story.slow, factor)
    program = Paced(story.step_s, story.num_buckets, story.is_behind, story.reports_steps, factors)
    sim = SimCluster(*story.shape, program=program, noise=story.noise)
    return sim


def named(sim: SimCluster) -> dict[tuple[int, ...], float]:
    """Return the cost of those who are slow now."""
    found = [verdict for verdict in sim.diagnosis.verdicts if verdict.cause is Cause.STRAGGLER]
    return {verdict.culprits: verdict.cost_frac for verdict in found if verdict.cost_frac is not None}


@pytest.mark.parametrize(
    "story", [*STORIES, *(pytest.param(story, marks=pytest.mark.slow) for story in SLOW_STORIES)], ids=str
)
def test_slow_ranks_are_named_soon_at_what_they_cost(story: Story) -> None:
    sim = cluster(story)
    sim.run(WARM_S)
    sim.run_until(lambda: story.slow in named(sim), story.within_s)
    sim.run(12)
    assert named(sim)[story.slow] == pytest.approx(1 - 1 / story.factor, abs=POINTS)
    assert {culprits for _, _, culprits in sim.told} == {story.slow}


@pytest.mark.parametrize("turn_s", [0.0, *(pytest.param(turn_s, marks=pytest.mark.slow) for turn_s in (10.0, 30.0))])
def test_ranks_that_are_slow_in_turns_are_both_named_and_stay_so(turn_s: float) -> None:
    sim: SimCluster | None = None

    def factor_of(place: int) -> Factor:
        def factor(step: int) -> float:
            turn = step if turn_s == 0.0 else int((0.0 if sim is None else sim.elapsed_s) / turn_s)
            return 1.3 if turn % 2 == place else 1.0

        return factor

    sim = SimCluster(1, 4, program=Paced(factors={1: factor_of(0), 3: factor_of(1)}), noise=0.05)
    sim.run(2 * turn_s + WITHIN_S)
    for _ in range(120):
        sim.run(0.5)
        assert list(named(sim)) == [(1, 3)]
    assert named(sim)[1, 3] == pytest.approx(1 - 1 / 1.3, abs=POINTS)


def test_a_cure_shows_within_seconds() -> None:
    sim: SimCluster | None = None

    def factor(_: int) -> float:
        return 1.3 if sim is not None and sim.elapsed_s < 40 else 1.0

    sim = SimCluster(1, 4, program=Paced(factors={1: factor}))
    sim.run(40)
    assert list(named(sim)) == [(1,)]
    sim.run_until(lambda: not named(sim), within_s=10)
    sim.run(20)
    assert not named(sim)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(Paced(0.05, 12, factors={0: 1.05}), marks=pytest.mark.slow),
        pytest.param(Paced(1.0, 4, factors={0: 1.05}), marks=pytest.mark.slow),
        Paced(0.2, 3, is_behind=False, reports_steps=False, factors={0: 1.05}),
        pytest.param(Paced(1.0, 1, factors={0: lambda step: 4.0 if step % 20 == 0 else 1.0}), marks=pytest.mark.slow),
    ],
    ids=["short steps", "long steps", "steps that nobody reports", "a checkpoint of rank 0 every 20 steps"],
)
@pytest.mark.parametrize(("noise", "seed"), [pytest.param(0.3, 1, marks=pytest.mark.slow), (0.95, 2)])
def test_noise_and_a_rank_that_does_a_little_more_raise_no_alarm(program: Paced, noise: float, seed: int) -> None:
    sim = SimCluster(2, 4, program=program, noise=noise, seed=seed)
    sim.run(120)
    assert sim.told == []
