"""What Slurm's own commands, where they are installed, know of a job and its nodes. Blocks, within bounds."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

from app.errors import AllocationEndedError, AppError, HostUnreachableError, SessionError, UsageError
from app.text import LINE_LIMIT, clean, clean_name

SLURM_S = 10.0
HOSTFILE_HINT = "name the hosts in a file: rankdeck init --hostfile FILE"
WAITING_STATES = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING", "RESIZING", "SUSPENDED", "STOPPED"})
RUNNING_STATES = frozenset({"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT"})
UNKNOWN_JOB = "Invalid job id"
"""Part of squeue's error for a job that it does not know, or no longer (22.05)."""
_NEXT = "squeue --me shows what runs"
_JOB_ID = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?")


class SlurmJob(NamedTuple):
    """A job as `squeue` shows it."""

    state: str
    """As Slurm writes it: RUNNING, PENDING, TIMEOUT, PREEMPTED, NODE_FAIL."""
    reason: str
    nodes: str
    """Its nodes as Slurm writes them; empty while it waits."""


def slurm_hostnames(nodes: str) -> list[str]:
    """Return the host names of a Slurm node list, expanded by Slurm itself.

    Raises:
        SessionError: Slurm is not here, does not answer, or does not know them.
    """
    return _slurm("scontrol", "show", "hostnames", "--", nodes).split()


def slurm_job_hosts(job_id: str) -> list[str]:
    """Return the host names of a running Slurm job, those of all tasks of a job array.

    Raises:
        SessionError: As `slurm_hostnames`.
        UsageError: That is no job id, or it has no nodes now.
    """
    if not _JOB_ID.fullmatch(job_id):
        raise UsageError(f"{clean(job_id)} is not the id of a Slurm job", "give its number, as squeue --me shows it")
    found = _jobs(job_id)
    nodes = ",".join(job.nodes for job in found if job.nodes)
    if not nodes:
        state = f"{found[0].state} ({found[0].reason})" if found else "not known to squeue"
        raise UsageError(f"Slurm job {job_id} is on no node: {clean(state)}", _NEXT)
    return list(dict.fromkeys(slurm_hostnames(nodes)))


def why_unreachable(job_id: str, host: str) -> AppError | None:
    """Return what Slurm reports of a job whose relay is gone; None when it runs, or nothing is known.

    Args:
        job_id: The job.
        host: Its first node, as far as known.
    """
    try:
        found = _jobs(job_id)
    except SessionError:
        return None
    if not found:
        return AllocationEndedError(host, f"Slurm job {job_id} has ended: squeue does not know it any more", _NEXT)
    state, reason, _ = found[0]
    because = f" ({clean_name(reason)})" if reason not in ("", "None", state) else ""
    if state in WAITING_STATES:
        return HostUnreachableError(host, f"Slurm job {job_id} waits: {clean_name(state)}{because}")
    if state in RUNNING_STATES:
        return None
    return AllocationEndedError(host, f"Slurm job {job_id} has ended: {clean_name(state)}{because}", _NEXT)


def _jobs(job_id: str) -> list[SlurmJob]:
    """Return a job, or the tasks of an array; none where Slurm does not know it. Raises as `slurm_hostnames`."""
    done = _run("squeue", "--noheader", "--states=all", "--format=%T|%r|%N", f"--jobs={job_id}")
    if done.returncode and UNKNOWN_JOB not in done.stderr:  # its controller may be away: that ends no job
        raise SessionError(f"squeue fails: {_why(done)}", "try: squeue --me")
    rows = [line.split("|") for line in done.stdout.splitlines()]
    return [SlurmJob(*(cell.strip() for cell in row)) for row in rows if len(row) == len(SlurmJob._fields)]


def _slurm(*argv: str) -> str:
    """Return what a command of Slurm prints; nothing is an error."""
    done = _run(*argv)
    if done.returncode or not done.stdout.split():
        raise SessionError(f"{argv[0]} does not know {clean(argv[-1])}: {_why(done)}", HOSTFILE_HINT)
    return done.stdout


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line of what a command reports: those before it led there."""
    return clean(done.stderr.strip().rpartition("\n")[2], LINE_LIMIT)


def _run(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; raises as `slurm_hostnames`."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=SLURM_S, check=False)
    except FileNotFoundError as error:
        raise SessionError(f"{argv[0]} is not installed here", "run this where Slurm is") from error
    except subprocess.TimeoutExpired as error:
        raise SessionError(f"{argv[0]} does not answer in {SLURM_S:.0f} s", HOSTFILE_HINT) from error
