"""The jobs that this node knows, each by its id with what it holds here; their records on disk follow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from agent.jobs.record import JobRecords, read_jobs, record_of
from agent.wire.jobs import ENDED_STATES
from agent.wire.replies import RefusalReason, Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.jobs.job_memory import JobMemory
    from agent.jobs.launch import Launch
    from agent.jobs.rank_watch import RankWatch
    from agent.jobs.record import JobRecord
    from agent.state_dir import StateDir

MAX_ENDED_JOBS = 16
"""Ended jobs that a node goes on to report; the directories of older ones are kept, and left to people."""


class KnownJobs:
    """By id, in the order of their preparation; lives on the event loop's thread."""

    def __init__(self, state_dir: StateDir, watch: RankWatch) -> None:
        """`watch` looks at the ranks of a job for as long as it is known."""
        self._state_dir = state_dir
        self._watch = watch
        self._launches: dict[str, Launch] = {}
        self._records = JobRecords(state_dir.jobs_dir)
        self.sought: set[str] = set()
        """Jobs of an earlier agent whose shims live and have not said yet who they are."""

    def __iter__(self) -> Iterator[Launch]:
        """Go over all of them as they are now, whatever becomes of them meanwhile."""
        return iter(list(self._launches.values()))

    def __getitem__(self, job_id: str) -> Launch:
        return self._launches[job_id]

    def get(self, job_id: str) -> Launch | None:
        """Return a job, None where it is not known."""
        return self._launches.get(job_id)

    def unknown(self, job_id: str) -> Refused:
        """Return that a job is not known, and which are."""
        known = ", ".join(self._launches) or "none"
        return Refused(RefusalReason.UNKNOWN_JOB, f"there is no job {job_id} on this node; those here: {known}")

    @property
    def shim_pids(self) -> set[int]:
        """The processes above those of the jobs that run."""
        return {launch.shim.pid for launch in self if launch.shim is not None}

    def read(self) -> list[JobRecord]:
        """Return what an earlier agent has left: the newest of those that have ended, then those that may go on.

        Raises:
            StateDirError: A newer agent wrote it.
        """
        records = read_jobs(self._state_dir.jobs_dir)
        ended = [record for record in records if record.memory.state in ENDED_STATES]
        return [*ended[-MAX_ENDED_JOBS:], *(record for record in records if record not in ended)]

    def take_over(self, launch: Launch, memory: JobMemory) -> None:
        """Know a job of an earlier agent, whose record says so much."""
        self._records.take_over(memory)
        self._put(launch)

    def take_in(self, launch: Launch) -> Refused | None:
        """Know a job that has been prepared, in the place of its last attempt; return why that cannot be, or None."""
        launch.before = self._launches.get(launch.job_id)
        if refused := self.keep(launch):
            launch.before = None
            launch.close()
            self._state_dir.remove_attempt(launch.job_id, launch.job.spec.attempt)
            return refused
        self._forget(launch.job_id)
        ended = [one.job_id for one in self if one.job.has_ended]
        for job_id in ended[: max(0, len(ended) - MAX_ENDED_JOBS + 1)]:
            self._forget(job_id)
            self._records.forget(job_id)
        self._put(launch)
        return None

    def take_back(self, launch: Launch) -> None:
        """Drop a job that has been prepared and what it has on disk: its last attempt is known again."""
        job_id = launch.job_id
        self._forget(job_id)
        self._records.forget(job_id)
        self._state_dir.remove_job_dir(job_id, launch.job.spec.attempt)
        if before := launch.before:
            self._put(before)
            self.keep(before)

    def keep(self, launch: Launch) -> Refused | None:
        """Bring a job's record up to date; return why that cannot be done, or None."""
        before = None if launch.before is None else record_of(launch.before.job, launch.before.address)
        return self._records.keep(launch.job, launch.address, time.monotonic(), before)

    def close(self) -> None:
        """Let go of everything; what runs goes on."""
        for launch in self:
            launch.close()

    def _put(self, launch: Launch) -> None:
        self._launches[launch.job_id] = launch
        self._watch.admit(launch.job)

    def _forget(self, job_id: str) -> None:
        launch = self._launches.pop(job_id, None)
        if launch:
            self.sought.discard(job_id)
            launch.close()
            self._watch.forget(job_id)
