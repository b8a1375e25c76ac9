"""Which ranks have not come to the others: before the first collective, between two groups, in `monitored_barrier`."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.causes import Cause, Severity
from app.diagnosis.exits import has_lost_peer
from app.diagnosis.rank_facts import is_in_known_phase
from app.diagnosis.verdicts import Evidence, MeetingSide, Verdict, by_node, hosts_of, name
from app.model.job_model import PHASE_CODE, Process
from ddpcore.wire import DEFAULT_GROUP, Anomaly, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.diagnosis.rank_facts import Flags, Ranks
    from app.diagnosis.verdicts import Aftermath
    from ddpcore.wire import StoreMeeting

IDLE_CORES = 0.5
"""Cores; a rank that keeps more busy may compute at one line."""
INIT = "init_process_group"
LATE_FACTOR = 4.0
"""Multiple of `join_s` that is longer than any import takes."""

MAX_MEETINGS = 256
"""Limit of ranks whose stores are compared."""
_NOT_PASSED = re.compile(r"Ranks? (?P<ranks>\d{1,6}(?:, ?\d{1,6})*) failed to pass monitoredBarrier")
"""Source: torch 2.13, ProcessGroupGloo.cpp, seen."""
MAX_SPEAKERS = 8
"""Limit of ranks that timed out whose missing peers are read."""
MEETING_S = 0.05
"""Seconds per rank within which all that have come find each other: a store answers thousands of requests a second."""


def not_joined(evidence: Evidence) -> list[Verdict]:
    """Name ranks that others wait for in `init_process_group`, or whose launchers other launchers wait for."""
    job = evidence.job
    is_joining = evidence.facts.is_fresh & (job.phase == PHASE_CODE[Phase.JOINING])
    if (job.groups or bool((job.step >= 0).any())) and not job.is_outside.all():
        # It has begun: a late rank is late in a collective now, unless the group has been ended for another.
        return _not_joined_again(evidence, is_joining) if is_joining.any() else []
    if not is_joining.any():
        return _not_launched(evidence)
    waited_s = evidence.now_s - float(job.phase_since_s[is_joining].min())
    absent = np.flatnonzero(job.is_outside & ~is_joining & ~evidence.facts.is_immobile)
    absent = np.setdiff1d(absent, _parents_of_ranks(evidence))
    waiting = np.flatnonzero(is_joining)
    if len(absent):
        return _all_late(evidence, absent, waiting, waited_s)
    if apart := _meeting_apart(evidence, waiting):
        return [apart]
    together_s = evidence.now_s - float(job.phase_since_s[is_joining].max())
    patience_s = min(evidence.thresholds.join_s, evidence.thresholds.stall_s + MEETING_S * job.world_size)
    if len(waiting) == job.world_size and together_s >= patience_s:
        return [_apart(evidence, waiting, together_s)]
    return []


def _not_joined_again(evidence: Evidence, is_joining: Flags) -> list[Verdict]:
    """Name ranks that others wait for in `init_process_group` after they have all ended a process group.

    By their last calls in it they are where the others were before: not yet in the next one, where NCCL lets ranks in
    that do not wait for each other. Where ranks still make steps, or wait in a collective, only a part opens a group.
    """
    job, facts = evidence.job, evidence.facts
    table, waiting = job.groups.get(DEFAULT_GROUP), np.flatnonzero(is_joining)
    absent = np.flatnonzero(facts.is_fresh & ~is_joining & ~job.is_ending & ~job.has_exit_wait)
    absent = np.setdiff1d(absent, _parents_of_ranks(evidence))
    if not len(absent) or table is None or evidence.waits or not _wait_for_all(evidence, waiting):
        return []
    since_s = float(job.phase_since_s[waiting].min())
    num_calls = table.enqueued[np.concatenate([waiting, absent])]
    if num_calls.min() < max(1, num_calls.max()) or (job.stepped_at_s[absent] > since_s).any():
        return []
    waited_s = evidence.now_s - since_s
    is_in_phase = is_in_known_phase(job, facts)[absent].any()
    if is_in_phase and waited_s < evidence.thresholds.patience_s:
        return []
    return _all_late(evidence, absent, waiting, waited_s)


def _wait_for_all(evidence: Evidence, waiting: Ranks) -> bool:
    """Return whether ranks wait for all ranks of the job, as far as is known."""
    workers = evidence.job.workers(waiting[:MAX_MEETINGS].tolist())
    meetings = [worker.report.store_meeting for worker in workers if worker.report is not None]
    return all(meeting is None or meeting.world_size == evidence.job.world_size for meeting in meetings)


def _all_late(evidence: Evidence, absent: Ranks, waiting: Ranks, waited_s: float) -> list[Verdict]:
    # An import moves from line to line: ranks that stand at one do something else.
    do_stand = bool(_do_stand(evidence, absent).all())
    is_long = waited_s >= (evidence.thresholds.stall_s if do_stand else evidence.thresholds.join_s)
    return [_late(evidence, some, waiting, waited_s) for some in by_node(evidence, absent)] if is_long else []


def _parents_of_ranks(evidence: Evidence) -> Ranks:
    """Return the ranks that wait for ranks of their own: they never come, and need not.

    One that joins a process of multiprocessing while others come by themselves will come after it.
    """
    parents = sorted(evidence.job.anomalies.ranks_with(Anomaly.OWN_RANKS))
    children = [evidence.child_of(rank).get("child") for rank in parents]
    found = [rank for rank, child in zip(parents, children, strict=True) if child is None or child.what != "process"]
    return np.array(found, np.int64)


def _do_stand(evidence: Evidence, ranks: Ranks) -> Flags:
    """Return which ranks have not moved for a while, and compute nothing."""
    job, least_s = evidence.job, evidence.thresholds.stall_s / 2
    is_idle = job.cpu_cores[ranks] < IDLE_CORES
    do_stand: Flags = (job.stood_s[ranks] >= least_s) & is_idle & evidence.facts.is_fresh[ranks]
    return do_stand


def _not_launched(evidence: Evidence) -> list[Verdict]:
    """Name the ranks of nodes on which nothing has been started, while the launchers of others run."""
    job = evidence.job
    running_s = [
        evidence.now_s - assignment.began_s
        for assignment in job.assignments.values()
        if assignment.status.state == "running"
    ]
    is_born = job.process != Process.UNSEEN
    if not running_s or is_born.any() or max(running_s) < evidence.thresholds.join_s:
        return []
    waited_s = max(running_s)
    is_waiting = np.zeros(job.world_size, np.bool_)
    for node, assignment in job.assignments.items():
        is_waiting[job.ranks_of(node)] = assignment.status.state == "running"
    absent = np.flatnonzero(~is_waiting)
    if len(absent):
        return [_late(evidence, some, np.zeros(0, np.int64), waited_s) for some in by_node(evidence, absent)]
    return [_apart(evidence, np.flatnonzero(is_waiting), waited_s, op="")] if job.num_nodes > 1 else []


def _late(evidence: Evidence, some: Ranks, waiting: Ranks, waited_s: float) -> Verdict:
    is_very_late = waited_s > LATE_FACTOR * evidence.thresholds.join_s
    return name(
        evidence,
        Cause.NOT_JOINED,
        some.tolist(),
        severity=Severity.CRITICAL if is_very_late else Severity.WARNING,
        waiting=tuple(waiting.tolist()),
        op=INIT,
        waited_s=waited_s,
        is_born=bool((evidence.job.process[some] != Process.UNSEEN).all()),
    )


def _meeting_apart(evidence: Evidence, waiting: Ranks) -> Verdict | None:
    """Return the verdict that ranks go to different stores, share a number, or wait for more ranks than exist."""
    waited_s = evidence.now_s - float(evidence.job.phase_since_s[waiting].max())
    if waited_s < evidence.thresholds.deadlock_s or not evidence.job.world_size == len(waiting) <= MAX_MEETINGS:
        return None
    meetings = _meetings(evidence, waiting)
    stores: dict[tuple[str, int], list[StoreMeeting]] = {}
    for meeting in meetings.values():
        stores.setdefault((meeting.address, meeting.port), []).append(meeting)
    if all(_is_whole(store) for store in stores.values()):
        return None
    sides = _sides(meetings)
    # A rank that came as another rank is the wrong one; else it is the smaller part.
    odd = [side for side in sides if side.number is not None and len(stores) == 1]
    if not odd and len(sides) > 1 and len(sides[0].ranks) < len(sides[-1].ranks):
        odd = [side for side in sides if len(side.ranks) == len(sides[0].ranks)]
    culprits = sorted(rank for side in odd for rank in side.ranks)
    return msgspec.structs.replace(
        _apart(evidence, waiting, waited_s),
        cause=Cause.MISMATCH,
        culprits=tuple(culprits),
        waiting=tuple(np.setdiff1d(waiting, culprits).tolist()),
        meetings=tuple(sides),
    )


def _is_whole(meetings: Sequence[StoreMeeting]) -> bool:
    """Return whether all ranks have come to a store that those there wait for."""
    ranks = sorted(meeting.rank for meeting in meetings)
    return all(ranks == [*range(meeting.world_size)] for meeting in meetings)


def _meetings(evidence: Evidence, waiting: Ranks) -> dict[int, StoreMeeting]:
    """Return the store that each rank goes to; empty where it is not known for all of the first ones."""
    found: dict[int, StoreMeeting] = {}
    for rank in waiting[:MAX_MEETINGS].tolist():
        worker = evidence.job.worker(rank)
        meeting = worker.report.store_meeting if worker is not None and worker.report is not None else None
        if meeting is None:
            return {}
        found[rank] = meeting
    return found


def _sides(meetings: Mapping[int, StoreMeeting]) -> list[MeetingSide]:
    """Return the ranks by the store they go to and how, the smallest part first."""
    num_as = Counter(meeting.rank for meeting in meetings.values())
    found: dict[tuple[str, int, int | None, int], list[int]] = {}
    for rank, meeting in meetings.items():
        # A program may number its ranks itself.
        number = meeting.rank if meeting.rank != rank and num_as[meeting.rank] > 1 else None
        found.setdefault((meeting.address, meeting.port, number, meeting.world_size), []).append(rank)
    sides = [MeetingSide(tuple(ranks), *key) for key, ranks in found.items()]
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))


def _apart(evidence: Evidence, waiting: Ranks, waited_s: float, op: str = INIT) -> Verdict:
    """Return the verdict that all have come and do not find each other."""
    job = evidence.job
    workers = job.workers(waiting[:MAX_MEETINGS].tolist())
    port_owner = next(filter(None, (worker.store_port_owner for worker in workers)), "")
    # The network does not matter where another program answers in the store's place.
    is_own = any(port_owner.startswith(f"pid {worker.pid} ") for worker in workers) or "torch" in port_owner
    num_hosts = len(hosts_of(evidence, np.arange(job.world_size))) if is_own or not port_owner else 0
    return Verdict(
        cause=Cause.TRANSPORT,
        culprits=(),
        waiting=tuple(waiting.tolist()),
        nodes=tuple(evidence.cluster.node_names[node] for node in sorted(job.assignments)),
        job=job.job_id,
        attempt=job.attempt,
        op=op,
        waited_s=waited_s,
        place=evidence.place_of(int(waiting[0])),
        meetings=tuple(_sides(_meetings(evidence, waiting))),
        store_port_owner=port_owner,
        num_hosts=num_hosts,
    )


def not_at_barrier(evidence: Evidence, aftermath: Aftermath | None) -> list[Verdict]:
    """Name the ranks that `monitored_barrier` reports as missing; no recorder holds that call, so no wait shows it."""
    deaths = evidence.job.deaths
    if aftermath is None or not aftermath.is_timeout:
        return []
    for rank in aftermath.ranks[:MAX_SPEAKERS]:
        found = _NOT_PASSED.search(deaths[rank].exit.error_text)
        named = [int(number) for number in found["ranks"].split(",")] if found else []
        # It counts the ranks of its group: one that came, or lost the others by it, is another's number.
        is_other = any(has_lost_peer(deaths[one]) for one in named if one in deaths)
        if named and not is_other and max(named) < evidence.job.world_size:
            waited_s = aftermath.timeout_s or 0.0
            facts = {"op": "monitored_barrier", "waiting": aftermath.ranks, "waited_s": waited_s}
            return [name(evidence, Cause.STRAGGLER, named, aftermath=aftermath, **facts)]
    return []
