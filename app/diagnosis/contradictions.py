"""Calls that contradict each other: different operations at one seq, groups awaited in a circle, a rank that left."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.exits import is_clean
from app.diagnosis.verdicts import Evidence, Side, Verdict, name, nodes_of
from app.rows import Cause

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.diagnosis.rank_facts import Ranks
    from app.diagnosis.waits import Wait
    from app.model.group_table import GroupTable
    from app.model.job_model import Death

SIZED_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Operations whose members must bring equally many elements."""
MAX_SIDES = 8
"""Different calls told apart in one sentence and one row."""


def mismatches(evidence: Evidence) -> list[Verdict]:
    """Name ranks that wait in the same place of a group's order in different operations, sizes or labels."""
    verdicts = []
    for wait in evidence.waits:
        # Until all have come, or had the time for it, the first two to differ could both seem to be the odd one.
        if wait.peer_call is not None:
            continue
        have_all_come = wait.is_settled and not len(wait.missing)
        sides = _sides(evidence, wait) if have_all_come or wait.waited_s >= evidence.thresholds.confirm_s else []
        if len(sides) > 1:
            verdicts.append(_mismatch(evidence, wait, sides))
    return verdicts or _circles(evidence)


def _sides(evidence: Evidence, wait: Wait) -> list[Side]:
    table = evidence.job.groups[wait.group]
    slots = _slots(table, wait.waiting)
    codes, counts = table.code[slots], table.num_elements[slots]
    is_alike = codes.min() == codes.max() and (wait.op not in SIZED_OPS or _lowest(counts) == counts.max())
    if is_alike:
        return []
    sides: list[Side] = []
    for code in np.unique(codes).tolist():
        op, label = evidence.job.calls[code]
        is_call = codes == code
        told = counts[is_call & (counts >= 0)] if op in SIZED_OPS else counts[:0]
        for num_elements in [*np.unique(told).tolist()] or [-1]:
            is_side = is_call & ((counts == num_elements) | (num_elements < 0))
            ranks = wait.waiting[is_side]
            place = evidence.place_of(int(ranks[0]))
            sides.append(Side(tuple(ranks.tolist()), wait.group, wait.seq, op, label, num_elements, place))
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))[:MAX_SIDES]


def _lowest(counts: Ranks) -> int:
    """Return the lowest count that is told; ranks that tell none agree with every other."""
    told = counts[counts >= 0]
    return int(told.min()) if len(told) else -1


def _slots(table: GroupTable, ranks: Ranks) -> Ranks:
    return ranks if table.slot_of is None else np.searchsorted(table.members, ranks)


def _mismatch(evidence: Evidence, wait: Wait, sides: Sequence[Side]) -> Verdict:
    """Return the verdict: the smallest side is the odd one out; of sides of one size nobody can say which."""
    odd = [side for side in sides if len(side.ranks) == len(sides[0].ranks)]
    culprits = sorted(rank for side in odd for rank in side.ranks)
    return Verdict(
        cause=Cause.MISMATCH,
        culprits=tuple(culprits),
        waiting=tuple(np.setdiff1d(wait.waiting, culprits).tolist()),
        nodes=nodes_of(evidence, np.array(culprits)),
        job=wait.job,
        attempt=wait.attempt,
        group=wait.group,
        seq=wait.seq,
        op=sides[0].op,
        label=sides[0].label,
        waited_s=wait.waited_s,
        place=sides[0].place,
        sides=tuple(sides),
    )


def _circles(evidence: Evidence) -> list[Verdict]:
    """Name ranks that wait for each other in different groups: nobody in the circle can ever come."""
    verdicts: list[Verdict] = []
    told: set[int] = set()
    for knot in sorted(evidence.knots, key=lambda knot: len(knot.chain)):
        waits = [evidence.waits[index] for index in knot.chain]
        if not knot.is_closed or told & set(knot.chain) or not any(len(wait.missing) for wait in waits):
            continue
        is_lasting = min(wait.waited_s for wait in waits) >= evidence.thresholds.deadlock_s
        if is_lasting and all(wait.is_settled and len(wait.missing) for wait in waits):
            told |= set(knot.chain)
            sides = [_side_of(evidence, wait) for wait in waits]
            longest = max(waits, key=lambda wait: wait.waited_s)
            verdict = _mismatch(evidence, longest, sorted(sides, key=lambda side: len(side.ranks))[:MAX_SIDES])
            victims = _led_to(evidence, knot.chain) - set(verdict.culprits)
            verdicts.append(msgspec.structs.replace(verdict, waiting=tuple(sorted(victims))))
    return verdicts


def _led_to(evidence: Evidence, chain: Sequence[int]) -> set[int]:
    """Return the ranks whose waits lead to one of these waits."""
    knots = [knot for knot in evidence.knots if not set(chain).isdisjoint(knot.chain)]
    return {rank for knot in knots for rank in knot.wait.waiting.tolist()}


def _side_of(evidence: Evidence, wait: Wait) -> Side:
    place = evidence.place_of(int(wait.waiting[0]))
    return Side(tuple(wait.waiting.tolist()), wait.group, wait.seq, wait.op, wait.label, -1, place, wait.peer_call)


def fewer_calls(evidence: Evidence, leavers: Sequence[Death], lost_connection: Sequence[int]) -> list[Verdict]:
    """Name ranks that left with code 0 while others wait, or waited until they died, in a call that they never made."""
    culprits = {death.rank for death in leavers}
    end = leavers[0].exit if leavers else None
    for knot in evidence.knots:
        waiters_at_s = float(evidence.job.report_at_s[knot.wait.waiting].max())
        for rank in knot.roots[evidence.facts.is_dead[knot.roots]].tolist():
            death = evidence.job.deaths[rank]
            has_left = is_clean(death) and waiters_at_s - death.at_s > evidence.thresholds.confirm_s
            if has_left and any(rank in evidence.waits[index].missing for index in knot.chain):
                culprits.add(rank)
    if not culprits:
        return []
    victims = tuple(rank for rank in sorted(lost_connection) if rank not in culprits)
    return [name(evidence, Cause.FEWER_CALLS, culprits, lost_connection=victims, exit=end)]


def called_less(evidence: Evidence) -> frozenset[int]:
    """Return the ranks that left with code 0 and had called fewer collectives than one that ended badly."""
    deaths = evidence.job.deaths
    bad = np.array([rank for rank, death in deaths.items() if not is_clean(death)], np.int64)
    clean = np.array([rank for rank, death in deaths.items() if is_clean(death)], np.int64)
    found: set[int] = set()
    if len(bad) == 0 or len(clean) == 0:
        return frozenset()
    for table in evidence.job.groups.values():
        bad_members, clean_members = np.intersect1d(bad, table.members), np.intersect1d(clean, table.members)
        if len(bad_members) and len(clean_members):
            furthest = table.enqueued[_slots(table, bad_members)].max()
            found.update(clean_members[table.enqueued[_slots(table, clean_members)] < furthest].tolist())
    return frozenset(found)
