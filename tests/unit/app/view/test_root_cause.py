"""Which node's word on a failure is the job's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from agent.wire.jobs import JobState
from agent.wire.logs import RootCause
from app.diagnosis.diagnoser import Diagnoser
from app.model.cluster import Cluster
from app.view.summary import headline_hint, status_object
from app.view.view import View
from tests.support.node_reports import dead_worker, job_status, node_report

if TYPE_CHECKING:
    from agent.wire.reports import WorkerReport
    from app.view.rows import RootCauseRow

OWN = RootCause(1, "exited with code 1", "ValueError: x", "RuntimeError: y", "train.py:3 in f", "one\n\ttwo", age_s=2.0)
LOST = RootCause(3, "exited with code 1", "RuntimeError: Connection closed by peer", is_consequence=True, age_s=5.0)


@pytest.mark.parametrize(
    ("cause", "state", "next_step"),
    [
        (OWN, JobState.FAILED, "see the logs of rank 1: rankdeck logs job --rank 1"),
        (RootCause(-1, "the launcher exited with code 2"), JobState.FAILED, "rankdeck logs job --rank launcher"),
        (RootCause(-1, "the launcher was killed by SIGKILL"), JobState.FAILED, "somebody on a did it, or a memory"),
        (None, JobState.FAILED, ""),
        (OWN, JobState.RUNNING, ""),
    ],
)
def test_a_failure_without_a_verdict_has_a_next_step(cause: RootCause | None, state: JobState, next_step: str) -> None:
    cluster = Cluster(["a"])
    status = msgspec.structs.replace(job_status(0), state=state, root_cause=cause)
    cluster.apply("a", node_report(1, workers=[], jobs=[status]), 100.0)
    found = headline_hint(View(cluster, Diagnoser().observe(cluster, 100.0), 100.0))
    assert (next_step in found, bool(found)) == (True, bool(next_step)), found


def told(first: RootCause | None, second: RootCause | None, *workers: Any) -> RootCauseRow | None:
    """Return what a console says when two nodes have told these."""
    cluster, diagnoser = Cluster(["a", "b"]), Diagnoser()
    for node, first_rank, cause in (("a", 0, first), ("b", 2, second)):
        status = msgspec.structs.replace(job_status(first_rank), state=JobState.FAILED, root_cause=cause)
        mine = [worker for worker in workers if worker.rank in (first_rank, first_rank + 1)]
        cluster.apply(node, node_report(1, workers=mine, jobs=[status]), 100.0)
    view = View(cluster, diagnoser.observe(cluster, 200.0), 200.0)
    job = view.job()
    assert job is not None
    assert status_object(view)["jobs"][0]["root_cause"] == (
        None if job.root_cause is None else msgspec.to_builtins(job.root_cause)
    )
    return job.root_cause


def test_the_detail_of_a_failed_job_names_its_root_cause_and_no_victim() -> None:
    def detail(*causes: RootCause | None, workers: tuple[WorkerReport, ...] = (), end: str = "") -> str:
        cluster = Cluster(["a", "b"])
        for node, first_rank, cause in zip("ab", (0, 2), causes, strict=True):
            failed = {"state": JobState.FAILED, "detail": f"rank {first_rank} exited with code 1: RuntimeError: [/x"}
            failed["detail"] = end or failed["detail"]
            status = msgspec.structs.replace(job_status(first_rank), root_cause=cause, **failed)
            mine = [worker for worker in workers if worker.rank in (first_rank, first_rank + 1)]
            cluster.apply(node, node_report(1, workers=mine, jobs=[status]), 100.0)
        row = View(cluster, Diagnoser().observe(cluster, 200.0), 200.0).job()
        assert row is not None
        return row.detail

    victim = msgspec.structs.replace(LOST, rank=0)
    killed = RootCause(3, "was killed by SIGKILL", age_s=1.0)
    assert detail(victim, killed) == "rank 3 on b was killed by SIGKILL"
    assert detail(None, None) == "rank 0 exited with code 1: RuntimeError: [/x", "no cause is known"
    launcher = RootCause(-1, "the launcher exited with code 1", age_s=9.0)
    assert detail(None, launcher).startswith("rank 0 exited")
    by_signal = RootCause(-1, "the launcher was killed by SIGKILL", age_s=9.0)
    assert detail(None, by_signal, end=f"rank 0 exited with code 1: {LOST.exception}") == (
        "on b the launcher was killed by SIGKILL"
    )
    assert detail(by_signal, None, end=by_signal.end) == "on a the launcher was killed by SIGKILL"
    left_early = dead_worker(3, code=0, age_s=7.0)
    lost = dead_worker(0, code=1, error=LOST.exception, age_s=5.0)
    assert detail(victim, None, workers=(left_early, lost)).startswith("rank 3 on b finished (exit code 0)")


def rank_of(row: RootCauseRow | None) -> int | None:
    assert row is not None
    return row.rank


def test_a_job_without_a_failure_has_no_cause() -> None:
    assert told(None, None) is None


def test_a_cause_is_told_in_a_sentence_and_with_its_lines() -> None:
    row = told(OWN, None)
    assert row is not None
    assert row.text == "rank 1 on a exited with code 1: ValueError: x (then RuntimeError: y); at train.py:3 in f"
    assert row.traceback == ["one", "    two"]
    assert (row.node, row.rank, row.is_consequence) == ("a", 1, False)


def test_who_lost_another_is_no_cause_though_it_failed_earlier() -> None:
    assert rank_of(told(OWN, LOST)) == rank_of(told(OWN, None)) == 1


def test_the_first_of_two_nodes_is_told_by_ages() -> None:
    later = msgspec.structs.replace(OWN, rank=3, age_s=1.0)
    earlier = msgspec.structs.replace(OWN, rank=3, age_s=3.0)
    assert rank_of(told(OWN, later)) == 1
    assert rank_of(told(OWN, earlier)) == 3


def test_a_rank_that_a_verdict_blames_comes_first() -> None:
    earlier = msgspec.structs.replace(OWN, rank=3, age_s=3.0)
    assert rank_of(told(OWN, earlier, dead_worker(1, code=1, error="ValueError: x", age_s=3.5))) == 1


def test_a_launcher_is_told_when_no_rank_is() -> None:
    launcher = RootCause(-1, "the launcher exited with code 1", "OSError: z", age_s=9.0)
    row = told(launcher, None)
    assert row is not None
    assert (row.rank, row.text) == (None, "on a the launcher exited with code 1: OSError: z")
    assert rank_of(told(launcher, msgspec.structs.replace(OWN, rank=3))) == 3


def test_a_victim_is_told_as_one_unless_something_else_is_to_blame() -> None:
    row = told(None, LOST)
    assert row is not None
    assert row.is_consequence
    left_early = dead_worker(0, code=0, age_s=7.0)
    victim = dead_worker(3, code=1, error=LOST.exception, age_s=5.0)
    assert told(None, LOST, left_early, victim) is None


@pytest.mark.parametrize("payload", ["\x1b]52;c;aGk=\x07", "\u202e", "[/x]", "\r\n", "\x9b2J"])
def test_what_a_rank_wrote_is_cleaned(payload: str) -> None:
    row = told(RootCause(1, payload, payload, payload, payload, f"{payload}\n{payload}"), None)
    assert row is not None
    for text in (row.end, row.exception, row.outer, row.where, row.text, *row.traceback):
        assert text.isprintable()


def test_a_traceback_of_very_many_lines_is_cut() -> None:
    row = told(RootCause(1, traceback="\n" * 16_000), None)
    assert row is not None
    assert len(row.traceback) == 1000
