"""When a cause of slowness began is an event: once, at its time, however often it comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from app.diagnosis.causes import Cause, Severity
from app.recording.events import CAUSE_GONE_S, Event, EventKind, EventLog
from app.view.because_text import because_rows
from app.view.view import View
from tests.support.sim import SimCluster, played_once
from tests.unit.app.view.test_because_words import HOT, verdict

if TYPE_CHECKING:
    from app.view.rows import VerdictRow

BEGAN_S = 240.0


class OneVerdict(View):
    """A view of a simulated job, with the verdicts of a test."""

    rows: list[VerdictRow]

    def verdicts(self) -> list[VerdictRow]:
        return self.rows


@played_once
def simulated() -> SimCluster:
    sim = SimCluster()
    sim.run(8)
    return sim


@pytest.fixture
def log() -> EventLog:
    return EventLog()


def observe(log: EventLog, now_s: float, *, has_cause: bool = True) -> None:
    sim = simulated()
    view = OneVerdict(sim.cluster, sim.diagnosis, now_s, "demo")
    row = sim_row()
    view.rows = [row if has_cause else replace(row, because=[])]
    log.observe(view)


def sim_row() -> VerdictRow:
    sim = simulated()
    sim.freeze(2)
    sim.run(2)
    (row,) = sim.verdicts()
    return replace(row, because=because_rows(verdict(HOT)), culprits=[3])


def causes(log: EventLog) -> list[Event]:
    return [event for event in log.latest_first() if event.kind is EventKind.CAUSE]


def test_a_cause_is_an_event_when_it_began(log: EventLog) -> None:
    observe(log, 1000.0)

    (event,) = causes(log)
    assert event.at_s == 1000.0 - BEGAN_S
    assert event.text == "GPU 3 of gpu2: slowed by heat; rank 3 is slow"
    assert (event.severity, event.ranks) == (Severity.WARNING, (3,))
    times = [log[index].at_s for index in range(len(log))]
    assert times == sorted(times), "it stands before the verdict"


def test_a_cause_that_comes_and_goes_is_one_event(log: EventLog) -> None:
    for turn in range(20):
        observe(log, 1000.0 + turn, has_cause=turn % 3 != 1)
    assert len(causes(log)) == 1

    observe(log, 1021.0 + CAUSE_GONE_S)
    assert len(causes(log)) == 2, "after long it is news"


def test_a_cause_that_the_past_has_is_no_news() -> None:
    past, own = EventLog(), EventLog()
    observe(past, 1000.0)
    observe(own, 1003.0)
    whole = own.reaching_back(past, 1001.0)
    assert len(causes(whole)) == 1

    observe(whole, 1004.0)
    assert len(causes(whole)) == 1
    quiet = EventLog()
    observe(quiet, 1000.0, has_cause=False)
    assert len(causes(own.reaching_back(quiet, 1001.0))) == 1, "it was not known before"


def test_a_verdict_that_names_its_culprits_later_is_not_over_in_between(log: EventLog) -> None:
    sim = simulated()
    row = replace(sim_row(), cause=Cause.MISMATCH, because=[])
    for now_s, culprits in ((10.0, []), (11.0, [3]), (12.0, [3])):
        view = OneVerdict(sim.cluster, sim.diagnosis, now_s, "demo")
        view.rows = [replace(row, culprits=culprits)]
        log.observe(view)

    told = [(event.kind, event.ranks) for event in log.latest_first() if event.kind is not EventKind.NODE]
    assert EventKind.OVER not in {kind for kind, _ in told}
    assert (EventKind.VERDICT, (3,)) in told
