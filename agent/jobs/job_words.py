"""What a job's state is said to be: a sentence for people, empty when all is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.wire.jobs import JobState

if TYPE_CHECKING:
    from collections.abc import Collection

    from agent.jobs.job_memory import JobMemory, WorkerMemory

QUIET_START_S = 10.0
"""From a launcher's start to its ranks' nothing need be said: it imports torch."""


def detail(job: JobMemory, workers: Collection[WorkerMemory], now_s: float) -> str:
    """Say what a job is waiting for, or why it ended.

    Args:
        job: The job on this node.
        workers: Ranks whose processes have been seen in this attempt.
        now_s: Monotonic.
    """
    match job.state:
        case JobState.STOPPING if job.terminate_at_s is not None:
            return f"stopping after a step and a checkpoint; SIGTERM in {_left(job.terminate_at_s, now_s)}"
        case JobState.STOPPING:
            return f"stopping; what is left in {_left(job.kill_at_s, now_s)} is killed"
        case JobState.RESTARTING:
            left = job.spec.max_restarts - job.num_restarts
            return (
                f"{job.cause}; begins again in {_left(job.begin_again_at_s, now_s)}, "
                f"{left} of {job.spec.max_restarts} restarts left"
            )
        case JobState.FAILED | JobState.LOST:
            return job.cause
        case JobState.RUNNING:
            return _running(job, workers, now_s)
        case _:
            return ""


def _running(job: JobMemory, workers: Collection[WorkerMemory], now_s: float) -> str:
    running_s, num_exited = now_s - job.since_s, sum(worker.has_exited for worker in workers)
    if job.cause and job.spec.elastic_min_nodes and not job.is_abandoned:
        return f"{job.cause}; the launcher gathers the nodes anew, at least {job.spec.elastic_min_nodes}"
    if job.cause:
        return f"{job.cause}; waiting for the launcher to end the others"
    if not workers and running_s > QUIET_START_S:
        whom = "the other nodes" if job.spec.num_nodes > 1 else "torch"
        return f"no rank has been started for {running_s:.0f} s: the launcher waits for {whom}"
    if num_exited == job.spec.local_world_size:
        return "all ranks of this node have ended; the launcher waits for the other nodes"
    return ""


def _left(at_s: float | None, now_s: float) -> str:
    return f"{max(0.0, (at_s or now_s) - now_s):.0f} s"
