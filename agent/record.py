"""The record of a job on disk: `jobs/ID/job.json`, what an agent must know of a job that an earlier one has started.

Written whole or not at all, before what it says is done: an agent killed at any moment has a successor that finds the
job at most one step further than its record says.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from agent.errors import StateDirError
from agent.job_memory import JobMemory  # noqa: TC001 - msgspec looks at it
from agent.shim import write_record

RECORD_NAME = "job.json"
RECORD_VERSION = 1
MAX_RECORD_BYTES = 2**21
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class _Version(msgspec.Struct, frozen=True):
    record_version: int


class JobRecord(msgspec.Struct, frozen=True):
    """One job, as it was when something last changed."""

    record_version: int
    boot_id: str
    """Of the machine's run in which it was written: processes and the clock do not outlive that."""
    memory: JobMemory
    address: tuple[int, str] | None = None
    """Family and address on which the job's store listens, if it does so on this node."""

    @property
    def is_of_this_boot(self) -> bool:
        """False after a reboot."""
        return self.boot_id == current_boot_id()


def current_boot_id() -> str:
    """Return what tells one run of this machine from another. Source: random(4)."""
    return BOOT_ID_PATH.read_text(encoding="ascii").strip()


def write_job(job_root: Path, memory: JobMemory, address: tuple[int, str] | None) -> None:
    """Write a job's record.

    Raises:
        OSError: It cannot be written; the last one still stands.
    """
    record = JobRecord(RECORD_VERSION, current_boot_id(), memory, address)
    write_record(str(job_root), RECORD_NAME, msgspec.json.encode(record).decode())


def read_jobs(jobs_dir: Path) -> list[JobRecord]:
    """Return the records of all jobs, in the order of their beginnings. One that is damaged is set aside, and said.

    Raises:
        StateDirError: A newer agent wrote them.
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
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            aside = path.with_suffix(".damaged")
            click.echo(f"agent: {path} cannot be read, it is now {aside.name}: {error}", err=True)
            path.rename(aside)
    return sorted(found, key=lambda record: record.memory.since_s)
