"""The same moment gives the same verdict, whether somebody has looked on all along or has just come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from app.diagnosis.causes import Severity
from tests.corpus.scenarios import ALL, Scenario
from tests.support.long_tests import one_in
from tests.support.memories import replayed
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.diagnosis.causes import Cause


def alarms_of_who_has_just_come(sim: SimCluster) -> set[tuple[Cause, tuple[int, ...]]]:
    verdicts = replayed(sim).verdicts
    return {(verdict.cause, verdict.culprits) for verdict in verdicts if verdict.severity is not Severity.QUIET}


@pytest.mark.parametrize("scenario", one_in(12, ALL, lambda one: one.name))
def test_who_has_just_come_says_what_is_said_by_who_looked_on(scenario: Scenario) -> None:
    sim = SimCluster(seed=7, **scenario.cluster)  # type: ignore[arg-type]
    if scenario.step:
        sim.run_to_step(scenario.step)
    scenario.strike(sim)
    if scenario.expected:
        sim.run_until(lambda: scenario.expected <= sim.alarming, scenario.within_s + 1.0, "the verdict")
    for seconds in (2.0, scenario.watch_s)[not scenario.expected :]:
        sim.run(seconds)
        assert alarms_of_who_has_just_come(sim) == sim.alarming
