"""Collectives that gloo ended with an abort: the ranks whose calls differ, and how.

gloo ends the process of a rank that is sent more than its call expects. That rank is a victim as often as a culprit,
and dies before it reports its last call. The others lose it, and their last reports hold their own calls; the lengths
of the pieces that did not fit show what the dead rank had called.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.causes import Cause
from app.diagnosis.contradictions import MAX_SEQS, MAX_SIDES, MAX_SPEAKERS, call_counts, odd_ones, side_of, step_of
from app.diagnosis.exits import ended_by_gloo
from app.diagnosis.verdicts import Evidence, Side, Verdict, nodes_of
from app.diagnosis.waits import calls_by_step
from app.model.job_model import PHASE_CODE
from ddpcore.wire import ONE_WAY_OPS, PeerCall, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.diagnosis.rank_facts import Ranks
    from app.model.group_table import GroupTable
    from app.model.job_model import Death
    from ddpcore.wire import PastCall, Place

DTYPE_BYTES = {
    **dict.fromkeys(("Bool", "Byte", "Char"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("ComplexFloat", "Double", "Long"), 8),
}
"""Bytes of an element, by torch's name of its type."""
RING_OPS = frozenset({"all_reduce", "reduce"})
"""Operations whose data gloo sends in pieces from rank to rank, rather than whole."""
MAX_PIECE_BYTES = 1 << 20
"""Longest piece in bytes. Source: gloo/allreduce.h, `kMaxSegmentSize`."""
SURE_ELEMENTS = 64
"""Elements in a piece from which its length shows the size of the whole: to one part in as many."""
MAX_PEERS = 256
"""Limit of ranks whose reports are searched for sends, and for the sizes of an all_gather."""
CALLS_AHEAD = [PHASE_CODE[Phase.BACKWARD], PHASE_CODE[Phase.FORWARD]]
"""Phases in which DDP makes calls before its earlier ones are over."""
_LENGTHS = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<sent>\d{1,18}) vs (?P<expected>\d{1,18})")
"""Bytes of the message that came, and of the one that a rank expected. Source: gloo/transport/tcp/pair.cc."""


class _Lengths(NamedTuple):
    """Bytes of a message that a rank was sent, and of the one that it expected."""

    sent: int
    expected: int


def aborted(evidence: Evidence, deaths: Sequence[Death], lost_connection: Sequence[int]) -> list[Verdict]:
    """Return the verdict on the call in which gloo ended some ranks, with what each member is known to have passed.

    They are victims: another rank has passed more. It is named where the others' calls leave only one candidate.
    """
    ended = {death.rank: _lengths(death) for death in deaths if ended_by_gloo(death)}
    victims = np.array(sorted(ended), np.int64)
    if not len(victims):
        return []
    tables = [table for table in evidence.job.groups.values() if np.isin(victims, table.members).all()]
    found = [_of_abort(evidence, table, victims, ended) for table in tables]
    # Where the members' calls differ, it was there; else where most of them are known to have called.
    verdict = max(found, key=lambda one: (len(one.sides), sum(len(side.ranks) for side in one.sides)), default=None)
    if verdict is None or len(verdict.sides) < 2:
        # No collective is known to differ: it may have been a receive.
        verdict = _short_receive(evidence, ended) or verdict
    if verdict is None:
        job = evidence.job
        place = _place_of_odd(evidence, (), victims.tolist())
        verdict = Verdict(cause=Cause.MISMATCH, culprits=(), job=job.job_id, attempt=job.attempt, place=place)
    lost = tuple(rank for rank in sorted(lost_connection) if rank not in verdict.culprits)
    aborts = tuple(victims.tolist())
    return [msgspec.structs.replace(verdict, aborted=aborts, lost_connection=lost)]


def _short_receive(evidence: Evidence, ended: Mapping[int, _Lengths | None]) -> Verdict | None:
    """Return the verdict on a send, and the receive with room for less, in which gloo ended a rank."""
    for rank, lengths in ended.items():
        for sender in np.flatnonzero(evidence.job.has_peer_calls)[:MAX_PEERS].tolist():
            found = None if lengths is None else _sent_to(evidence, rank, sender, lengths)
            if found is not None:
                return _of_receive(evidence, rank, sender, found)
    return None


def _sent_to(evidence: Evidence, rank: int, sender: int, lengths: _Lengths) -> tuple[PeerCall, PeerCall] | None:
    """Return the send of a rank, and its receive, that are as long as the message that did not fit.

    The receiver dies before it has reported that receive, or while it waits in it.
    """
    for send in _peer_calls(evidence, sender):
        if (send.op, send.peer) != ("send", rank):
            continue
        halves = [
            call
            for call in _peer_calls(evidence, rank)
            if (call.op, call.group, call.tag) == ("recv", send.group, send.tag) and call.peer in (sender, None)
        ]
        known = {number: size for call in halves for number, size in _sizes(call).items() if call.peer is not None}
        last = max((call.number for call in halves if call.peer is not None), default=0)
        for number, size in sorted(_sizes(send).items()):
            is_met = known[number] == lengths.expected if number in known else number > last
            if size == lengths.sent and is_met:
                receive = PeerCall("recv", sender, send.group, send.tag, number, (lengths.expected,))
                return msgspec.structs.replace(send, number=number, num_bytes=(size,)), receive
    return None


def _sizes(call: PeerCall) -> dict[int, int]:
    """Return the bytes of the last such calls, by number."""
    return {call.number - ago: size for ago, size in enumerate(reversed(call.num_bytes))}


def _peer_calls(evidence: Evidence, rank: int) -> Sequence[PeerCall]:
    worker = evidence.job.worker(rank)
    return () if worker is None or worker.report is None else worker.report.peer_calls


def _of_receive(evidence: Evidence, rank: int, sender: int, calls: tuple[PeerCall, PeerCall]) -> Verdict:
    """Return the verdict on two ranks of which either may be right."""
    places = (_place_in(evidence, sender, calls[0]), evidence.end_place_of(rank) or _place_in(evidence, rank, calls[1]))
    sides = tuple(
        Side((one,), call.group, call.number, call.op, "", -1, place, call)
        for one, call, place in zip((sender, rank), calls, places, strict=True)
    )
    culprits = sorted((sender, rank))
    return Verdict(
        cause=Cause.MISMATCH,
        culprits=tuple(culprits),
        nodes=nodes_of(evidence, np.array(culprits, np.int64)),
        job=evidence.job.job_id,
        attempt=evidence.job.attempt,
        group=calls[0].group,
        seq=calls[0].number,
        op=calls[0].op,
        place=sides[0].place or sides[1].place,
        step=step_of(evidence, culprits),
        sides=sides,
    )


def _place_in(evidence: Evidence, rank: int, call: PeerCall) -> Place | None:
    """Return where a rank has made a send or a receive, while it is known to wait in it."""
    worker = evidence.job.worker(rank)
    wait = None if worker is None or worker.report is None else worker.report.peer_wait
    key = (call.op, call.peer, call.group, call.tag, call.number)
    waits = [] if wait is None else wait.calls
    is_in = any((one.op, one.peer, one.group, one.tag, one.number) == key for one in waits)
    return evidence.place_of(rank) if is_in else None


def _lengths(death: Death) -> _Lengths | None:
    found = _LENGTHS.search(death.exit.error)
    return None if found is None else _Lengths(int(found["sent"]), int(found["expected"]))


def _of_abort(evidence: Evidence, table: GroupTable, victims: Ranks, ended: Mapping[int, _Lengths | None]) -> Verdict:
    past = _past_calls(evidence, table)
    parts, seq = _parts_of_abort(evidence, table, past, ended)
    sides = [side_of(evidence, table, part, seq) for part in parts][:MAX_SIDES]
    is_known = len(parts) > 1 or _is_here(past, seq, ended, (parts, table))
    num_known, known = len(sides), {rank for side in sides for rank in side.ranks}
    sides = _with_messages(sides, past, ended, table) if is_known else sides
    is_guessed = len(sides) > num_known
    sides = _with_victims(sides, victims)
    unknown = np.setdiff1d(table.members, [rank for side in sides for rank in side.ranks])
    misfits = [rank for rank, pair in ended.items() if pair is not None and not _was_sent(pair, past, seq, table)]
    is_shown = is_known and not (is_guessed and len(unknown)) and not np.isin(misfits, unknown).any()
    culprits = _odd_in_abort(table, sides, unknown, victims) if is_shown else []
    is_shifted = len(sides) > 1 and all(_is_usual(side, past, seq) for side in sides)
    guessed = set(victims.tolist()) - known
    sides = [
        _without_rough_size(side, len(table.members)) if guessed.issuperset(side.ranks) else side for side in sides
    ]
    sides = [_with_end_place(evidence, side, victims) for side in sides]
    job = evidence.job
    return Verdict(
        cause=Cause.MISMATCH,
        culprits=tuple(culprits),
        nodes=nodes_of(evidence, np.array(culprits, np.int64)),
        job=job.job_id,
        attempt=job.attempt,
        group=table.name,
        seq=seq if sides else None,
        op=sides[0].op if sides else _op_of_messages(past, ended, len(table.members)),
        place=_place_of_odd(evidence, sides, culprits or unknown[np.isin(unknown, victims)].tolist()),
        step=step_of(evidence, culprits),
        sides=tuple(sides),
        counts=call_counts(evidence, table.name, sides) if len(sides) > 1 else None,
        is_shifted=is_shifted,
    )


def _without_rough_size(side: Side, num_members: int) -> Side:
    """Return a side, known by the length of a message alone, without a size of which that length is no evidence."""
    length = max(_pieces(side, num_members), default=0)
    is_sure = side.op not in RING_OPS or length >= SURE_ELEMENTS * DTYPE_BYTES.get(side.dtype, 0)
    return side if is_sure else msgspec.structs.replace(side, num_elements=-1)


def _with_end_place(evidence: Evidence, side: Side, victims: Ranks) -> Side:
    """Return a side with the line at which gloo ended one of its ranks, where no other line of it is known."""
    ended = (evidence.end_place_of(rank) for rank in side.ranks if rank in victims)
    return msgspec.structs.replace(side, place=side.place or next(filter(None, ended), None))


def _place_of_odd(evidence: Evidence, sides: Sequence[Side], ranks: Sequence[int]) -> Place | None:
    """Return the line of the first of some ranks: of its side, else of its end.

    The places where the dead have reported themselves last lie before this call.
    """
    if not ranks:
        return None
    own = next((side.place for side in sides if ranks[0] in side.ranks), None)
    return own or evidence.end_place_of(ranks[0])


def _op_of_messages(past: Sequence[PastCall], ended: Mapping[int, _Lengths | None], num_members: int) -> str:
    """Return the one operation whose messages are as long as those that did not fit; empty where several are."""
    ops = set[str]()
    for which in (0, 1):
        seqs = _seqs_of_messages(past, ended, num_members, which)
        found = {call.op for call in past if call.seq in seqs}
        ops |= found or {""}
    return ops.pop() if len(ops) == 1 else ""


def _past_calls(evidence: Evidence, table: GroupTable) -> list[PastCall]:
    """Return the last calls of some members, from their last reports."""
    if table.history is None:
        return []
    latest = np.argsort(-table.history.latest_seq, kind="stable")[:MAX_SPEAKERS]
    calls: list[PastCall] = []
    for worker in evidence.job.workers(table.members[latest].tolist()):
        groups = worker.report.groups if worker.report is not None else ()
        calls += [call for group in groups if group.group == table.name for call in group.past]
    return calls


def _is_here(
    past: Sequence[PastCall],
    seq: int,
    ended: Mapping[int, _Lengths | None],
    parts_and_table: tuple[list[Ranks], GroupTable],
) -> bool:
    """Return whether gloo may have ended ranks in this call, judged by the length of the message.

    A rank whose call is known expected what it passed here; another was sent what the others pass, or expected it.
    """
    parts, table = parts_and_table
    here = [_pieces(call, len(table.members)) for call in past if call.seq == seq]
    if None in ended.values():
        return True
    known = {rank for part in parts for rank in part.tolist()}
    last_calls = {rank: int(table.enqueued[table.members == rank][0]) for rank in ended if rank not in known}
    # A two-way call before this one is over for a rank that has made this one: all have made it.
    met = max((call.seq for call in past if call.seq < seq and call.op not in ONE_WAY_OPS), default=-1)
    first = max(min(last_calls.values(), default=seq), met) + 1
    if any(first <= call.seq < seq and call.op in ONE_WAY_OPS for call in past):
        # The ended rank may have come no further than to that one, which others have completed.
        return False
    lengths = {pair.expected if rank in known else pair.sent for rank, pair in ended.items() if pair is not None}
    if len(known | ended.keys()) < len(table.members):  # another one may have sent it more than the others pass
        lengths |= {pair.expected for pair in ended.values() if pair is not None}
    return any(lengths & pieces for pieces in here)


def _was_sent(lengths: _Lengths, past: Sequence[PastCall], seq: int, table: GroupTable) -> bool:
    """Return whether a rank was sent what others pass in a call."""
    return any(lengths.sent in _pieces(call, len(table.members)) for call in past if call.seq == seq)


def _is_usual(side: Side, past: Sequence[PastCall], seq: int) -> bool:
    """Return whether others have made such a call before, at an earlier seq."""
    return any((side.op, side.num_elements, side.dtype) == _call(one) for one in past if one.seq < seq)


def _call(past: PastCall) -> tuple[str, int, str]:
    return (past.op, past.num_elements, past.dtype)


def _seqs_of_messages(
    past: Sequence[PastCall], ended: Mapping[int, _Lengths | None], num_members: int, which: int
) -> set[int]:
    """Return the seqs at which some member has sent, or expected, messages as long as those that did not fit.

    Args:
        past: Last calls of some members.
        ended: Lengths that did not fit, by the rank that gloo ended.
        num_members: Number of the group's members.
        which: Field of `_Lengths`.
    """
    lengths = {pair[which] for pair in ended.values() if pair is not None}
    return {call.seq for call in past if lengths & _pieces(call, num_members)}


def _pieces(call: PastCall | Side, num_members: int) -> set[int]:
    """Return the lengths of the messages in which gloo sends a call's data.

    Source: gloo/allreduce.cc and reduce.cc: each member has two pieces at least, all but the last of one length;
    gloo/allgather.cc: two halves.
    """
    element_bytes = DTYPE_BYTES.get(call.dtype, 0)
    num_bytes = call.num_elements * element_bytes
    if call.op == "all_gather":
        return {num_bytes // 2, num_bytes - num_bytes // 2} - {0}
    if num_bytes <= 0 or call.op not in RING_OPS:
        return {num_bytes} - {0}
    longest = element_bytes * max(1, MAX_PIECE_BYTES // element_bytes)
    num_pieces = _rounded_up(max(-(-num_bytes // longest), 2 * num_members), num_members)
    length = _rounded_up(-(-num_bytes // num_pieces), element_bytes)
    return {min(length, num_bytes), num_bytes % length or length}


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _with_messages(
    sides: list[Side], past: Sequence[PastCall], ended: Mapping[int, _Lengths | None], table: GroupTable
) -> list[Side]:
    """Return the sides with the ranks whose calls are known only by the length of the messages they expected.

    A rank that expected what the others pass has made their call: a rank whose call is unknown has sent it more.
    """
    known = {rank for side in sides for rank in side.ranks}
    if len(sides) != 1:
        return sides
    call = (sides[0].op, sides[0].num_elements, sides[0].dtype)
    by_call: dict[tuple[str, int, str], list[int]] = {}
    for rank, lengths in ended.items():
        if lengths is None or rank in known:
            continue
        like = {_call(one) for one in past if lengths.expected in _pieces(one, len(table.members))}
        like -= {call} if len(like) > 1 or len(known | ended.keys()) == len(table.members) else set()
        if len(like) == 1:
            by_call.setdefault(like.pop(), []).append(rank)
    alike = by_call.pop(call, [])
    sides = [msgspec.structs.replace(sides[0], ranks=tuple(sorted({*sides[0].ranks, *alike})))]
    found = [
        Side(tuple(ranks), table.name, sides[0].seq, op, "", num_elements, None, dtype=dtype)
        for (op, num_elements, dtype), ranks in by_call.items()
    ]
    return sorted([*sides, *found], key=lambda side: (len(side.ranks), side.ranks))


def _parts_of_abort(
    evidence: Evidence, table: GroupTable, past: Sequence[PastCall], ended: Mapping[int, _Lengths | None]
) -> tuple[list[Ranks], int]:
    """Return the members by call, and the seq: the first at which they differ, else a likely one, else the latest."""
    latest_seq = int(table.enqueued.max())
    if table.history is None:
        return [], latest_seq
    seqs = range(latest_seq - MAX_SEQS + 1, latest_seq + 1)
    for seq in seqs:
        compared = table.compare(seq)
        if compared is not None and not compared.is_alike:
            return compared.parts(), seq
    if len(parts := _parts_by_size(evidence, table, latest_seq)) > 1:
        return parts, latest_seq
    seqs = range(max(_last_over(evidence, table, ended) + 1, seqs.start), latest_seq + 1)
    if not seqs:
        return [], latest_seq
    sent, expected = (_seqs_of_messages(past, ended, len(table.members), which) for which in (0, 1))
    likely = [seq for seq in seqs if seq in sent | expected]
    if latest_seq in sent and _all_others_known(table, latest_seq, ended):
        # The others have made the same calls throughout: the ended rank is the odd one, wherever it was before.
        likely = [latest_seq]
    if len(likely) > 1 and not sent.isdisjoint(likely):
        # It may have expected what the others did, and another rank have sent more; or it is one call behind.
        return [], latest_seq
    seq = next((seq for seq in likely if seq in sent), latest_seq)
    ops, _ = table.history.calls_at(seq)
    known = table.members[(ops != 0) & (table.enqueued >= seq)]
    # Where all are known to have called the same, it was a later call.
    return ([known] if 0 < len(known) < len(table.members) else []), seq


def _parts_by_size(evidence: Evidence, table: GroupTable, seq: int) -> list[Ranks]:
    """Return the members by what they pass to an all_gather, the smallest part first: with gloo all must pass the same.

    With NCCL they may differ, so that no digest compares them.
    """
    ranks_of: dict[tuple[str, int, str], list[int]] = {}
    for rank in table.members[table.enqueued == seq][:MAX_PEERS].tolist():
        worker = evidence.job.worker(rank)
        groups = worker.report.groups if worker is not None and worker.report is not None else ()
        for call in (call for group in groups if group.group == table.name for call in group.past):
            if call.seq == seq and call.op == "all_gather" and call.num_elements >= 0:
                ranks_of.setdefault(_call(call), []).append(rank)
    return sorted((np.array(ranks) for ranks in ranks_of.values()), key=lambda ranks: (len(ranks), ranks.tolist()))


def _all_others_known(table: GroupTable, seq: int, ended: Mapping[int, _Lengths | None]) -> bool:
    """Return whether gloo has ended one rank, and the call of every other member is known."""
    assert table.history is not None
    is_known = (table.history.calls_at(seq)[0] != 0) & (table.enqueued >= seq)
    return len(ended) == 1 and bool((is_known | np.isin(table.members, list(ended))).all())


def _last_over(evidence: Evidence, table: GroupTable, ended: Mapping[int, _Lengths | None]) -> int:
    """Return the latest seq that is over for some member, and was the same for all.

    For a rank that lost the others, its last call counts as over though it was not finished. So may any call since its
    last step: DDP makes calls ahead, and a program may wait for its own later. A rank that gloo ended reported before.
    """
    job, members = evidence.job, table.members
    is_out = (job.has_raised | evidence.facts.is_dead)[members] & ~np.isin(members, list(ended))
    over = np.where(is_out, np.minimum(table.completed, table.enqueued - 1), table.completed)
    # An exception raised inside a call leaves the phase of that call.
    is_ahead = is_out & np.isin(job.phase[members], CALLS_AHEAD)
    is_ahead |= is_out & (job.has_raised & (job.phase == PHASE_CODE[Phase.OTHER]))[members]
    by_step = [calls_by_step(job, table.name, rank) for rank in members[is_ahead][:MAX_SPEAKERS].tolist()]
    return max([int(np.where(is_ahead, -1, over).max()), *(seq for seqs in by_step for seq in seqs.values())])


def _with_victims(sides: list[Side], victims: Ranks) -> list[Side]:
    """Return the sides with the ranks that gloo ended on the smaller one of two: they have passed less than another."""
    sizes = [side.num_elements * DTYPE_BYTES.get(side.dtype, 0) for side in sides]
    if len(sides) != 2 or min(sizes) <= 0 or sizes[0] == sizes[1]:
        return sides
    known = {rank for side in sides for rank in side.ranks}
    smaller = sides[sizes.index(min(sizes))]
    ranks = tuple(sorted({*smaller.ranks, *(set(victims.tolist()) - known)}))
    sides = [msgspec.structs.replace(side, ranks=ranks) if side is smaller else side for side in sides]
    return sorted(sides, key=lambda side: (len(side.ranks), side.ranks))


def _odd_in_abort(table: GroupTable, sides: Sequence[Side], unknown: Ranks, victims: Ranks) -> list[int]:
    if len(table.members) == 2:  # of two that differ either may be right
        return [int(rank) for rank in table.members]
    if len(sides) > 1:
        return sorted(rank for side in odd_ones(sides, len(unknown)) for rank in side.ranks)
    # All but one have made the same call: that one has made another, whether gloo has ended it or one of them.
    is_shown = (
        len(sides) == 1 and len(unknown) == 1 and (unknown[0] in victims or np.isin(victims, sides[0].ranks).all())
    )
    return unknown.tolist() if is_shown else []
