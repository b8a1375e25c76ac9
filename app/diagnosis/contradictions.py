"""Calls that contradict each other: different ones at one seq, groups awaited in a circle, a rank that left.

Each rank reports its last calls of a group, so the first seq at which they differ is found also where ranks have gone
on since. gloo keeps operations of different kinds apart, and a rank may be one call or two further than another.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agent.wire.digest import SIZED_OPS, checksum
from agent.wire.reports import ExitReport
from app.diagnosis.causes import Cause
from app.diagnosis.exits import has_lost_peer
from app.diagnosis.point_to_point import is_transfer, odd_in_circle
from app.diagnosis.verdicts import CallCounts, Evidence, Side, Verdict, name, nodes_of
from app.diagnosis.waits import Knot, Wait, calls_by_step, circle_from, find_out_of_order, passed_by
from app.model.farewells import have_lost_peers, is_clean, is_leaving
from ddpcore.wire import ONE_WAY_OPS, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.diagnosis.rank_facts import Flags, Ranks
    from app.diagnosis.verdicts import Aftermath
    from app.model.group_table import Comparison, GroupTable
    from app.model.job_model import Death
    from ddpcore.wire import GroupReport, PastCall, RankReport

_WHERE = re.compile(r"(?P<file>[^:]+):(?P<line>\d{1,9})(?: in (?P<function>.+))?")
"""Form in which a node writes the line at which a rank failed."""
MAX_SPEAKERS = 8
"""Limit of members whose last reports are read for the calls of all."""
MAX_SIDES = 8
"""Limit of different calls shown in one sentence and one row."""
MAX_SEQS = 16
"""Limit of seqs of one group that are compared at a time."""


def mismatches(evidence: Evidence) -> list[Verdict]:
    """Name ranks whose calls at one place of a group's order differ in operation, arguments or label."""
    waits_of: dict[str, list[Wait]] = {}
    for wait in evidence.waits:
        if wait.peer_call is None:
            waits_of.setdefault(wait.group, []).append(wait)
    verdicts: list[Verdict] = []
    for group, waits in waits_of.items():
        found = _difference(evidence, evidence.job.groups[group], waits) or _of_current_calls(evidence, waits)
        if found:
            verdicts.append(found)
    return verdicts or _circles(evidence) or _out_of_order(evidence)


def _out_of_order(evidence: Evidence) -> list[Verdict]:
    """Name ranks that are in another group's call before one that the others have called first."""
    for first, later in find_out_of_order(evidence.waits):
        if min(first.waited_s, later.waited_s) >= evidence.thresholds.deadlock_s:
            ahead = msgspec.structs.replace(later, waiting=first.missing)
            waits = sorted((first, ahead), key=lambda wait: len(wait.waiting))
            return [_mismatch(evidence, waits[0], [_waiting_side(evidence, wait) for wait in waits])]
    return []


def _difference(evidence: Evidence, table: GroupTable, waits: Sequence[Wait]) -> Verdict | None:
    """Return the verdict on the first seq at which the members' last calls differ and some rank is held up."""
    history = table.history
    if history is None:
        return None
    # Also those whose call is over for some member, which may have made another one in its place.
    is_current = (evidence.facts.is_fresh | evidence.facts.is_frozen)[table.members]
    is_hung = table.is_waiting & is_current & (table.stamp == evidence.job.stamp[table.members])
    longest_s = evidence.now_s - float(table.wait_since_s[is_hung].min(initial=evidence.now_s))
    is_long = longest_s >= evidence.thresholds.confirm_s
    if not is_long and not all(wait.is_settled and not len(wait.missing) for wait in waits):
        return None
    latest_seq = int(table.enqueued[is_hung].max(initial=0))
    oldest = int(table.completed[is_hung].min(initial=latest_seq)) + 1
    # With NCCL ranks may have called many more: what they report is about the call that is held up.
    for seq in range(oldest, min(latest_seq, oldest + MAX_SEQS - 1) + 1):
        compared = table.compare(seq, is_hung & (table.enqueued == seq))
        is_held = is_hung & (table.completed < seq) & (table.enqueued >= seq)
        if compared is None or compared.is_alike or not is_held.any():
            continue
        # Until all have come, or had the time for it, either of the first two to differ may seem to be the odd one.
        if not is_long and len(compared.members) < len(table.members):
            return None
        found = _of_comparison(evidence, table, compared, table.members[is_held], longest_s)
        # Ranks whose call is not known yet may show which one is odd.
        return found if found.culprits or longest_s >= evidence.thresholds.deadlock_s else None
    return None


def _of_comparison(
    evidence: Evidence, table: GroupTable, compared: Comparison, held: Ranks, waited_s: float
) -> Verdict:
    sides = [side_of(evidence, table, part, compared.seq) for part in compared.parts()][:MAX_SIDES]
    odd = odd_ones(sides, len(table.members) - len(compared.members)) or _awaited_side(evidence, sides)
    sides = [*odd, *(side for side in sides if side not in odd)]
    culprits = sorted(rank for side in odd for rank in side.ranks)
    wait = sides[-1]
    return Verdict(
        cause=Cause.MISMATCH,
        culprits=tuple(culprits),
        waiting=tuple(np.setdiff1d(held, culprits).tolist()),
        nodes=nodes_of(evidence, np.array(culprits, np.int64)),
        job=evidence.job.job_id,
        attempt=evidence.job.attempt,
        group=table.name,
        seq=compared.seq,
        op=(odd or sides)[0].op or wait.op,
        waited_s=waited_s,
        place=(odd or sides)[0].place,
        step=step_of(evidence, culprits),
        sides=tuple(sides),
        counts=call_counts(evidence, table.name, sides),
    )


def odd_ones(sides: Sequence[Side], num_unknown: int) -> list[Side]:
    """Return the smallest sides; none where as many ranks whose call is not known could make them the largest."""
    fewest, most = len(sides[0].ranks), len(sides[-1].ranks)
    if num_unknown and (fewest == most or num_unknown >= most):
        return []
    return [side for side in sides if len(side.ranks) == fewest]


def _awaited_side(evidence: Evidence, sides: Sequence[Side]) -> list[Side]:
    """Return the smallest side where only its ranks have left others waiting in a send or a receive.

    Of two equally small ones: where ranks wait for it before they come to this call, to which it has come without them.
    """
    waits = [wait for wait in evidence.waits if wait.peer_call is not None]
    # An awaited rank may be too early; a different source passed to the same call is not found this way.
    have_other_roots = len({side.op for side in sides}) == 1 and len({side.root for side in sides}) > 1
    if not waits or len(sides) < 2 or have_other_roots:
        return []
    known = {rank for side in sides for rank in side.ranks}
    if len(sides[0].ranks) == len(sides[1].ranks):
        table = evidence.job.groups[sides[0].group]
        to_come = table.members[table.enqueued < sides[0].seq]
        waits = [wait for wait in waits if np.isin(wait.waiting, to_come).all()]
    left = known & {rank for wait in waits for rank in wait.missing.tolist()}
    smallest = [side for side in sides if len(side.ranks) == len(sides[0].ranks)]
    return [side for side in smallest if left and left <= set(side.ranks)]


def side_of(evidence: Evidence, table: GroupTable, ranks: Ranks, seq: int) -> Side:
    """Return the call of ranks at a seq, from the report of one of them that is still in it."""
    slots = _slots(table, ranks)
    is_there = (table.completed[slots] < seq) & (table.enqueued[slots] >= seq)
    # A rank that lost the others failed in its last call, though that counts as over then.
    has_failed = np.isin(ranks, list(have_lost_peers(evidence.job))) & (table.enqueued[slots] == seq)
    has_failed &= ~evidence.job.has_peer_calls[ranks]
    # The line of a call that has just begun may have been read before it.
    is_seen = has_failed | (is_there & table.is_waiting[slots])
    is_there |= has_failed
    speakers = next((ranks[some] for some in (is_seen, is_there) if some.any()), ranks[:1])
    speaker = int(speakers[0])
    report, group = _report_of(evidence, table, speaker)
    reported = (_report_of(evidence, table, rank)[1] for rank in speakers[:MAX_SPEAKERS].tolist())
    past = (call for one in reported if one is not None for call in one.past)
    call = next((call for call in past if call.seq == seq), None)
    is_latest = group is not None and group.enqueued_seq == seq
    op = call.op if call is not None else _op_of(evidence, table, speaker, seq)
    # A main thread that has called more since is in no barrier: another thread is.
    is_shown = is_seen.any() and (is_latest or op != "barrier")
    return Side(
        tuple(ranks.tolist()),
        table.name,
        seq,
        op,
        "",
        call.num_elements if call is not None else -1,
        evidence.place_of(speaker) if is_shown else None,
        dtype=call.dtype if call is not None else "",
        root=_root_of(group, call, is_latest=is_latest),
        reduce_op=group.reduce_op if group is not None and is_latest else "",
        phase=report.phase if report is not None and is_there.any() else None,
    )


def _report_of(evidence: Evidence, table: GroupTable, rank: int) -> tuple[RankReport | None, GroupReport | None]:
    """Return a rank's last report, and its part on a group."""
    worker = evidence.job.worker(rank)
    report = None if worker is None else worker.report
    group = None if report is None else next((group for group in report.groups if group.group == table.name), None)
    return report, group


def _root_of(group: GroupReport | None, call: PastCall | None, *, is_latest: bool) -> int | None:
    """Return the source or destination that a rank has passed to a call, where it is known."""
    if group is not None and is_latest and group.root is not None:
        return group.root
    return call.root if call is not None and call.root >= 0 else None


def _op_of(evidence: Evidence, table: GroupTable, rank: int, seq: int) -> str:
    """Return the operation that a rank last reported at a seq, empty where its name is not known."""
    if table.history is None:
        return ""
    known = int(table.history.calls_at(seq)[0][_slots(table, np.array([rank]))[0]])
    return next((op for op, _ in evidence.job.calls if known and checksum(op) == known), "")


def step_of(evidence: Evidence, ranks: Sequence[int]) -> int | None:
    """Return the last step of the first of some ranks, None where none is known."""
    steps = evidence.job.step[list(ranks)]
    return int(steps[0]) if len(steps) and steps[0] >= 0 else None


def call_counts(evidence: Evidence, group: str, sides: Sequence[Side]) -> CallCounts | None:
    """Return how many calls the smallest and the largest side had made by the steps that both have finished."""
    few, many = (calls_by_step(evidence.job, group, side.ranks[0]) for side in (sides[0], sides[-1]))
    common = sorted(few.keys() & many.keys())
    if not common:
        return None
    last = common[-1]
    alike = [step for step in common if few[step] == many[step]]
    if few[last] == many[last]:
        return CallCounts(last, 0)
    return CallCounts(alike[-1] if alike else None, few[last] - many[last])


def _of_current_calls(evidence: Evidence, waits: Sequence[Wait]) -> Verdict | None:
    """Return the difference between ranks that wait at the same seq, where no history is known."""
    for wait in waits:
        have_all_come = wait.is_settled and not len(wait.missing)
        sides = _sides(evidence, wait) if have_all_come or wait.waited_s >= evidence.thresholds.confirm_s else []
        # Ranks that have gone on have made some call there too, and those to come may make either.
        num_unknown = len(evidence.job.groups[wait.group].members) - len(wait.waiting)
        if len(sides) > 1 and odd_ones(sides, num_unknown):
            return _mismatch(evidence, wait, sides)
    return None


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
        noted = counts[is_call & (counts >= 0)] if op in SIZED_OPS else counts[:0]
        for num_elements in [*np.unique(noted).tolist()] or [-1]:
            is_side = is_call & ((counts == num_elements) | (num_elements < 0))
            ranks = wait.waiting[is_side]
            place = evidence.place_of(int(ranks[0]))
            sides.append(Side(tuple(ranks.tolist()), wait.group, wait.seq, op, label, num_elements, place))
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))[:MAX_SIDES]


def _lowest(counts: Ranks) -> int:
    """Return the lowest reported count; ranks that report none agree with every other."""
    noted = counts[counts >= 0]
    return int(noted.min()) if len(noted) else -1


def _slots(table: GroupTable, ranks: Ranks) -> Ranks:
    return ranks if table.slot_of is None else np.searchsorted(table.members, ranks)


def _mismatch(evidence: Evidence, wait: Wait, sides: Sequence[Side]) -> Verdict:
    """Return the verdict: the smallest side is the odd one out; of sides of equal size any may be right."""
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
        called_seq=wait.called_seq,
        op=sides[0].op,
        label=sides[0].label,
        waited_s=wait.waited_s,
        place=sides[0].place,
        sides=tuple(sides),
    )


def _circles(evidence: Evidence) -> list[Verdict]:
    """Name ranks that wait for each other in different groups: none in the circle can ever come."""
    verdicts: list[Verdict] = []
    noted: set[int] = set()
    for knot in sorted(evidence.knots, key=lambda knot: len(knot.chain)):
        if noted & set(knot.chain):
            continue
        if waits := _circle_of(evidence, knot):
            noted |= set(knot.chain)
            has_transfers = any(is_transfer(wait) for wait in evidence.waits)
            odd = odd_in_circle(evidence.job, waits, has_transfers=has_transfers)
            if not knot.is_closed:
                odd = passed_by(evidence.job, waits, evidence.now_s - evidence.thresholds.stall_s)
            waits.sort(key=lambda wait: (not np.isin(odd or [], wait.waiting).any(), len(wait.waiting), *wait.waiting))
            verdict = _mismatch(evidence, waits[0], [_waiting_side(evidence, wait) for wait in waits[:MAX_SIDES]])
            victims = _led_to(evidence, knot.chain)
            if odd is not None:
                verdict = msgspec.structs.replace(verdict, culprits=tuple(odd))
            are_beside = has_transfers and not any(is_transfer(wait) for wait in waits)
            if are_beside and not any(set(verdict.culprits) <= set(wait.waiting.tolist()) for wait in waits):
                # A rank that is held up in a send or a receive may be early or late for either call.
                verdict = msgspec.structs.replace(verdict, culprits=())
            verdicts.append(msgspec.structs.replace(verdict, waiting=tuple(sorted(victims - set(verdict.culprits)))))
    return verdicts


def _circle_of(evidence: Evidence, knot: Knot) -> list[Wait]:
    """Return the waits of a knot's circle, each of which waits for another of them; none while they may end.

    Where other ranks are awaited as well, who come later or never, the ranks of the circle cannot meet either.
    """
    thresholds = evidence.thresholds
    waits = [evidence.waits[index] for index in knot.chain]
    if not any(len(wait.missing) for wait in waits) or not (knot.is_closed or len(waits) > 1):
        return []
    circle = _shortest_circle(evidence, knot.chain)
    least_s = thresholds.deadlock_s
    if not knot.is_closed:
        if any(wait.op in ONE_WAY_OPS or wait.peer_call is not None for wait in circle):
            return []
        waits, least_s = circle, thresholds.stall_s
    stands_otherwise = evidence.facts.is_immobile[[rank for wait in waits for rank in wait.waiting.tolist()]].any()
    is_lasting = min((wait.waited_s for wait in waits), default=0.0) >= least_s and not stands_otherwise
    return circle if is_lasting and all(wait.is_settled and len(wait.missing) for wait in waits) else []


def _shortest_circle(evidence: Evidence, chain: Sequence[int]) -> list[Wait]:
    """Return the waits of the shortest circle: those that only lead to it are victims.

    There is none where the chain ends at ranks whose sends or receives cannot be followed.
    """
    wait_of = np.full(evidence.job.world_size, -1, np.int64)
    for index in reversed(chain):
        wait_of[evidence.waits[index].waiting] = index
    leads_to = {index: np.unique(wait_of[evidence.waits[index].missing]).tolist() for index in chain}
    circles = [circle for index in chain if (circle := circle_from(index, leads_to))]
    return [evidence.waits[index] for index in min(circles, key=len, default=[])]


def _led_to(evidence: Evidence, chain: Sequence[int]) -> set[int]:
    """Return the ranks whose waits lead to one of these waits."""
    knots = [knot for knot in evidence.knots if not set(chain).isdisjoint(knot.chain)]
    return {rank for knot in knots for rank in knot.wait.waiting.tolist()}


def _waiting_side(evidence: Evidence, wait: Wait) -> Side:
    place = evidence.place_of(int(wait.waiting[0]))
    return Side(tuple(wait.waiting.tolist()), wait.group, wait.seq, wait.op, wait.label, -1, place, wait.peer_call)


def fewer_calls(evidence: Evidence, leavers: Sequence[Death], lost_connection: Sequence[int]) -> list[Verdict]:
    """Name ranks that left while others wait, or waited until they died, in a call that they never made.

    They ended with code 0, are about to end, or have closed their connections and keep running.
    """
    deaths = evidence.job.deaths
    # A rank that has lost its peer may take seconds to end.
    early = [*leavers] or [deaths[rank] for rank in sorted(called_less(evidence)) if rank in deaths]
    culprits = {death.rank for death in early}
    has_closed = bool(early) and not (is_clean(early[0]) or evidence.job.is_ending[early[0].rank])
    end = early[0].exit if early else None
    for knot in evidence.knots:
        waiters_at_s = float(evidence.job.report_at_s[knot.wait.waiting].max())
        is_out = evidence.facts.is_dead | is_leaving(evidence.job)
        for rank in knot.roots[is_out[knot.roots]].tolist():
            death = deaths.get(rank)
            left_s = float(evidence.job.report_at_s[rank]) if death is None else death.at_s
            has_left = (death is None or is_clean(death)) and waiters_at_s - left_s > evidence.thresholds.confirm_s
            if has_left and any(_holds_up(evidence, rank, evidence.waits[index]) for index in knot.chain):
                culprits.add(rank)
                end = end or (ExitReport() if death is None else death.exit)
    if not culprits:
        return []
    victims = tuple(sorted((have_lost_peers(evidence.job) | set(lost_connection)) - culprits))
    facts = {"lost_connection": victims, "exit": end, "has_closed": has_closed}
    verdict = name(evidence, Cause.FEWER_CALLS, culprits, **facts)
    if verdict.seq is None:
        verdict = msgspec.structs.replace(verdict, **_missed_call(evidence, sorted(culprits), victims))
    return [msgspec.structs.replace(verdict, waiting_place=_place_of_waiting(evidence, verdict))]


def _holds_up(evidence: Evidence, rank: int, wait: Wait) -> bool:
    """Return whether a rank that has left never made a call, or left before its GPU had come to it."""
    is_cut_off = rank in wait.stuck and wait.waited_s >= evidence.thresholds.silent_s
    return rank in wait.missing or is_cut_off


def _missed_call(evidence: Evidence, culprits: Sequence[int], victims: Sequence[int]) -> dict[str, Any]:
    """Return the call that victims died in and that a culprit never made, by the last reports of all."""
    for table in evidence.job.groups.values():
        left, lost = np.isin(table.members, culprits), np.isin(table.members, victims)
        if left.sum() < len(culprits) or not lost.any():
            continue
        # A call that is over for a rank that goes on was made by the culprit since its last report.
        goes_on = ~(evidence.job.has_raised | evidence.facts.is_dead)[table.members]
        over = max(int(table.enqueued[left].min()), int(table.completed[goes_on].max(initial=-1)))
        is_ahead = lost & (table.enqueued > over)
        if is_ahead.any():
            slot = int(np.flatnonzero(is_ahead)[int(table.enqueued[is_ahead].argmin())])
            op, label = evidence.job.calls[table.code[slot]]
            return {"group": table.name, "seq": int(table.enqueued[slot]), "op": op, "label": label}
    return {}


def _place_of_waiting(evidence: Evidence, verdict: Verdict) -> Place | None:
    """Return where the first waiting rank stands, or where the first that lost its connection failed."""
    places = (evidence.place_of(rank) for rank in (*verdict.waiting, *verdict.lost_connection)[:MAX_SIDES])
    if (place := next((place for place in places if place is not None), None)) is not None:
        return place
    assignments = evidence.job.assignments
    causes = [assignments[node].status.root_cause for node in evidence.job.together.nodes_with_cause]
    for cause in causes:
        is_victim = cause is not None and cause.is_consequence and cause.rank in verdict.lost_connection
        if cause is not None and is_victim and (found := _WHERE.fullmatch(cause.where)):
            return Place(found["file"], int(found["line"]), found["function"] or "")
    return None


def missing_at_time_out(evidence: Evidence, aftermath: Aftermath | None) -> list[Verdict]:
    """Name the ranks that had not made the call in which others timed out, by the last reports of all.

    For a console that opens only now. A rank that waited itself, or lost the others, is a victim too; so may be one
    that was further than another.
    """
    if aftermath is None or not aftermath.is_timeout:
        return []
    job = evidence.job
    is_victim = np.isnan(job.report_at_s) | job.has_open_transfers
    is_victim[[*aftermath.ranks, *(rank for rank, death in job.deaths.items() if has_lost_peer(death))]] = True
    for table in job.groups.values():
        is_victim[table.members[table.is_waiting]] = True
    for table in job.groups.values():
        has_timed_out = np.isin(table.members, aftermath.ranks)
        if not has_timed_out.any():
            continue
        wait = _wait_at_end(evidence, table, has_timed_out, aftermath)
        is_missing = (table.enqueued < wait.seq) & ~is_victim[table.members]
        missing = table.members[is_missing & (table.enqueued == table.enqueued[is_missing].min(initial=wait.seq))]
        sides = [] if len(missing) else _sides(evidence, wait)
        if len(sides) > 1:
            return [msgspec.structs.replace(_mismatch(evidence, wait, sides), aftermath=aftermath)]
        if len(missing):
            facts = {"group": wait.group, "seq": wait.seq, "op": wait.op, "label": wait.label}
            facts |= {"waited_s": wait.waited_s, "waiting": tuple(wait.waiting.tolist()), "aftermath": aftermath}
            return [name(evidence, Cause.STRAGGLER, missing.tolist(), **facts)]
    return []


def _wait_at_end(evidence: Evidence, table: GroupTable, has_timed_out: Flags, aftermath: Aftermath) -> Wait:
    """Return the wait in which ranks of a group timed out."""
    seq = int(table.enqueued[has_timed_out].max())
    is_here = table.enqueued == seq
    op, label = evidence.job.calls[table.code[int(np.flatnonzero(is_here & has_timed_out)[0])]]
    waiting, nobody = table.members[is_here], table.members[:0]
    waited_s, since_s = aftermath.timeout_s or 0.0, np.zeros(len(waiting))
    job = evidence.job
    return Wait(job.job_id, job.attempt, table.name, seq, op, label, waiting, nobody, waited_s, True, nobody, since_s)  # noqa: FBT003 - by place


def called_less(evidence: Evidence) -> frozenset[int]:
    """Return the ranks that left with code 0, or are about to end, and had called less than one that ended badly.

    One whose program has ended since it lost another counts as one that ended badly.
    """
    deaths = evidence.job.deaths
    badly = {rank for rank, death in deaths.items() if not is_clean(death)}
    bad = np.array(sorted(badly | have_lost_peers(evidence.job)), np.int64)
    clean = np.array([rank for rank, death in deaths.items() if is_clean(death)], np.int64)
    clean = np.union1d(clean, np.flatnonzero(is_leaving(evidence.job)))
    found: set[int] = set()
    if len(bad) == 0 or len(clean) == 0:
        return frozenset()
    for table in evidence.job.groups.values():
        bad_members, clean_members = np.intersect1d(bad, table.members), np.intersect1d(clean, table.members)
        if len(bad_members) and len(clean_members):
            furthest = table.enqueued[_slots(table, bad_members)].max()
            found.update(clean_members[table.enqueued[_slots(table, clean_members)] < furthest].tolist())
    return frozenset(found)
