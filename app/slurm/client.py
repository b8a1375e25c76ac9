"""What Slurm's own commands, where they are installed, know of a job and its nodes. Blocks, within bounds."""

from __future__ import annotations

import os
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
_JOB_ID = re.compile(r"[0-9]{1,10}([_+][0-9]{1,10})?")
MAX_NAMED = 8
"""Jobs that an error names."""


class _Ending(NamedTuple):
    """Why Slurm ends a job."""

    text: str
    hint: str


_ENDINGS = {
    "TIMEOUT": _Ending("its time limit is over", "ask for more with --time; what has a checkpoint goes on from there"),
    "DEADLINE": _Ending("its deadline has passed", "see --deadline of sbatch"),
    "PREEMPTED": _Ending("a job of higher priority has preempted it", "sbatch --requeue starts it again by itself"),
    "NODE_FAIL": _Ending("a node has failed", "submit it again, with --exclude and the node's name if it stays down"),
    "OUT_OF_MEMORY": _Ending("it used more memory than it asked for", "ask for more with --mem"),
    "CANCELLED": _Ending("it was cancelled, as by scancel", _NEXT),
}
"""Source: squeue(1), JOB STATE CODES."""
ENDED_STATES = frozenset({"COMPLETED", "FAILED", "BOOT_FAIL", *_ENDINGS})
_FIELD = re.compile(r"(\w+)=(\S*)")
_NOT_SET = frozenset({"", "None", "N/A", "Unknown"})
_NO_REASON = frozenset({"", "none"})


class SlurmJob(NamedTuple):
    """A job as `squeue` shows it."""

    state: str
    """As Slurm writes it: RUNNING, PENDING, TIMEOUT, PREEMPTED, NODE_FAIL."""
    reason: str
    user: str
    """Name of the user whose job it is."""
    user_id: str
    nodes: str
    """Its nodes as Slurm writes them; empty while it waits."""
    name: str
    """Its id as users know it: 4711, 4711_3 of a job array, 4711+1 of a heterogeneous job."""
    id: str
    """Its own number: that of a task of an array is another one than the array's."""

    @property
    def step_id(self) -> str:
        """SLURM_JOB_ID in its steps: of a heterogeneous job's components all have that of the first (22.05, seen)."""
        first, plus, _ = self.name.partition("+")
        return first if plus else self.id

    @property
    def why(self) -> str:
        """Its state, with Slurm's reason where that adds something; safe to print."""
        because = f" ({clean_name(self.reason)})" if self.reason not in ("", "None", self.state) else ""
        return clean_name(self.state) + because


class SlurmNode(NamedTuple):
    """A node as `sinfo` shows it."""

    state: str
    """As Slurm writes it in full: mixed, draining, down*."""
    reason: str
    """What an administrator, or Slurm, noted; empty without a note."""


def slurm_hostnames(nodes: str) -> list[str]:
    """Return the host names of a Slurm node list, expanded by Slurm itself.

    Raises:
        SessionError: Slurm is not here, does not answer, or does not know them.
    """
    return _slurm("scontrol", "show", "hostnames", "--", nodes).split()


def slurm_job_hosts(job_id: str) -> list[str]:
    """Return the host names of a Slurm job that has not ended, those of all such tasks of a job array.

    Raises:
        SessionError: As `slurm_hostnames`.
        UsageError: That is no job id, or it has no nodes now.
    """
    nodes = ",".join(job.nodes for job in _jobs_on_nodes(job_id, or_ended=False))
    return list(dict.fromkeys(slurm_hostnames(nodes)))


def slurm_job(job_id: str) -> SlurmJob:
    """Return the one job of an id that has not ended, else that has: of a heterogeneous job the first component.

    Raises:
        SessionError: As `slurm_hostnames`.
        UsageError: That is no job id, it has no nodes now, or several tasks of an array run.
    """
    found = _jobs_on_nodes(job_id, or_ended=True)
    found = [job for job in found if job.state in RUNNING_STATES] or found
    found = [job for job in found if job.name in (job_id, f"{job_id}+0")] or found
    if len(found) > 1:
        names = ", ".join(f"{clean_name(job.name)} {clean_name(job.state)}" for job in found[:MAX_NAMED])
        names += ", …" * (len(found) > MAX_NAMED)
        raise UsageError(f"Slurm job {job_id} is {len(found)} jobs: {names}", "name one of them")
    return found[0]


def _jobs_on_nodes(job_id: str, *, or_ended: bool) -> list[SlurmJob]:
    """Return the jobs of an id that have nodes, at least one, in order; raises as `slurm_job_hosts`.

    Args:
        job_id: As typed.
        or_ended: Whether they may have ended, where none waits.
    """
    if not _JOB_ID.fullmatch(job_id):
        hint = "give its number, as squeue --me shows it; of a task of a job array 4711_3"
        raise UsageError(f"{clean(job_id)} is not the id of a Slurm job", hint)
    found = sorted(_jobs(job_id), key=lambda job: [*map(int, re.findall("[0-9]+", job.name))])
    left = [job for job in found if job.state not in ENDED_STATES]
    if on_nodes := [job for job in left or (found if or_ended else ()) if job.nodes]:
        return on_nodes
    state = (left or found)[0].why if found else "not known to squeue"
    raise UsageError(f"Slurm job {job_id} is on no node: {state}", _NEXT)


def slurm_job_nodes(job_id: str) -> dict[str, SlurmNode]:
    """Return the nodes of a running Slurm job by name; none once it is on none. Raises as `slurm_hostnames`.

    Args:
        job_id: Its own number; that of a heterogeneous job's first component stands for all of them.
    """
    own = (job for job in _jobs(job_id) if job.id == job_id or job.name.startswith(f"{job_id}+"))
    nodes = ",".join(job.nodes for job in own if job.nodes)
    if not nodes:
        return {}
    rows = _slurm("sinfo", "--noheader", "--Node", "--format=%N|%T|%E", f"--nodes={nodes}").splitlines()
    found = (row.split("|", 2) for row in rows if row.count("|") >= len(SlurmNode._fields))
    return {name.strip(): SlurmNode(state, "" if reason in _NO_REASON else reason) for name, state, reason in found}


def why_unreachable(job: SlurmJob, host: str, first: str) -> AppError | None:
    """Return what Slurm reports of a job whose relay is gone; None when it runs there, or nothing is known.

    Args:
        job: The job, as it was.
        host: The host of its relay, as errors name it.
        first: That host as Slurm named it: the job's first node then. A requeued job may have another one.
    """
    try:
        found = [one for one in _jobs(job.id) if one.id == job.id]
    except SessionError:
        return None
    name = f"Slurm job {clean_name(job.name)}"
    if not found:
        return AllocationEndedError(host, f"{name} has ended: squeue does not know it any more", _NEXT)
    now = found[0]
    if now.state in WAITING_STATES:
        return HostUnreachableError(host, f"{name} waits: {now.why}", _NEXT)
    if now.state in RUNNING_STATES:
        if now.user_id == str(os.getuid()):
            if now.state == "COMPLETING":  # squeue shows the nodes that are left of it
                return HostUnreachableError(host, f"{name} is ending: {now.why}", _NEXT)
            return _why_elsewhere(now, host, first) if now.state == "RUNNING" else None
        whose = f"{name} is a job of {clean_name(now.user)}: its relay serves that user alone"
        return HostUnreachableError(host, whose, _NEXT)
    known = _ENDINGS.get(now.state, _Ending("", _NEXT))
    text = f"; {known.text}" if known.text else ""
    return AllocationEndedError(host, f"{name} has ended: {now.why}{text}", known.hint)


def _why_elsewhere(job: SlurmJob, host: str, first: str) -> AppError | None:
    """Return that a job runs on other nodes now; None when its first one is still the same, or that is not known."""
    try:
        now = slurm_hostnames(job.nodes)[0]
    except SessionError:
        return None
    if now == first:
        return None
    name = clean_name(job.name)
    return HostUnreachableError(
        host, f"Slurm job {name} runs on {clean_name(now)} now", f"rankdeck attach --slurm {name}"
    )


def why_ending(job_id: str) -> str:
    """Return why Slurm ends a job that still runs, as a sentence; empty where Slurm does not show it.

    A job that ends is COMPLETING until its last process has ended: its state hides why. The reason and the time of
    preemption show it, but not `scancel` (22.05, seen).

    Args:
        job_id: The job's own number; of the last task of an array Slurm shows all others too.
    """
    try:
        lines = _slurm("scontrol", "show", "job", "--oneliner", job_id).splitlines()
    except SessionError:
        return ""
    fields = dict(_FIELD.findall(next((line for line in lines if line.startswith(f"JobId={job_id} ")), "")))
    state = fields.get("JobState", "")
    if fields.get("Reason") == "TimeLimit":
        state = "TIMEOUT"
    elif fields.get("Reason") == "NodeDown":
        state = "NODE_FAIL"
    elif fields.get("PreemptTime", "") not in _NOT_SET:
        state = "PREEMPTED"
    known = _ENDINGS.get(state)
    task = fields.get("ArrayTaskId", "")
    name = f"{clean_name(fields['ArrayJobId'])}_{task}" if task.isdecimal() and "ArrayJobId" in fields else job_id
    return "" if known is None else f"Slurm ends job {name}: {known.text}; {known.hint}"


def _jobs(job_id: str) -> list[SlurmJob]:
    """Return a job, the tasks of an array or the components of a heterogeneous job; none that Slurm does not know.

    Raises as `slurm_hostnames`.
    """
    whole, plus, _ = job_id.partition("+")
    done = _run("squeue", "--noheader", "--states=all", "--format=%T|%r|%u|%U|%N|%i|%A", f"--jobs={whole}")
    if done.returncode and UNKNOWN_JOB not in done.stderr:  # its controller may be away: that ends no job
        raise SessionError(f"squeue fails: {_why(done)}", "try: squeue --me")
    rows = [line.split("|") for line in done.stdout.splitlines()]
    jobs = [SlurmJob(*(cell.strip() for cell in row)) for row in rows if len(row) == len(SlurmJob._fields)]
    return [job for job in jobs if job.name == job_id] if plus else jobs


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
