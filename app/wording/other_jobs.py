"""The jobs on the same nodes that are not the one that is shown: a row for each, and one line on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.rows import OtherJobRow, Severity
from app.safe_text import LINE_LIMIT, clean, clean_name
from app.words import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.diagnosis.diagnoser import Diagnosis
    from app.diagnosis.verdicts import Verdict
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel

MAX_JOBS_NAMED = 3
_BAD_ENDS = frozenset({"failed", "lost"})


def job_severity(state: str, verdicts: Sequence[Verdict]) -> Severity:
    """Return how much a job wants to be looked at.

    Args:
        state: As `JobModel.state` has it.
        verdicts: On the job, the worst first.
    """
    if state in _BAD_ENDS:
        return Severity.CRITICAL
    if state == "restarting":
        return Severity.WARNING
    if verdicts:
        return verdicts[0].severity
    return Severity.OK if state in ("running", "succeeded") else Severity.QUIET


def other_job_rows(cluster: Cluster, diagnosis: Diagnosis, shown: JobModel | None) -> list[OtherJobRow]:
    """Return a row for each job but the one that is shown, the latest start first."""
    others = [job for job in cluster.jobs.values() if job is not shown]
    return [_row(job, diagnosis, shown) for job in sorted(others, key=lambda job: -job.started_s)]


def _row(job: JobModel, diagnosis: Diagnosis, shown: JobModel | None) -> OtherJobRow:
    verdicts = diagnosis.jobs[job.job_id].verdicts if job.job_id in diagnosis.jobs else []
    state, job_id = job.state(), clean_name(job.job_id)
    worst = verdicts[0] if verdicts and verdicts[0].severity is not Severity.QUIET else None
    ended_s = max((share.began_s for share in job.shares.values()), default=0.0)
    has_failed_beside = state in _BAD_ENDS and shown is not None and ended_s > shown.started_s
    if worst is None or job.is_ended():
        how = state
    else:
        how = " ".join(filter(None, (worst.cause.replace("_", " "), ranks_text(worst.culprits))))
    return OtherJobRow(
        job_id=job_id,
        attempt=job.attempt,
        state=state,
        severity=job_severity(state, verdicts),
        cause=None if worst is None else worst.cause,
        culprits=[] if worst is None else list(worst.culprits),
        is_concurrent=not job.is_ended() or has_failed_beside,
        text=f"job {job_id}, {how}",
    )


def other_jobs_text(others: Sequence[OtherJobRow], shown: str, attach: str) -> str:
    """Return the line on other jobs: how they stand, and the command that shows one of them.

    Empty where no other job has been under way beside the one that is shown.
    """
    beside = [row for row in others if row.is_concurrent]
    if not beside:
        return ""
    named = [row.text for row in beside[:MAX_JOBS_NAMED]]
    if len(beside) > MAX_JOBS_NAMED:
        named.append(f"{len(beside) - MAX_JOBS_NAMED} more")
    command = attach.replace("JOB", beside[0].job_id) if len(beside) == 1 else attach
    also = f"job {shown} is shown; also on these nodes" if shown else "on these nodes"
    return clean(f"{also}: {'; '.join(named)}; {command}", LINE_LIMIT)
