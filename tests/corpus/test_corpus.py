"""Each scenario of the corpus brings its verdict, in time, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.corpus.real import REAL, RealScenario, play_real
from tests.corpus.scenarios import ALL, FAULTS, HEALTHY, Scenario, play

if TYPE_CHECKING:
    from pathlib import Path

IN_EACH_RUN = ("freeze",)
"""Of those on real ranks; the others are slow."""
ALSO_IN_UNIT = frozenset(
    {
        "training, checkpoints and evaluations",
        "noise, loss and disorder",
        "ranks that share cores",
        "slow checkpoints",
        "long evaluations",
        "rank 0 does a little more",
        "nodes that differ a little",
        "one hiccup",
        "a slow import",
    }
)
"""Minutes of healthy lives, of which test_scenarios_healthy.py and test_scenarios_standing.py of
tests/unit/app/diagnosis have their own in each run: here they are slow."""
PATIENCE = 6.0
"""For a machine with other work, which also stands still now and then."""


def test_the_corpus_is_wide() -> None:
    assert len(FAULTS) >= 30
    assert len(HEALTHY) >= 8
    assert {scenario.name for scenario in HEALTHY} > ALSO_IN_UNIT


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name, marks=pytest.mark.slow if one.name in ALSO_IN_UNIT else ()) for one in ALL],
)
def test_the_verdict_is_right(scenario: Scenario) -> None:
    outcome = play(scenario, seed=7)
    assert outcome.is_right, outcome


# Those that want a quiet machine are for `python -m tests.corpus --real`, as are the times to the verdict.
@pytest.mark.ranks
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(one, id=one.name, marks=() if one.name in IN_EACH_RUN else pytest.mark.slow)
        for one in REAL
        if not one.needs_quiet
    ],
)
def test_the_verdict_on_real_ranks_is_right(scenario: RealScenario, tmp_path: Path) -> None:
    outcome = play_real(scenario, tmp_path, PATIENCE)
    assert outcome.is_right, outcome
