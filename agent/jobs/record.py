"""The record of a job on disk, `jobs/ID/job.json`: what an agent must know of a job that an earlier one has started.

`JobRecord` is the state machine as it was, with what shows whether it still counts. It is written whole or not at all,
before what it describes is done: the next agent finds a job at most one step further than its record.

`KnownJobs` holds the jobs that this node knows, and keeps their records up to date.

What the ranks of a job were last reported to do, and how each of them ended, is in a file of its own, written once the
job has ended: `jobs/ID/ATTEMPT/ranks.msgpack`. More may become known in the seconds after: datagrams that wait, file
systems and GPUs that are looked at. Ages in it are as of `SETTLED_S` after the job's end, so that it changes with
nothing else, and the record dates it. Without a file that can be read, the ends that the launcher reports are known
(`RankWatch.note_unseen`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agent.errors import StateDirError, log_line
from agent.files import read_regular
from agent.jobs.job import Job  # noqa: TC001 - msgspec looks at it
from agent.processes.shim import write_record
from agent.state_dir import RANKS_NAME, RECORD_NAME
from agent.wire.commands import RefusalReason, Refused
from agent.wire.jobs import ENDED_STATES, JobState
from agent.wire.reports import MAX_NODE_REPORT_BYTES, READABLE_VERSIONS, WIRE_VERSION, ProcessState, WorkerReport
from agent.wire.secret_mask import masked_spec
from ddpcore.wire import DECODE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.jobs.launch import Launch
    from agent.jobs.rank_watch import RankWatch
    from agent.state_dir import StateDir

RECORD_VERSION = 1
MAX_RECORD_BYTES = 2**21
WRITE_AGAIN_S = 1.0
"""Seconds between attempts to write to a disk that refuses."""
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class _Version(msgspec.Struct, frozen=True):
    record_version: int


class JobRecord(msgspec.Struct, frozen=True):
    """One job, as it was at its last change."""

    record_version: int
    boot_id: str
    """The machine's run in which it was written: processes and the clock do not outlive that."""
    job: Job = msgspec.field(name="memory")
    address: tuple[int, str] | None = None
    """Family and address on which the job's store listens; None for all nodes but the first of a job that is not
    elastic."""
    before: JobRecord | None = None
    """The ended attempt that is known again unless this one starts; None once it has started."""
    clock_began_s: float | None = None
    """Wall time at which the clock of its times read 0; None in old records."""

    @property
    def is_of_this_boot(self) -> bool:
        """False after a reboot."""
        return self.boot_id == current_boot_id()

    def job_now(self) -> Job:
        """Return the job with times by the clock of this boot; after a reboot they are as good as the wall clock."""
        if self.is_of_this_boot:
            return self.job
        ahead_s = time.monotonic() - self.job.since_s  # it has just changed, unless the wall clock shows an age
        if self.clock_began_s is not None:
            ahead_s = min(ahead_s, self.clock_began_s - _clock_began_s())
        return self.job.of_another_boot(ahead_s)


def current_boot_id() -> str:
    """Return the id of this run of the machine. Source: random(4)."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def _clock_began_s() -> float:
    return time.time() - time.monotonic()  # noqa: TID251 - records outlive the boot


def record_of(launch: Launch) -> JobRecord:
    """Return what is written of a job: its secrets too, until it has ended."""
    job, before = launch.job, None
    if job.state is JobState.PREPARED and launch.before is not None:
        before = record_of(launch.before)
    if job.has_ended:
        job = msgspec.structs.replace(job, spec=masked_spec(job.spec))
    return JobRecord(RECORD_VERSION, current_boot_id(), job, launch.address, before, _clock_began_s())


def read_jobs(jobs_dir: Path) -> list[JobRecord]:
    """Return the records of all jobs, in the order of their last changes. A damaged one is set aside, and logged.

    Raises StateDirError if a newer agent wrote them, or the disk does not give them.
    """
    found = []
    for path in sorted(jobs_dir.glob(f"*/{RECORD_NAME}")):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_RECORD_BYTES)
            version = msgspec.json.decode(text, type=_Version).record_version
            if version > RECORD_VERSION:
                raise StateDirError(
                    f"{path} is of version {version}, this agent knows {RECORD_VERSION}: start the newer agent again"
                )
            found.append(msgspec.json.decode(text, type=JobRecord))
        except OSError as error:
            raise StateDirError(f"cannot read {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            aside = path.with_suffix(".damaged")
            log_line(f"{path} cannot be read, it is now {aside.name}; what of the job runs goes on unseen: {error}")
            path.rename(aside)
    return sorted(found, key=lambda record: (record.is_of_this_boot, record.job.since_s))


SETTLED_S = 60.0
"""Seconds after a job's end from which no more becomes known of its ranks."""


class _Ranks(msgspec.Struct, frozen=True):
    """Ranks of a job on this node that have ended."""

    wire_version: int
    workers: list[WorkerReport]


_ranks_decoder = msgspec.msgpack.Decoder(_Ranks)


def keep_ranks(launch: Launch, workers: list[WorkerReport]) -> None:
    """Write the last reports of an ended job's ranks, unless the disk has them, or they are more than a report holds.

    A disk that refuses is asked again when there is more to write.

    Args:
        launch: The job.
        workers: Ranks that have ended, with ages as of `SETTLED_S` after the job's end.
    """
    data = msgspec.msgpack.encode(_Ranks(WIRE_VERSION, workers)) if workers else b""
    if data == launch.kept_ranks or len(data) > MAX_NODE_REPORT_BYTES:
        return
    launch.kept_ranks = data
    try:
        write_record(str(launch.job_dir), RANKS_NAME, data)
    except OSError as error:
        problem = f"the next agent will not know what the ranks of job {launch.job_id} did last"
        log_line(f"{problem}: {launch.job_dir / RANKS_NAME} cannot be written: {error.strerror}")


def read_ranks(launch: Launch) -> list[WorkerReport]:
    """Return what `keep_ranks` was given for a job; nothing where there is none, or none that can be read."""
    path = launch.job_dir / RANKS_NAME
    try:
        data = read_regular(path, MAX_NODE_REPORT_BYTES + 1)
        kept = _ranks_decoder.decode(data)
    except FileNotFoundError:
        return []
    except OSError as error:
        problem = error.strerror
    except DECODE_ERRORS as error:
        problem = str(error)
    else:
        problem = "" if kept.wire_version in READABLE_VERSIONS else f"it is of version {kept.wire_version}"
        if not problem:
            launch.kept_ranks = data
            return _own_ranks(kept.workers, launch.job)
    log_line(f"{path} cannot be read, what the ranks of job {launch.job_id} did last is lost: {problem}")
    return []


def _own_ranks(workers: list[WorkerReport], job: Job) -> list[WorkerReport]:
    """Return the reports of a job's ranks that have ended, one of each: a rank may have written into its directory."""
    own = {
        worker.rank: worker
        for worker in workers
        if (worker.job_id, worker.attempt) == (job.spec.job_id, job.attempt)
        and worker.rank in job.ranks
        and worker.exit is not None
        and worker.process is ProcessState.EXITED
    }
    return list(own.values())


MAX_ENDED_JOBS = 16
"""Ended jobs that a node still reports; the directories of older ones stay on disk."""


class KnownJobs:
    """Known jobs by id, in the order of their preparation; lives on the event loop's thread."""

    def __init__(self, state_dir: StateDir, watch: RankWatch) -> None:
        """`watch` looks at the ranks of a job for as long as it is known."""
        self._state_dir = state_dir
        self._watch = watch
        self._launches: dict[str, Launch] = {}
        self._written: dict[str, Job] = {}
        """Each job as its record on disk shows it."""
        self._unwritten: dict[str, Job] = {}
        """Each job as its record should show it, where the disk has refused that and the log has a line about it."""
        self._failed_at_s = float("-inf")
        self.sought: set[str] = set()
        """Jobs of an earlier agent whose shims live and have not named themselves yet."""

    def __iter__(self) -> Iterator[Launch]:
        """Iterate over all of them as they are now, even if some are forgotten during it."""
        return iter(list(self._launches.values()))

    def __getitem__(self, job_id: str) -> Launch:
        return self._launches[job_id]

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._launches

    def get(self, job_id: str) -> Launch | None:
        return self._launches.get(job_id)

    def unknown(self, job_id: str) -> Refused:
        """Return the refusal of an unknown job, with the ids of the known ones."""
        known = ", ".join(self._launches) or "none"
        return Refused(RefusalReason.UNKNOWN_JOB, f"there is no job {job_id} on this node; those here: {known}")

    @property
    def shim_pids(self) -> set[int]:
        """Pids of the shims of jobs that run, or of the launchers that have outlived theirs."""
        return {launch.shim.pid for launch in self if launch.shim and not launch.shim.is_killing}

    @property
    def kept_jobs(self) -> set[str]:
        """Jobs that run, also without a shim, and are not being killed as orphans are."""
        return {launch.job_id for launch in self if launch.shim and not launch.shim.is_killing}

    def read(self) -> list[JobRecord]:
        """Return an earlier agent's records: the latest of jobs that have ended, then those that may run.

        Raises StateDirError if a newer agent wrote them.
        """
        records = read_jobs(self._state_dir.jobs_dir)
        ended = [record for record in records if record.job.state in ENDED_STATES]
        return [*ended[-MAX_ENDED_JOBS:], *(record for record in records if record not in ended)]

    def take_over(self, launch: Launch) -> None:
        """Add a job of an earlier agent, as its record shows it."""
        self._written[launch.job_id] = msgspec.structs.replace(launch.job)
        self._put(launch)

    def take_in(self, launch: Launch) -> Refused | None:
        """Add a prepared job, in the place of its last attempt; return why that cannot be, or None."""
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
            self._forget_record(job_id)
        self._put(launch)
        return None

    def take_back(self, launch: Launch) -> None:
        """Drop a prepared job and what it has on disk: its last attempt is known again."""
        job_id = launch.job_id
        self._forget(job_id)
        self._forget_record(job_id)
        self._state_dir.remove_job_dir(job_id, launch.job.spec.attempt)
        if before := launch.before:
            self._put(before)
            self.keep(before)

    def keep(self, launch: Launch) -> Refused | None:
        """Bring a job's record up to date; return why that cannot be done, or None.

        A disk that refuses is tried again once a second; the log has one line for each change of the job.
        """
        job, job_id, now_s = launch.job, launch.job_id, time.monotonic()
        is_known = job == self._unwritten.get(job_id)
        if job == self._written.get(job_id) or (is_known and now_s < self._failed_at_s + WRITE_AGAIN_S):
            return None
        data = msgspec.json.encode(record_of(launch))
        try:
            write_record(str(self._state_dir.jobs_dir / job_id), RECORD_NAME, data)
        except OSError as error:
            problem = f"the record of job {job_id} cannot be written: {error.strerror}"
            if not is_known:
                log_line(problem)
            self._unwritten[job_id], self._failed_at_s = msgspec.structs.replace(job), now_s
            return Refused(RefusalReason.NO_SPACE, f"{problem}: make room")
        self._written[job_id] = msgspec.structs.replace(job)
        return None

    def close(self) -> None:
        """Release everything; jobs that run continue."""
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

    def _forget_record(self, job_id: str) -> None:
        self._written.pop(job_id, None)
        self._unwritten.pop(job_id, None)
