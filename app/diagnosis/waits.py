"""Which ranks wait in which collective, which have not called it, and which ranks a wait leads to in the end.

Reports of different ranks are taken at different moments. A rank counts as missing only when that is known: its report
is younger than the wait, or it cannot have moved since (frozen, silent, exited, lost).
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.model.farewells import has_final_calls
from app.model.job_model import PHASE_CODE
from ddpcore.wire import FIRST_GROUP, ONE_WAY_OPS, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from app.diagnosis.rank_facts import Flags, Moments, RankFacts, Ranks, Thresholds
    from app.model.group_table import GroupTable
    from app.model.job_model import JobModel
    from ddpcore.wire import PeerCall

LATE_S = 1.0
"""Seconds of a wait from which it is shown, and a rank is missing in it: those of any step are on their way before."""
MAX_WAITS_PER_GROUP = 4
"""Limit of seqs of one group examined, the most behind first: the later ones wait for those."""
MAX_WAITS = 256
"""Limit of waits of one job, before those that they lead to; where more sub-groups wait, the roots are the same few."""
MAX_PEER_WAITS = 256
"""Limit of ranks whose sends and receives are examined, the lowest first: in a pipeline all wait for the same few."""
MAX_HOPS = 4
"""Limit of times that waits are followed into groups beyond that limit."""
MAX_WITNESSES = 16
"""Limit of ranks whose sub-groups' calls are compared with those of a sub-group that waits."""
MIN_COMMON_STEPS = 2
"""Least number of steps by whose end two sub-groups have equally many calls, for them to be called alike."""
STEPPING_S = 3.0
"""Seconds after a step within which a rank still makes steps; more where they take longer."""
STEPPING_DIVISOR = 5.0
"""Divisor of `step_limit_s` for the same: twice a usual step, at least."""
_FORWARDS = [PHASE_CODE[Phase.FORWARD], PHASE_CODE[Phase.EVAL]]


class Wait(msgspec.Struct, frozen=True, eq=False):
    """A collective in which some rank waits."""

    job: str
    attempt: int
    group: str
    seq: int
    op: str
    label: str
    waiting: Ranks
    missing: Ranks
    """Members that have not called it, or whose GPU stands in another call before it."""
    waited_s: float
    """Longest wait of its ranks, up to now."""
    is_settled: bool
    """Whether it is known of every member that it waits, has called or is missing."""
    stuck: Ranks
    """Members that have called it, do not have it behind them and cannot move: they hold it up like a missing one."""
    since_s: Moments
    """When each of `waiting` called it."""
    called_seq: int | None = None
    """Last collective that one of `waiting` has called: with NCCL, and behind DDP's backward, many may follow."""
    peer_call: PeerCall | None = None
    """The call, where it is a send or a receive between two ranks; `seq` is its number."""


class Knot(msgspec.Struct, frozen=True, eq=False):
    """A wait followed to its end."""

    wait: Wait
    roots: Ranks
    """Ranks that wait for none and that this wait, or one it leads to, waits for."""
    ends: Ranks
    """Roots that this wait itself waits for."""
    chain: list[int]
    """Indices of the waits that this one leads to, itself first."""

    @property
    def is_closed(self) -> bool:
        """Whether the chain has no root: all have called, or they wait for each other."""
        return len(self.roots) == 0


def find_waits(job: JobModel, facts: RankFacts, thresholds: Thresholds, now_s: float) -> list[Wait]:
    """Return the current waits of a job, the most behind of each group first.

    They are `MAX_WAITS` at most, and as many again in which ranks wait that are missing in those.
    """
    waits: list[Wait] = []
    is_current = facts.is_fresh | facts.is_frozen
    known, at = (facts, _immobile_since_s(job, facts)), (thresholds, now_s)
    latest_s = cache(lambda: _latest_calls_s(job, is_current))
    rest = [table for table in job.groups.values() if table.is_waiting.any()]
    is_wanted = np.ones(job.world_size, np.bool_)
    for most in (MAX_WAITS, *[2 * MAX_WAITS] * MAX_HOPS):
        tables, rest = rest, []
        for table in tables:
            if len(waits) >= most or not is_wanted[table.members[table.is_waiting]].any():
                rest.append(table)
                continue
            is_waiting = table.is_waiting & is_current[table.members] & (table.stamp == job.stamp[table.members])
            is_waiting &= ~_that_step_on(job, table, is_waiting, at)
            is_waiting &= ~_that_stand_elsewhere(job, table, is_waiting, latest_s, thresholds)
            waits += islice(_waits_in(job, table, is_waiting, known, at), most - len(waits))
        if not rest:
            break
        is_wanted[:] = False
        is_wanted[np.concatenate([wait.missing for wait in waits])] = True
        is_wanted[np.concatenate([wait.waiting for wait in waits])] = False
    return waits


def _waits_in(
    job: JobModel,
    table: GroupTable,
    is_waiting: Flags,
    known: tuple[RankFacts, Moments],
    at: tuple[Thresholds, float],
) -> Iterator[Wait]:
    """Yield the waits of a group."""
    facts = known[0]
    # What a rank waits in is the first call that is not over for it, however many it has called since.
    at_seq = np.where(is_waiting, table.completed, table.enqueued - 1) + 1
    # A GPU that stands in a call of another group, or in work of its own, has not come to this one.
    is_first = is_waiting & ~((table.is_queued | table.is_behind_work) & ~facts.is_immobile[table.members])
    for seq in _lowest(at_seq[is_first]):
        is_queued = is_waiting & ~is_first & (at_seq == seq)
        wait = _wait_in(job, table, seq, (is_first, at_seq, is_queued), known, at)
        if wait is not None:
            yield wait


def _that_step_on(job: JobModel, table: GroupTable, is_waiting: Flags, at: tuple[Thresholds, float]) -> Flags:
    """Return which waiting members make steps all the same: another thread waits, or they look again later.

    A GPU's main thread runs ahead of a call for a while, and then makes steps no more.
    """
    (thresholds, now_s), members, since_s = at, table.members, table.wait_since_s
    far_s, lasts_s = thresholds.stall_s / 2, np.maximum(STEPPING_S, job.step_limit_s[members] / STEPPING_DIVISOR)
    # It is when the rank has moved last: no earlier than its last step.
    is_it: Flags = is_waiting & (job.stepped_at_s[members] > since_s + far_s)
    if is_it.any():
        latest_s, before_s = job.report_at_s[members] - job.steps_together.ages_s(members)[:, :2].T
        is_it &= (before_s > since_s + thresholds.confirm_s) & (latest_s > since_s + far_s)
        is_it &= now_s - latest_s < lasts_s
    return is_it


def _that_stand_elsewhere(
    job: JobModel, table: GroupTable, is_waiting: Flags, latest_s: Callable[[], Moments], thresholds: Thresholds
) -> Flags:
    """Return which waiting members have made steps since they called what another of them has left for a later call.

    A thread waits in it, or nobody does yet: wherever such a member stands now, it is not there.
    """
    later_s = table.wait_since_s + thresholds.stall_s / 2
    has_gone_on: Flags = is_waiting & (job.stepped_at_s[table.members] > later_s)
    if has_gone_on.any():
        has_left = has_gone_on & (latest_s()[table.members] > later_s)
        has_gone_on &= np.isin(table.completed, table.completed[has_left])
    return has_gone_on


def _latest_calls_s(job: JobModel, is_current: Flags) -> Moments:
    """Return when each rank made the latest call that it, or its GPU, stands in; -inf where it stands in none."""
    latest_s: Moments = np.full(job.world_size, -np.inf)
    for table in job.groups.values():
        stands = table.is_waiting & ~table.is_queued & ~table.is_behind_work
        stands &= is_current[table.members] & (table.stamp == job.stamp[table.members])
        ranks = table.members[stands]
        latest_s[ranks] = np.maximum(latest_s[ranks], table.wait_since_s[stands])
    return latest_s


def _lowest(seqs: Ranks) -> list[int]:
    """Return the lowest distinct seqs, at most `MAX_WAITS_PER_GROUP`; cheaper than sorting all."""
    found: list[int] = []
    while len(seqs) and len(found) < MAX_WAITS_PER_GROUP:
        found.append(int(seqs.min()))
        seqs = seqs[seqs != found[-1]]
    return found


def _wait_in(
    job: JobModel,
    table: GroupTable,
    seq: int,
    waits: tuple[Flags, Ranks, Flags],
    known: tuple[RankFacts, Moments],
    at: tuple[Thresholds, float],
) -> Wait | None:
    """Return the wait at a seq.

    Args:
        job: The job.
        table: The group.
        seq: The place in its order.
        waits: For each member whether it waits, which call is the first that is not over for it, and whether that is
            this one while its GPU has not come to it.
        known: The states of all ranks, and since when those that are immobile have been so.
        at: The thresholds, and the time.
    """
    (is_waiting, at_seq, is_queued), (facts, stood_s), (thresholds, now_s) = waits, known, at
    members = table.members
    is_here = is_waiting & (at_seq == seq)
    since_s = table.wait_since_s[is_here]
    first_s = float(since_s.min())
    op, label = job.calls[table.code[int(np.flatnonzero(is_here)[int(since_s.argmin())])]]
    is_over = op not in ONE_WAY_OPS and _is_over(table, seq, is_here)
    if is_over and now_s - first_s < thresholds.stall_s:
        return None
    report_at_s = job.report_at_s[members]
    seen_s = float(report_at_s[is_here].max())
    called_seq = int(table.enqueued[is_here].max())
    # A GPU, and gloo behind a backward, goes through calls that were made before: until it stops, it may be on its way.
    least_s = np.where(facts.is_dead[members], thresholds.grace_s, thresholds.silent_s)
    is_standing = (called_seq == seq) | (seen_s - first_s >= least_s)
    is_immobile = facts.is_immobile[members] & is_standing & (seen_s - stood_s[members] >= thresholds.confirm_s)
    is_immobile &= ~_is_unseen(table, facts.is_lost[members], first_s - stood_s[members] > thresholds.silent_s)
    # In a first-block all wait for its lowest member, and none of the others holds any up.
    matters = members == members[0] if table.name.startswith(FIRST_GROUP) else np.True_
    # A call that is over for one, all have called: a report that shows otherwise is older.
    # One that has called this too, and stands at an earlier one that is over for another, reported before it was.
    # One that has reported since is there: the source of a broadcast may be through before the others.
    is_there = table.is_waiting & (report_at_s >= first_s + thresholds.confirm_s)
    is_past = (table.enqueued >= seq) & (at_seq <= table.completed.max()) & ~is_there
    is_behind = (((at_seq < seq) & ~is_past) | is_queued) & ~is_here & matters & (not is_over)
    is_known = is_immobile | has_final_calls(job, table) | (report_at_s >= first_s + thresholds.short_s / 2)
    never_reported = np.isnan(report_at_s) & (now_s - first_s > thresholds.silent_s)
    is_missing = is_behind & (is_known | never_reported)
    is_stuck = is_immobile & ~is_behind & (table.completed < seq) & matters
    return Wait(
        job=job.job_id,
        attempt=job.attempt,
        group=table.name,
        seq=seq,
        op=op,
        label=label,
        waiting=members[is_here],
        missing=members[is_missing],
        waited_s=max(0.0, now_s - first_s),
        is_settled=not bool((is_behind & ~is_missing).any()),
        stuck=members[is_stuck],
        since_s=since_s,
        called_seq=called_seq,
    )


def _immobile_since_s(job: JobModel, facts: RankFacts) -> Moments:
    """Return since when each rank that cannot move has not, as far as known; values of the others mean nothing."""
    since_s: Moments = np.where(facts.is_frozen, job.process_since_s, job.report_at_s)
    since_s = np.where(facts.is_dead, job.died_at_s, since_s)
    return np.where(np.isnan(since_s) | facts.is_lost, job.received_s, since_s)


def _is_unseen(table: GroupTable, is_lost: Flags, is_later: Flags) -> Flags:
    """Return which members of lost nodes still run: others have since completed calls behind their last."""
    has_gone_on: Flags = is_lost & is_later & (table.enqueued < table.completed.max())
    return has_gone_on


def _is_over(table: GroupTable, seq: int, is_here: Flags) -> bool:
    """Return whether the call in which members wait is over for another one, as far as known: it may be another."""
    is_past = table.completed >= seq
    if table.history is None or not is_past.any():
        return bool(is_past.any())
    ops, _ = table.history.calls_at(seq)
    own = ops[is_here & (ops != 0)]
    if len(own) and (own != own[0]).any():
        return False
    return not len(own) or bool((is_past & ((ops == 0) | (ops == own[0]))).any())


def held_ranks(job: JobModel, waits: Sequence[Wait]) -> Flags:
    """Return which ranks have a transfer under way, or have called something behind another call on their GPU.

    Where there are more waits than are followed, also those that wait at all.
    """
    is_held = job.has_open_transfers.copy()
    if np.count_nonzero(job.has_peer_wait) > MAX_PEER_WAITS:
        is_held |= job.has_peer_wait
    for table in job.groups.values():
        is_it = table.is_waiting if len(waits) >= MAX_WAITS else table.is_queued & table.is_waiting
        is_held[table.members[is_it]] = True
    return is_held


def find_out_of_order(waits: Sequence[Wait]) -> Iterator[tuple[Wait, Wait]]:
    """Yield calls of two groups made in different orders: one that some ranks have not made, and the one those are in.

    With NCCL the call of the other group waits on each GPU behind the first one: called by all, and not over.
    """
    complete = [wait for wait in waits if wait.peer_call is None and wait.is_settled and not len(wait.missing)]
    for first in waits:
        if first.peer_call is not None or not first.is_settled or not len(first.missing):
            continue
        for later in complete:
            has_both = np.isin(later.waiting, first.waiting).any()
            if has_both and np.isin(first.missing, later.waiting).all():
                yield first, later


def follow(waits: Sequence[Wait], world_size: int, is_held: Flags | None = None) -> list[Knot]:
    """Return each wait with the ranks that its chain ends in.

    A missing rank that itself waits, in another group or at an earlier seq, is a victim too: its own wait is followed.
    So is one that a rank which no report names holds up (`is_held`).
    """
    wait_of = np.full(world_size, -1, np.int64)
    for index in range(len(waits) - 1, -1, -1):
        wait_of[waits[index].waiting] = index
    ends: list[Ranks] = []
    leads_to: list[list[int]] = []
    for index, wait in enumerate(waits):
        targets = wait_of[wait.missing]
        free = wait.missing[(targets == -1) if is_held is None else (targets == -1) & ~is_held[wait.missing]]
        ends.append(np.union1d(free, wait.stuck) if len(wait.stuck) else free)
        leads_to.append(sorted(set(targets.tolist()) - {-1, index}))
    knots = []
    for index, wait in enumerate(waits):
        chain, is_in_chain = [index], {index}
        for reached in chain:
            further = [target for target in leads_to[reached] if target not in is_in_chain]
            is_in_chain.update(further)
            chain += further
        roots = ends[index] if len(chain) == 1 else np.unique(np.concatenate([ends[reached] for reached in chain]))
        knots.append(Knot(wait, roots, ends[index], chain))
    return knots


def circle_from(start: int, leads_to: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the shortest circle from a wait back to it; none where it only leads to a circle."""
    before: dict[int, int] = {}
    reached = [start]
    for index in reached:
        for target in leads_to[index]:
            if target == start:
                way = [index]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return sorted(way)
            if target >= 0 and target not in before:
                before[target] = index
                reached.append(target)
    return []


def odd_of_two_groups(job: JobModel, waits: Sequence[Wait]) -> list[int] | None:
    """Return the culprits among ranks that wait for each other in two groups; None for other circles.

    Only members of both groups make both calls. Where as many of them are in the one as in the other, groups of the
    others that are called alike show which of the calls comes first. Ranks in the same call as
    others with higher steps are in a call of the next step too early. Where neither shows it, both may be culprits.
    """
    if len(waits) != 2 or any(wait.peer_call is not None for wait in waits):
        return None
    first, second = (job.groups.get(wait.group) for wait in waits)
    if first is None or second is None or first is second:
        return None
    few, many = sorted(waits, key=lambda wait: len(wait.waiting))
    of_both = np.intersect1d(first.members, second.members)
    odd, even = _that_call_first(job, few, many, of_both), _that_call_first(job, many, few, of_both)
    if not len(odd) or not len(even):
        return None
    if len(odd) != len(even):
        return [int(rank) for rank in min(odd, even, key=len)]
    beside = np.setdiff1d(many.waiting, of_both)
    comes_first = _comes_first(job, few, many, beside)
    if comes_first is not None:
        return [int(rank) for rank in (even if comes_first else odd)]
    steps, own_steps = job.step[beside], job.step[even]
    has_restarted = len(beside) >= 2 and own_steps.min() >= 0 and own_steps.max() < steps.min()
    return [int(rank) for rank in (even if has_restarted else np.union1d(odd, even))]


def passed_by(job: JobModel, waits: Sequence[Wait], since_s: float) -> list[int]:
    """Return the ranks in a call that others pass by: at least as many have made steps since some moment without it.

    Empty where that is so for several calls, or for none.
    """
    passed = [wait for wait in waits if int((job.stepped_at_s[wait.missing] > since_s).sum()) >= len(wait.waiting)]
    return [int(rank) for rank in passed[0].waiting] if len(passed) == 1 else []


def _that_call_first(job: JobModel, wait: Wait, other: Wait, of_both: Ranks) -> Ranks:
    """Return the members of both groups that call the one before the other, also where it is over for them.

    The sender in a gather, or a broadcast, is through immediately and waits elsewhere.
    """
    table, beside = job.groups[wait.group], job.groups[other.group]
    slots, slots_beside = table.slots(of_both)[0], beside.slots(of_both)[0]
    is_here, is_there = np.isin(of_both, wait.waiting), np.isin(of_both, other.waiting)
    is_here &= beside.completed[slots_beside] < other.seq
    has_called = (table.enqueued[slots] >= wait.seq) & np.isin(of_both, other.missing)
    is_through = is_there & (table.completed[slots] >= wait.seq)
    return of_both[is_here | (has_called & ~is_there) | is_through]


def _comes_first(job: JobModel, few: Wait, many: Wait, beside: Ranks) -> bool | None:
    """Return whether a call of a sub-group comes before the one of another group in which ranks beside it wait.

    It is judged by those ranks whose own sub-group has as many members and equally many calls by the end of each step;
    None where there are none, or they differ.
    """
    num_members = len(job.groups[few.group].members)
    calls = calls_by_step(job, few.group, int(few.waiting[0]))
    found: set[bool] = set()
    for rank in beside[:MAX_WITNESSES].tolist():
        worker = job.worker(rank)
        for own in worker.report.groups if worker is not None and worker.report is not None else ():
            table = job.groups.get(own.group)
            if table is None or own.group == many.group or len(table.members) != num_members:
                continue
            others = {known.step: known.seq for known in own.steps}
            common = calls.keys() & others.keys()
            if len(common) >= MIN_COMMON_STEPS and all(calls[step] == others[step] for step in common):
                found.add(own.completed_seq >= few.seq)
    return found.pop() if len(found) == 1 else None


def calls_by_step(job: JobModel, group: str, rank: int) -> dict[int, int]:
    """Return how many calls of a group a rank had made by the end of some steps."""
    worker = job.worker(rank)
    groups = worker.report.groups if worker is not None and worker.report is not None else ()
    return {known.step: known.seq for reported in groups if reported.group == group for known in reported.steps}


def that_go_on(job: JobModel, waits: Sequence[Wait], since_s: float) -> Flags:
    """Return which ranks that do not wait have made a step since some moment; none unless fewer ranks wait.

    As many may wait in sends and receives. An evaluator, or a server, waits by design for those that train.
    """
    waiting = np.unique(np.concatenate([np.zeros(0, np.int64), *(wait.waiting for wait in waits)]))
    go_on: Flags = job.stepped_at_s > since_s
    go_on[waiting] = False
    num_more = int(go_on.sum()) - len(waiting)
    are_few = num_more > 0 or (num_more == 0 and all(wait.peer_call is not None for wait in waits))
    return go_on if are_few else np.zeros_like(go_on)


def is_common(job: JobModel, wait: Wait) -> bool:
    """Return whether all members are in this call, which is the same for all, as far as known."""
    table = job.groups.get(wait.group)
    if table is None or wait.peer_call is not None or table.name.startswith(FIRST_GROUP):
        return True
    is_here, is_further = table.enqueued == wait.seq, table.enqueued > wait.seq
    if (table.completed >= wait.seq).any() or len(set(table.code[is_here].tolist())) != 1:
        return False
    if not is_further.any():
        return bool(is_here.all())
    # NCCL's calls return immediately: the recorder holds those that ranks have made since.
    ops = table.history.calls_at(wait.seq)[0] if table.history is not None else None
    return ops is not None and bool((ops != 0).all() and (ops == ops[0]).all())


def is_root_unknown(job: JobModel, wait: Wait) -> bool:
    """Return whether the source or destination that each waiting rank has passed is unknown."""
    table = job.groups.get(wait.group)
    if wait.op not in ONE_WAY_OPS or table is None:
        return False
    if np.isin(job.phase[wait.waiting], _FORWARDS).all():
        # DDP's own broadcast of buffers: the program passes nothing.
        return False
    history = table.history
    if history is None:
        return True
    is_known = (history.roots_at(wait.seq) != 0) | ((history.root >= 0) & (history.latest_seq == wait.seq))
    return not bool(is_known[table.slots(wait.waiting)[0]].all())
