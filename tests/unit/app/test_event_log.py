"""What happened, as a simulated cluster lives through it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from app.event_log import MAX_EVENTS, EventKind, EventLog
from app.rows import Severity
from tests.support.sim import SimCluster

if TYPE_CHECKING:
    from app.event_log import Event


class Witness:
    """Looks at a simulated cluster as often as a console does."""

    def __init__(self, sim: SimCluster) -> None:
        self.sim = sim
        self.log = EventLog()

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.2)):
            self.sim.run(0.2)
            self.log.observe(self.sim.view())

    @property
    def events(self) -> list[Event]:
        return [self.log[index] for index in range(len(self.log))]

    def told(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]


@pytest.fixture
def witness() -> Witness:
    return Witness(SimCluster())


def test_nodes_come_up_and_a_job_runs(witness: Witness) -> None:
    witness.run(12)

    assert sorted(witness.told(EventKind.NODE)) == ["node demo-0: up", "node demo-1: up"]
    jobs = witness.told(EventKind.JOB)
    assert jobs[-1] == "job demo: running"
    assert len(jobs) == len(set(jobs)), "each state once"
    assert witness.told(EventKind.VERDICT) == []


def test_a_verdict_comes_and_goes_once(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(5)
    witness.sim.thaw(2)
    witness.run(5)

    (said,) = witness.told(EventKind.VERDICT)
    assert said.startswith("rank 2 on demo-1 is frozen (SIGSTOP)")
    (over,) = witness.told(EventKind.OVER)
    assert re.fullmatch(r"rank 2: no longer frozen, after [45]\.\d s", over)
    (verdict,) = [event for event in witness.events if event.kind is EventKind.VERDICT]
    assert verdict.severity is Severity.CRITICAL


def test_one_more_culprit_is_news_and_no_end(witness: Witness) -> None:
    witness.run(12)
    witness.sim.freeze(2)
    witness.run(3)
    witness.sim.freeze(3)
    witness.run(3)

    assert len(witness.told(EventKind.VERDICT)) == 2
    assert witness.told(EventKind.OVER) == []


def test_a_job_that_fails_says_why(witness: Witness) -> None:
    witness.run(12)
    witness.sim.kill(2)
    witness.run(20)

    assert any(text.startswith("job demo: failed, exit code 1") for text in witness.told(EventKind.JOB))
    (said,) = witness.told(EventKind.VERDICT)
    assert said.startswith("rank 2 on demo-1 was killed by SIGKILL")
    assert witness.told(EventKind.OVER) == []


def test_a_lost_node_is_told_with_its_way_there(witness: Witness) -> None:
    witness.run(12)
    witness.sim.lose_node(1)
    witness.run(10)

    assert witness.told(EventKind.NODE)[2:] == ["node demo-1: up, now stale", "node demo-1: stale, now lost"]


def test_what_is_done_is_told_clean_and_old_events_are_dropped() -> None:
    log = EventLog()
    for number in range(MAX_EVENTS + 3):
        log.tell(f"fault {number}\x1b[2J", float(number))

    assert (len(log), log.num_dropped) == (MAX_EVENTS, 3)
    assert "\x1b" not in log[0].text
    assert log[0].text.startswith("fault 3")
    assert log[len(log) - 1].at_s == MAX_EVENTS + 2
