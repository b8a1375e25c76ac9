"""What nodes remember of several jobs: the events of each, whichever is shown now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agent.wire.digest import frame_of
from agent.wire.jobs import JobState
from agent.wire.reports import ProcessState
from app.diagnosis.causes import Severity
from app.diagnosis.rank_facts import Thresholds
from app.recording.events import EventKind, EventLog
from app.recording.playback import ReplayModel
from tests.support.node_reports import group_report, job_status, node_report, rank_report, worker_report

if TYPE_CHECKING:
    from agent.wire.jobs import JobStatus
    from agent.wire.reports import WorkerReport
    from app.recording.events import Event

BEGIN_S = 5_000.0


def status(job_id: str, age_s: float, **fields: Any) -> JobStatus:
    return job_status(job_id=job_id, world_size=2, num_nodes=1, age_s=age_s, **({"state_s": age_s} | fields))


def workers(job_id: str, seq: int, *, frozen: int | None = None) -> list[WorkerReport]:
    """Return two ranks that train; one of them may be frozen."""
    reports = [rank_report(rank, 2, job_id=job_id, step=seq, groups=[group_report(seq)]) for rank in range(2)]
    states = [ProcessState.FROZEN if rank == frozen else ProcessState.RUNNING for rank in range(2)]
    return [worker_report(rank, reports[rank], process=states[rank], job_id=job_id) for rank in range(2)]


def remembered(job_id: str, *, is_of_all: bool = True) -> ReplayModel:
    """Return a past of 60 s: of `first` rank 1 is frozen from 10 to 15 s, `next` starts at 20 s, `first` ends at 30 s.

    Job `old` had ended an hour before.
    """
    replay = ReplayModel(["n0"], Thresholds(), job_id=job_id, is_excerpt=True, is_of_all=is_of_all)
    for seq in range(1, 300):
        age_s = seq * 0.2
        is_over = age_s >= 30
        how: dict[str, Any] = (
            {"state": JobState.STOPPED, "state_s": age_s - 30, "stop_s": age_s - 29} if is_over else {}
        )
        jobs = [status("first", 700 + age_s, **how), status("old", 5e3, state=JobState.FAILED, state_s=3600.0)]
        ranks = [] if is_over else workers("first", seq, frozen=1 if 10 <= age_s < 15 else None)
        if age_s >= 20:
            jobs.append(status("next", age_s - 20))
            ranks += workers("next", seq, frozen=0 if age_s >= 50 else None)
        replay.receive("n0", frame_of(node_report(seq + 1000, jobs, ranks)), BEGIN_S + age_s)
        replay.look(BEGIN_S + age_s)
    return replay


def told(events: list[Event], job_id: str) -> list[tuple[EventKind, Severity, int]]:
    """Return kinds, severities and times of a job's events, but for notes."""
    notes = {EventKind.NOTE, EventKind.BESIDE}
    of_it = [event for event in events if event.job_id == job_id and event.kind not in notes]
    return [(event.kind, event.severity, round(event.at_s - BEGIN_S)) for event in of_it]


def test_each_job_has_its_own_events_whichever_is_shown() -> None:
    first = [
        (EventKind.JOB, Severity.OK, -700),
        (EventKind.VERDICT, Severity.CRITICAL, 10),
        (EventKind.OVER, Severity.OK, 15),
        (EventKind.JOB, Severity.QUIET, 30),
    ]
    following = [(EventKind.JOB, Severity.OK, 20), (EventKind.VERDICT, Severity.CRITICAL, 50)]
    for shown in ("first", "next"):
        past = remembered(shown)
        whole = EventLog().reaching_back(past.events, BEGIN_S + 60, past.events_beside)

        events = list(whole.latest_first())[::-1]
        assert [event.at_s for event in events] == sorted(event.at_s for event in events)
        assert (told(events, "first"), told(events, "next")) == (first, following), shown
        assert "old" not in {event.job_id for event in events}, "what ended long before is no event of this time"
        (begun,) = [event for event in events if event.text.startswith("from before this moment")]
        assert begun.at_s - BEGIN_S < 1


def test_without_the_wish_the_events_are_of_the_job_that_is_shown_alone() -> None:
    past = remembered("next", is_of_all=False)

    assert past.events_beside == []
    of_first = [event for event in past.events.latest_first() if event.job_id == "first"]
    assert {event.kind for event in of_first} == {EventKind.BESIDE}
