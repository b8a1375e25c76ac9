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
ONLY_HERE = frozenset(
    {
        "freeze",
        "freeze over a lossy road",
        "freeze of rank 0",
        "an exception over a lossy road",
        "a forward through DDP on rank 0 alone",
        "twice as slow",
        "one rank's input is slow",
        "a long first step",
        "an agent that begins anew",
    }
)
"""Simulated lives in each run: the first shows that a verdict is told once and stands, the others nothing else plays.
All others are slow: the same fault has its test in tests/unit/app/diagnosis/test_scenarios_*.py, with its words."""
PATIENCE = 6.0
"""For a machine with other work, which also stands still now and then."""


def test_the_corpus_is_wide() -> None:
    assert len(FAULTS) >= 30
    assert len(HEALTHY) >= 8
    assert {scenario.name for scenario in ALL} > ONLY_HERE


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, id=one.name, marks=() if one.name in ONLY_HERE else pytest.mark.slow) for one in ALL],
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
