"""An incident is kept once it is certain, and once."""

from __future__ import annotations

from app.diagnosis.causes import Cause, Severity
from app.recording.incident_recorder import AFTER_S, AGAIN_S, LIMITED_S, MAX_INCIDENTS, SETTLE_S, Incidents
from tests.support.recordings import verdict


def test_a_verdict_that_stands_is_an_incident_once() -> None:
    incidents = Incidents()
    incidents.see_alive(("demo", attempt) for attempt in range(100))

    assert incidents.begun([verdict()], 10.0) == []
    (incident,) = incidents.begun([verdict()], 10.0 + SETTLE_S)
    assert (incident.job_id, incident.attempt, incident.cause) == ("demo", 0, Cause.FROZEN)
    assert incident.text.startswith("rank 2 on demo-1 is frozen")
    for second in range(5000):
        assert incidents.begun([verdict(culprits=(2, 3))], 12.0 + second) == [], "it lasts, and grows: it is the same"


def test_one_that_flickers_and_one_that_only_warns_are_none() -> None:
    incidents = Incidents()
    incidents.see_alive(("demo", attempt) for attempt in range(100))
    for second in range(20):
        now_s = 10.0 + 0.9 * second
        assert incidents.begun([verdict()] if second % 2 else [], now_s) == []
        assert incidents.begun([verdict(Cause.STRAGGLER, Severity.WARNING)] * (1 - second % 2), now_s) == []


def test_another_cause_another_attempt_and_a_later_time_are_others() -> None:
    incidents = Incidents()
    incidents.see_alive(("demo", attempt) for attempt in range(100))
    for begun_s, found in ((10.0, verdict()), (30.0, verdict(Cause.EXITED)), (50.0, verdict(attempt=1))):
        incidents.begun([found], begun_s)
        assert len(incidents.begun([found], begun_s + 2.0)) == 1

    incidents.begun([], 53.0)
    incidents.begun([verdict()], 53.0 + AGAIN_S)
    assert len(incidents.begun([verdict()], 53.0 + AGAIN_S + SETTLE_S)) == 1


def test_causes_that_follow_at_once_are_in_the_file_of_the_first() -> None:
    incidents = Incidents()
    incidents.see_alive([("demo", 0), ("other", 0)])
    both = [verdict(for_s=30.0, waited_s=31.0), verdict(Cause.MISMATCH)]
    elsewhere = verdict(job="other")
    incidents.begun(both, 10.0)

    assert [(one.cause, one.stood_s) for one in incidents.begun([*both, elsewhere], 11.0)] == [(Cause.FROZEN, 31.0)]
    (other,) = incidents.begun([*both, elsewhere], 12.0)
    assert other.job_id == "other"
    assert incidents.begun(both, 12.0 + 2 * AFTER_S) == []


def test_a_session_that_goes_on_failing_does_not_fill_the_disk() -> None:
    incidents = Incidents()
    incidents.see_alive(("demo", attempt) for attempt in range(100))
    num_kept, limited = 0, []
    for attempt in range(3 * MAX_INCIDENTS):
        incidents.begun([verdict(attempt=attempt)], 10.0 * attempt)
        num_kept += len(incidents.begun([verdict(attempt=attempt)], 10.0 * attempt + 5.0))
        limited.append(incidents.is_limited)
    assert num_kept == MAX_INCIDENTS
    assert limited == [False] * MAX_INCIDENTS + [True] * 2 * MAX_INCIDENTS

    lasting = [verdict(attempt=3 * MAX_INCIDENTS)]
    assert incidents.begun(lasting, LIMITED_S) == incidents.begun(lasting, LIMITED_S + 4.9) == []
    assert [one.attempt for one in incidents.begun(lasting, LIMITED_S + 5.0)] == [3 * MAX_INCIDENTS]
    assert not incidents.is_limited


def test_incidents_far_from_each_other_are_kept_for_as_long_as_a_session_lasts() -> None:
    incidents = Incidents()
    incidents.see_alive(("demo", attempt) for attempt in range(100))
    num_kept = 0
    for attempt in range(2 * MAX_INCIDENTS):
        for second in (0.0, SETTLE_S):
            begun = incidents.begun([verdict(attempt=attempt)], 1.1 * LIMITED_S / MAX_INCIDENTS * attempt + second)
            num_kept += len(begun)
    assert num_kept == 2 * MAX_INCIDENTS
