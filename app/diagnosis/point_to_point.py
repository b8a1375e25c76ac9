"""Sends and receives between two ranks: which rank a rank that stands in one waits for.

Each rank counts its calls by operation, peer, group and tag. The n-th send to a rank and that rank's n-th receive from
the sender belong together; the rank that has not called its half is the one that is waited for.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.waits import MAX_PEER_WAITS, Wait, odd_of_two_groups
from ddpcore.wire import DEFAULT_GROUP, MONITORED_BARRIER, NEW_COMMUNICATOR, NEW_GROUP, PeerCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.diagnosis.rank_facts import Flags, RankFacts, Ranks, Thresholds
    from app.model.job_model import JobModel
    from ddpcore.wire import RankReport

COUNTERPART = {"send": "recv", "recv": "send"}
MEETINGS = (MONITORED_BARRIER, NEW_GROUP, NEW_COMMUNICATOR)
"""Calls in which each rank waits for all others, and which no recorder holds."""


def find_peer_waits(
    job: JobModel, facts: RankFacts, thresholds: Thresholds, now_s: float, in_collectives: Sequence[Wait] = ()
) -> list[Wait]:
    """Return the waits of single ranks for single peers, as far as the peers are known.

    Args:
        job: The model.
        facts: State of every rank.
        thresholds: When a wait counts.
        now_s: The time.
        in_collectives: Waits of another kind: a rank that is in one sends nothing.
    """
    is_current = facts.is_fresh | facts.is_frozen
    is_waiting = _waiting_ranks(job)
    waits, sent = [], _Sent(job)
    # A rank whose program is over waits no more: what its GPU stood in by its last report may be done.
    ranks = np.flatnonzero(job.has_peer_wait & is_current & ~job.is_ending)[:MAX_PEER_WAITS].tolist()
    met: dict[str, dict[int, float]] = {op: {} for op in MEETINGS}
    # A full queue of a GPU holds up a collective that is in the recorder: nobody starts a communicator there.
    recorded = {rank for wait in in_collectives for rank in wait.waiting.tolist()}
    for rank in ranks:
        report = _report_of(job, rank)
        if report is None or report.peer_wait is None or not report.peer_wait.calls:
            continue
        call = report.peer_wait.calls[0]
        if call.op not in met:
            waits.append(_wait_of(job, rank, report, facts, (thresholds, now_s, is_waiting, sent)))
        elif call.group == DEFAULT_GROUP and not (call.op == NEW_COMMUNICATOR and rank in recorded):
            met[call.op][rank] = float(job.report_at_s[rank]) - report.peer_wait.waiting_s
    meetings = [wait for op, since_s in met.items() for wait in _meeting(job, op, since_s, (facts, now_s))]
    return [_with_all_that_could_send(job, wait, (*in_collectives, *waits, *meetings)) for wait in waits] + meetings


def odd_in_circle(job: JobModel, waits: Sequence[Wait], *, has_transfers: bool) -> list[int] | None:
    """Return the culprits among ranks that wait for each other; None where the smallest side is odd.

    None is named for a send or a receive that two ranks have made before in the same way: it may be in its place, and
    the peer too early in a collective. One that they make for the first time is the odd call. A job of two ranks has no
    third one. Where all others wait, a rank that receives from any sender is the odd one. So are fewer than half of all
    ranks in a call that all have to make, where none of the others waits in a send or a receive (`has_transfers`).
    """
    for wait in waits:
        is_meeting = not has_transfers and wait.peer_call is not None and wait.peer_call.op in MEETINGS
        if is_meeting and len(wait.waiting) < len(wait.missing) and _waiting_ranks(job)[wait.missing].all():
            return sorted(wait.waiting.tolist())
    calls = [wait.peer_call for wait in waits if wait.peer_call is not None]
    if job.world_size > 2 and 0 < len(calls) < len(waits) and not any(call.number <= 1 for call in calls):
        return []
    receivers = sorted(int(wait.waiting[0]) for wait in waits if is_receive_from_any(wait))
    if receivers and job.world_size > 2:
        return receivers
    return odd_of_two_groups(job, waits)


def is_transfer(wait: Wait) -> bool:
    """Return whether a wait is for another rank's send or receive."""
    return wait.peer_call is not None and wait.peer_call.op not in MEETINGS


def is_receive_from_any(wait: Wait) -> bool:
    """Return whether a wait is for whichever rank sends."""
    return wait.peer_call is not None and wait.peer_call.op == "recv" and wait.peer_call.peer is None


def _meeting(job: JobModel, op: str, since_s: dict[int, float], at: tuple[RankFacts, float]) -> list[Wait]:
    """Return the wait of ranks in one of `MEETINGS` of all ranks: for those that stand elsewhere."""
    facts, now_s = at
    if not since_s or len(since_s) == job.world_size:
        return []
    first_s = min(since_s.values())
    waiting = _ranks(sorted(since_s))
    others = np.setdiff1d(np.arange(job.world_size), waiting)
    is_known = facts.is_immobile[others] | (job.report_at_s[others] > first_s)
    return [
        Wait(
            job=job.job_id,
            attempt=job.attempt,
            group=DEFAULT_GROUP,
            seq=0,
            op=op,
            label="",
            waiting=waiting,
            missing=others[is_known],
            waited_s=max(0.0, now_s - first_s),
            is_settled=bool(is_known.all()),
            stuck=_ranks([]),
            since_s=np.array([since_s[rank] for rank in waiting.tolist()]),
            peer_call=PeerCall(op, None),
        )
    ]


def _waiting_ranks(job: JobModel) -> Flags:
    """Return which ranks wait in a collective, a send or a receive, by their last reports."""
    is_waiting = job.has_peer_wait.copy()
    for table in job.groups.values():
        is_waiting[table.members[table.is_waiting]] = True
    return is_waiting


def _wait_of(
    job: JobModel, rank: int, report: RankReport, facts: RankFacts, at: tuple[Thresholds, float, Flags, _Sent]
) -> Wait:
    thresholds, now_s, is_waiting, sent = at
    assert report.peer_wait is not None
    since_s = float(job.report_at_s[rank]) - report.peer_wait.waiting_s
    calls = [call for call in report.peer_wait.calls if call.peer is None or _is_peer(job, rank, call.peer)]
    unmet = [call for call in calls if not _is_met(job, rank, call, sent)]
    peer_op = (unmet or calls or report.peer_wait.calls)[0]
    peers = {call.peer for call in unmet if call.peer is not None}
    # A call with any peer may still be met by each of the others, none of which is the likelier culprit.
    is_settled = all(call.peer is not None for call in calls)
    immobile = facts.is_immobile
    missing = [peer for peer in sorted(peers) if immobile[peer] or _has_reported(job, peer, since_s, thresholds)]
    is_known = len(missing) == len(peers)
    if report.peer_wait.is_on_gpu:
        # A half that is called may be behind another call on the peer's GPU.
        met = {call.peer for call in calls if call not in unmet and call.peer not in peers and call.peer is not None}
        missing += [
            peer for peer in sorted(met) if is_waiting[peer] and not immobile[peer] and not _stands_at(job, peer, rank)
        ]
    stuck = {call.peer for call in calls if call.peer is not None and call not in unmet and immobile[call.peer]}
    return Wait(
        job=job.job_id,
        attempt=job.attempt,
        group=peer_op.group,
        seq=peer_op.number,
        op=peer_op.op,
        label="",
        waiting=np.array([rank]),
        missing=_ranks(sorted(missing)),
        waited_s=max(0.0, now_s - since_s),
        is_settled=is_settled and is_known,
        stuck=_ranks(sorted(stuck - peers)),
        since_s=np.array([since_s]),
        peer_call=peer_op,
    )


def _with_all_that_could_send(job: JobModel, wait: Wait, waits: Sequence[Wait]) -> Wait:
    """Return a receive from any rank as a wait for all others, once each of them waits elsewhere and sends nothing."""
    if not is_receive_from_any(wait):
        return wait
    others = np.setdiff1d(np.arange(job.world_size), wait.waiting)
    can_send = np.ones(job.world_size, np.bool_)
    for one in waits:
        can_send[one.waiting] = _is_send_to(one, wait)
    return wait if can_send[others].any() else msgspec.structs.replace(wait, missing=others, is_settled=True)


def _is_send_to(wait: Wait, receive: Wait) -> bool:
    """Return whether a rank stands in a send that a receive from any rank would take."""
    call, wanted = wait.peer_call, receive.peer_call
    if call is None or wanted is None or call.op != "send" or call.peer not in receive.waiting:
        return False
    return (call.group, call.tag) == (wanted.group, wanted.tag)


class _Sent:
    """How many sends to a rank there have been of all others; counted when it is first asked for."""

    def __init__(self, job: JobModel) -> None:
        self._job = job
        self._counts: Counter[tuple[int | None, str, int]] = Counter()

    def like(self, call: PeerCall) -> int:
        """Return the number of sends to the same peer in the same group and with the same tag."""
        if not self._counts:
            for worker in self._job.workers(np.flatnonzero(self._job.has_peer_calls).tolist()):
                for one in worker.report.peer_calls if worker.report is not None else ():
                    if one.op == "send":
                        self._counts[one.peer, one.group, one.tag] += one.number
        return self._counts[call.peer, call.group, call.tag]


def _is_met(job: JobModel, rank: int, call: PeerCall, sent: _Sent) -> bool:
    """Return whether the peer has called its half, by its last report."""
    if call.peer is None:
        return False
    report = _report_of(job, call.peer)
    if report is None:
        return False
    half = COUNTERPART.get(call.op, ""), call.group, call.tag
    halves = [one for one in report.peer_calls if (one.op, one.group, one.tag) == half]
    num_own = sum(one.number for one in halves if one.peer == rank)
    num_any = sum(one.number for one in halves if one.peer is None)
    if not num_any or call.number <= num_own:
        return 0 < call.number <= num_own
    # What was received from any rank may be another one's: it is this one's only where nothing is left, or where the
    # peer stands in such a receive.
    open_calls = report.peer_wait.calls if report.peer_wait is not None else []
    does_receive = any(one.peer is None and (one.op, one.group, one.tag) == half for one in open_calls)
    has_enough = does_receive or sum(one.number for one in halves) >= sent.like(call)
    return has_enough and 0 < call.number <= num_own + num_any


def _stands_at(job: JobModel, rank: int, peer: int) -> bool:
    """Return whether a rank's GPU stands in a send to another one, or a receive from it."""
    report = _report_of(job, rank)
    wait = None if report is None else report.peer_wait
    return wait is not None and any(call.peer == peer for call in wait.calls)


def _is_peer(job: JobModel, rank: int, peer: int) -> bool:
    return 0 <= peer < job.world_size and peer != rank


def _has_reported(job: JobModel, peer: int, since_s: float, thresholds: Thresholds) -> bool:
    """Return whether a peer's last report is younger than the wait for it."""
    return bool(job.report_at_s[peer] >= since_s + thresholds.short_s / 2)


def _report_of(job: JobModel, rank: int) -> RankReport | None:
    worker = job.worker(rank)
    return None if worker is None else worker.report


def _ranks(ranks: Sequence[int]) -> Ranks:
    return np.array(ranks, np.int64)
