"""250 runs in which a rank ends, drawn by rule: its cause is named with its rank, and nothing that is not so.

One of three has another cause than what is beside it (`generator.end_kinds.OPPOSITES`). A few are in every run, the
others are slow. `RANKDECK_ENDS=2000 pytest tests/corpus/generated/test_ends.py -m slow` plays more.
"""

from __future__ import annotations

import os

import pytest

from tests.corpus.generator.end_kinds import BESIDE, ENDS, OPPOSITES
from tests.corpus.generator.ends import play, run_of, table

NUM_RUNS = int(os.environ.get("RANKDECK_ENDS", "250"))
NUM_IN_EACH_RUN = 4
NUM_TOGETHER = 25


def test_ends_and_opposites_of_all_kinds_are_drawn() -> None:
    runs = [run_of(seed) for seed in range(NUM_RUNS)]

    assert {run.name for run in runs} == {*ENDS, *OPPOSITES}
    assert {name for run in runs if run.is_cause for name in run.beside} == set(BESIDE)
    assert 0.25 * NUM_RUNS < sum(not run.is_cause for run in runs) < 0.45 * NUM_RUNS
    assert {run.has_nccl for run in runs} == {True, False}
    assert {run.rank for run in runs} == set(range(8))


@pytest.mark.parametrize("seed", range(NUM_IN_EACH_RUN))
def test_the_cause_of_an_end_is_named_and_no_other(seed: int) -> None:
    outcome = play(run_of(seed))

    assert outcome.is_right, outcome


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_RUNS, NUM_TOGETHER))
def test_all_causes_of_ends_are_named_and_none_is_false(first: int) -> None:
    outcomes = [play(run_of(seed)) for seed in range(first, min(first + NUM_TOGETHER, NUM_RUNS))]

    assert [outcome for outcome in outcomes if not outcome.is_right] == [], "\n".join(table(outcomes))
