"""A job seen from outside as reports of nodes and stacks of ranks, as agents send them for their own jobs. Pure.

A report has no place for "not seen": `OutsideView` takes out of the rows what cannot be seen from outside.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from agent.wire.jobs import JobState, JobStatus
from agent.wire.reports import MAX_STEP, WIRE_VERSION, ExitReport, NodeReport, ProcessState, WorkerReport
from agent.wire.stacks import KernelFacts, RankStacks, Stacks, StackSource
from app.diagnosis.causes import RankState
from app.diagnosis.rank_facts import STATE_CODE
from app.inspect.comparison import LIBRARY, Kind, What
from app.inspect.following import process_of
from app.stacks.groups import NodeStacks
from app.text import LINE_LIMIT, NAME_LIMIT, clean, clean_name
from ddpcore.wire import DEFAULT_GROUP, GroupReport, Phase, RankReport
from ddpcore.wire import WIRE_VERSION as RANK_WIRE_VERSION
from ddpcore.wire_stacks import Frame, PendingCall, ThreadStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from app.inspect.comparison import Finding, Standing
    from app.inspect.seen import SeenJob

_PROCESSES = {
    Kind.FROZEN: ProcessState.FROZEN,
    Kind.BLOCKED: ProcessState.BLOCKED,
    Kind.ENDED: ProcessState.EXITED,
}
_STATES = {Kind.FROZEN: RankState.FROZEN, Kind.ENDED: RankState.ENDED, Kind.UNSEEN: RankState.UNPROBED}


def job_name(job: SeenJob) -> str:
    """Return the name that stands for a job's id: its script without the path."""
    return clean(job.ranks[0].program.rpartition("/")[2] or job.name or job.how, NAME_LIMIT)


def distinction(job: SeenJob, jobs: Sequence[SeenJob]) -> str:
    """Return what distinguishes a job from others of its name: `pid 4711 on gpu1, in /home/a`; empty without any."""
    own = {process_of(rank) for rank in job.ranks}
    alike = [one for one in jobs if job_name(one) == job_name(job) and own.isdisjoint(map(process_of, one.ranks))]
    if not alike:
        return ""
    pid, *facts = _facts(job)
    others = [_facts(one)[1:] for one in alike]
    differing = [fact for place, fact in enumerate(facts) if any(one[place] != fact for one in others)]
    return clean(", ".join(filter(None, [pid, *differing])), LINE_LIMIT)


def _facts(job: SeenJob) -> tuple[str, str, str, str]:
    """Return where a job runs: its first process, its directory, store and user."""
    first, store = job.ranks[0], job.name.rpartition(" ")[2]
    place, meeting = f"in {first.directory}" if first.directory else "", f"store {store}" if ":" in store else ""
    return f"pid {first.pid} on {clean_name(first.host)}", place, meeting, f"uid {first.uid}"


def node_reports(job: SeenJob, standings: Sequence[Standing], hosts: Sequence[str]) -> dict[str, NodeReport]:
    """Return a report of each host, with the job's ranks there."""
    by_host: dict[str, list[Standing]] = {host: [] for host in hosts}
    for one in standings:
        by_host.setdefault(one.rank.host, []).append(one)
    num_nodes = len({one.rank.host for one in standings})
    is_over = all(one.kind is Kind.ENDED for one in standings)
    reports = {}
    for host, ranks in by_host.items():
        status = JobStatus(
            job_id=job_name(job),
            attempt=0,
            state=JobState.LOST if is_over else JobState.RUNNING,
            state_s=0.0,
            world_size=job.size,
            num_nodes=num_nodes,
            node_rank=0,
            first_rank=0,
            local_world_size=1,
            ranks=[one.rank.rank for one in ranks],
        )
        reports[host] = NodeReport(
            wire_version=WIRE_VERSION,
            node=host,
            epoch="outside",
            report_seq=1,
            hostname="",
            agent_pid=0,
            num_cpus=0,
            jobs=[status] if ranks else [],
            workers=[_worker(job, one) for one in ranks],
        )
    return reports


def _worker(job: SeenJob, one: Standing) -> WorkerReport:
    process = _PROCESSES.get(one.kind, ProcessState.RUNNING)
    return WorkerReport(
        job_id=job_name(job),
        attempt=0,
        rank=one.rank.rank,
        local_rank=0,
        pid=one.rank.pid,
        process=process,
        process_s=one.seen_s,
        cpu_cores=one.busy_frac,
        exit=ExitReport() if process is ProcessState.EXITED else None,
        report=_report(job, one),
    )


def _report(job: SeenJob, one: Standing) -> RankReport:
    counts = _counts(one.steps[1])
    epoch = counts.pop("epoch", None)
    return RankReport(
        wire_version=RANK_WIRE_VERSION,
        rank=one.rank.rank,
        local_rank=0,
        world_size=job.size,
        pid=one.rank.pid,
        job_id=job_name(job),
        attempt=0,
        report_seq=1,
        phase=Phase.OTHER,
        place=one.place,
        step=next(iter(counts.values()), None),
        epoch=epoch,
        groups=[GroupReport(group=DEFAULT_GROUP, op=one.op)] if one.is_waiting else [],
    )


def _counts(steps: str) -> dict[str, int]:
    """Return the numbers in `step=57 epoch=2` by name."""
    pairs = [word.partition("=") for word in steps.split()]
    return {name: int(number) for name, _, number in pairs if number.isdecimal() and int(number) < MAX_STEP}


def rank_states(job: SeenJob, standings: Sequence[Standing], finding: Finding) -> NDArray[np.int8]:
    """Return the state of each rank, as indices into `app.diagnosis.rank_facts.STATES`."""
    states = np.full(job.size, STATE_CODE[RankState.UNPROBED], np.int8)
    missing = {one.rank.rank for one in finding.culprits} if finding.what is What.ELSEWHERE else set()
    for one in standings:
        usual = RankState.WAITING if one.is_waiting else RankState.RUNNING
        state = RankState.MISSING if one.rank.rank in missing else _STATES.get(one.kind, usual)
        states[one.rank.rank] = STATE_CODE[state]
    return states


def stacks_of(job: SeenJob, standings: Sequence[Standing]) -> list[NodeStacks]:
    """Return the stacks that the last look at each rank has shown, by host."""
    by_host: dict[str, list[Standing]] = defaultdict(list)
    for one in standings:
        by_host[one.rank.host].append(one)
    answers = []
    for host, ranks in by_host.items():
        moments_s = [one.rank.looks[-1].at_s for one in ranks]
        found = Stacks(job_name(job), 0, max(moments_s) - min(moments_s), [_stacks(one) for one in ranks])
        answers.append(NodeStacks(host, found))
    return answers


def _stacks(one: Standing) -> RankStacks:
    last = one.rank.looks[-1]
    if one.kind is Kind.ENDED:
        return RankStacks(one.rank.rank, StackSource.NONE, note="its process has ended")
    frames = [Frame(frame.file, frame.line, frame.function, not LIBRARY.search(frame.file)) for frame in last.frames]
    return RankStacks(
        rank=one.rank.rank,
        source=StackSource.PY_SPY if frames else StackSource.KERNEL,
        pid=one.rank.pid,
        threads=[ThreadStack("MainThread", frames=frames)] if frames else [],
        # The number of a call cannot be seen from outside: 0 is none.
        pending=[PendingCall(DEFAULT_GROUP, 0, one.op)] if one.is_waiting else [],
        kernel=KernelFacts(last.state, last.wchan),
        note=clean(one.trouble, LINE_LIMIT),
    )
