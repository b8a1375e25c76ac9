"""The process groups of one attempt: each member's position, and its last calls.

`GroupTables` opens a group when a rank first reports it, and feeds it with the ranks' positions in it. `GroupTable` is
one group: a column per fact, a slot per member, updated in place. `CallHistory` holds the members' last calls, as
checksums side by side, and finds where they differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.digest import NUM_PAST
from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, FIRST_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from agent.wire.digest import GroupCall
    from app.model.rank_batch import RankBatch


class GroupTable:
    """One process group of one attempt.

    Attributes:
        members: Sorted global ranks, one per slot.
        slot_of: Slot by rank; None when the group holds every rank, whose slot is the rank itself.
        enqueued: Seq of the last collective that each member has called.
        completed: Seq of the last collective that is over for the member.
        is_waiting: Whether the member waited when it last reported this group.
        is_queued: Whether its call was then behind another one on the GPU: it waits there.
        is_behind_work: Whether its GPU had not begun the call then, being in the rank's own work before it.
        wait_since_s: When it began to wait, on this console's clock.
        code: Index of (operation, label) in `JobModel.calls`.
        num_elements: Elements of the call's inputs; -1 when it does not wait or has none.
        stamp: Number of the rank's report that brought these facts (`JobModel.stamp`).
        history: Last calls of the members; None until one of them reports any.
    """

    def __init__(self, name: str, members: Sequence[int] | None, world_size: int) -> None:
        self.name = name
        self.slot_of = None if members is None else {rank: slot for slot, rank in enumerate(members)}
        self.members: NDArray[np.int64] = np.arange(world_size) if members is None else np.array(members, np.int64)
        num_members = len(self.members)
        self.enqueued = np.zeros(num_members, np.int64)
        self.completed = np.zeros(num_members, np.int64)
        self.is_waiting, self.is_queued, self.is_behind_work = np.zeros((3, num_members), np.bool_)
        self.wait_since_s = np.zeros(num_members, np.float64)
        self.code = np.zeros(num_members, np.int32)
        self.num_elements = np.full(num_members, -1, np.int64)
        self.stamp = np.zeros(num_members, np.int64)
        self.history: CallHistory | None = None

    def slots(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the slots of ranks, and which of them are members."""
        if self.slot_of is None:
            return ranks, ranks < len(self.members)
        slots = np.minimum(np.searchsorted(self.members, ranks), len(self.members) - 1)
        return slots, self.members[slots] == ranks

    def put(
        self,
        slots: NDArray[np.int64],
        records: NDArray[np.void],
        report_at_s: NDArray[np.float64],
        codes: NDArray[np.int32],
        stamps: NDArray[np.int64],
    ) -> None:
        """Write the positions that members report: records of `app.model.rank_batch.STANDINGS`, one for each slot."""
        is_waiting = records["is_waiting"] != 0
        enqueued, completed, num_elements = records["counts"].T
        self.enqueued[slots] = enqueued
        self.completed[slots] = completed
        self.is_waiting[slots] = is_waiting
        self.is_queued[slots] = records["is_queued"] != 0
        self.is_behind_work[slots] = records["is_behind_work"] != 0
        self.code[slots] = codes
        self.stamp[slots] = stamps
        if is_waiting.any():
            waiting = slots[is_waiting]
            self.wait_since_s[waiting] = (report_at_s - records["waiting_s"])[is_waiting]
            self.num_elements[waiting] = num_elements[is_waiting]

    def put_history(self, slots: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Write the last calls of members."""
        if self.history is None:
            self.history = CallHistory(len(self.members))
        self.history.put(slots, records)

    def compare(self, seq: int, is_waiting: NDArray[np.bool_] | None = None) -> Comparison | None:
        """Return the members' calls at a seq; None where fewer than two are known.

        Args:
            seq: The place in the group's order.
            is_waiting: Members that wait there now; the other arguments of a call are known only for them.
        """
        history = self.history
        if history is None:
            return None
        ops, shapes = history.calls_at(seq)
        # A rank that has reopened the group has fewer calls than it had before.
        is_known = (ops != 0) & (self.enqueued >= seq) & (history.latest_seq <= self.enqueued)
        # A call of unknown size agrees with every other.
        is_same_op = is_known & (ops == ops[is_known][0]) if is_known.any() else is_known
        if (is_same_op == is_known).all() and (shapes[is_known] != 0).any():
            is_known &= shapes != 0
        if is_known.sum() < 2:
            return None
        keys = ops.astype(np.int64) << 32 | shapes
        if (keys[is_known] != keys[is_known][0]).any() or is_waiting is None:
            return Comparison(seq, self.members[is_known], keys[is_known])
        return self._compare_arguments(history, seq, (is_known, is_waiting & (history.latest_seq == seq)))

    def _compare_arguments(
        self, history: CallHistory, seq: int, members: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    ) -> Comparison | None:
        """Return where members that made the same call differ: in its source, destination or reduction."""
        is_known, is_there = members
        figures = (
            (history.roots_at(seq).astype(np.int64), 0, is_known),
            (history.root, -1, is_known & is_there),
            (history.reduce_op.astype(np.int64), 0, is_known & is_there),
        )
        for passed, unknown, is_reported in figures:
            differs = is_reported & (passed != unknown)
            if differs.any() and (passed[differs] != passed[differs][0]).any():
                return Comparison(seq, self.members[differs], passed[differs])
        return None

    def validate(self, world_size: int) -> None:
        assert np.all(np.diff(self.members) > 0)
        assert len(self.members) > 0
        assert self.members[0] >= 0
        assert self.members[-1] < world_size
        assert np.all(np.isfinite(self.wait_since_s))


MAX_GROUPS = 8_192
MAX_MEMBERSHIPS = 8 * 131_072
"""Bounds on what peers can make this console allocate: groups, and members summed over groups."""
MAX_COMPARED = 16
"""Members of a reported group that are looked up: every node reports each group of thousands."""
MAX_CALLS = 4_096
"""Limit of distinct (operation, label) pairs; later ones share the nameless first."""


_MAX_DIGITS = 10


class GroupTables:
    """All groups of an attempt.

    Attributes:
        tables: Groups by name.
        calls: (operation, label) by the tables' codes.
    """

    def __init__(self, world_size: int) -> None:
        self.tables: dict[str, GroupTable] = {}
        self.calls: list[tuple[str, str]] = [("", "")]
        self._world_size = world_size
        self._num_memberships = 0
        self._oldest = 1
        self._code_of: dict[tuple[str, str], int] = {("", ""): 0}

    def put(
        self, batch: RankBatch, ranks: NDArray[np.int64], report_at_s: NDArray[np.float64], stamp: NDArray[np.int64]
    ) -> int:
        """Write the ranks' positions; return how many were refused: unknown members, or contradictions.

        Args:
            batch: Reports received.
            ranks: Rank of each record, -1 where it holds nothing new.
            report_at_s: When the latest report was made, by rank.
            stamp: Number of that report, by rank.
        """
        calls = [call for frame in batch.frames for call in frame.digest.calls]
        tables: list[GroupTable | None] = [None] * len(calls)
        codes = np.zeros(len(calls), np.int32)
        found, row, call = _of_news(ranks, *batch.standings())
        for number in np.unique(call).tolist():
            table = tables[number] = self._table(calls[number])
            codes[number] = 0 if table is None else self._code(calls[number])
        num_ignored = 0
        for table, own, members, slots, num_strangers in _by_table(tables, ranks[row], call):
            num_ignored += num_strangers
            if table is not None:
                table.put(slots, found[own], report_at_s[members], codes[call[own]], stamp[members])
        past, row, call = _of_news(ranks, *batch.histories())
        for table, own, _, slots, _ in _by_table(tables, ranks[row], call):
            if table is not None:
                table.put_history(slots, past[own])
        return num_ignored

    def _table(self, call: GroupCall) -> GroupTable | None:
        """Return the group of a call; None if it is refused."""
        table = self.tables.get(call.group) or self._open(call)
        if table is None:
            return None
        slot_of, num_ranks = table.slot_of, len(call.ranks)
        if slot_of is None:
            return table if num_ranks in (0, self._world_size) else None
        some = call.ranks[:: max(1, num_ranks // MAX_COMPARED)]
        return table if num_ranks == len(slot_of) and all(rank in slot_of for rank in some) else None

    def _open(self, call: GroupCall) -> GroupTable | None:
        members = None if call.group in (DEFAULT_GROUP, BARRIER_GROUP) or not call.ranks else sorted(set(call.ranks))
        if members is not None and (members[-1] >= self._world_size or len(members) != len(call.ranks)):
            return None
        if members is not None and len(members) == self._world_size:
            members = None
        num_members = self._world_size if members is None else len(members)
        self._forget_before(_opening_of(call.group) - 1)
        if len(self.tables) >= MAX_GROUPS or self._num_memberships + num_members > MAX_MEMBERSHIPS:
            return None
        self._num_memberships += num_members
        table = GroupTable(call.group, members, self._world_size)
        self.tables[call.group] = table
        return table

    def _forget_before(self, opening: int) -> None:
        """Forget the groups that were made under default groups before one: no rank is in them any more."""
        if opening <= self._oldest:
            return
        self._oldest = opening
        for name in [name for name in self.tables if 0 < _opening_of(name) < opening]:
            self._num_memberships -= len(self.tables.pop(name).members)

    def _code(self, call: GroupCall) -> int:
        named = (call.op, call.label)
        code = self._code_of.get(named)
        if code is None:
            if len(self.calls) >= MAX_CALLS:
                return 0
            code = self._code_of[named] = len(self.calls)
            self.calls.append(named)
        return code


def _opening_of(name: str) -> int:
    """Return the number of the default group under which a group was made; 0 of those that no other replaces."""
    if name in (DEFAULT_GROUP, BARRIER_GROUP) or name.startswith(FIRST_GROUP):
        return 0
    number = name.rpartition("#")[2]
    return int(number) if number != name and number.isdecimal() and len(number) < _MAX_DIGITS else 1


def _of_news(
    ranks: NDArray[np.int64], found: NDArray[np.void], row: NDArray[np.int64], call: NDArray[np.int64]
) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
    """Return the records of ranks that report something new."""
    is_new = ranks[row] >= 0
    return (found, row, call) if is_new.all() else (found[is_new], row[is_new], call[is_new])


def _by_table(
    tables: Sequence[GroupTable | None], ranks: NDArray[np.int64], call: NDArray[np.int64]
) -> Iterator[tuple[GroupTable | None, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]]:
    """Yield each group with its records, their ranks and slots, and the number of records of non-members.

    The group is None for the records whose group is refused.
    """
    place_of = {table: place for place, table in enumerate(dict.fromkeys(tables))}
    whose = np.array([place_of[table] for table in tables], np.int64)[call]
    for table, place in place_of.items():
        own = np.flatnonzero(whose == place)
        if not len(own):
            continue
        if table is None:
            yield None, own, ranks[own], own, len(own)
            continue
        members = ranks[own]
        slots, is_member = table.slots(members)
        num_strangers = int((~is_member).sum())
        if num_strangers:
            own, members, slots = own[is_member], members[is_member], slots[is_member]
        yield table, own, members, slots, num_strangers


class CallHistory:
    """Last calls of each member of a group, as checksums; 0 is unknown.

    Attributes:
        latest_seq: Seq of the latest known call of each member; -1 where none is known.
        ops: Operations of the `NUM_PAST` calls up to it, ascending.
        shapes: Sizes and element types of these, where all members must bring the same.
        roots: One more than the source or destination of each of these; 0 where it is not known.
        root: Source or destination that the latest call names; -1 where none is known.
        reduce_op: Its reduction.
    """

    def __init__(self, num_members: int) -> None:
        self.latest_seq = np.full(num_members, -1, np.int64)
        self.ops = np.zeros((num_members, NUM_PAST), np.uint32)
        self.shapes = np.zeros((num_members, NUM_PAST), np.uint32)
        self.roots = np.zeros((num_members, NUM_PAST), np.uint32)
        self.root = np.full(num_members, -1, np.int64)
        self.reduce_op = np.zeros(num_members, np.uint32)

    def put(self, slots: NDArray[np.int64], records: NDArray[np.void]) -> None:
        """Write the members' last calls: records of `app.model.rank_batch.HISTORIES`, one for each slot."""
        self.latest_seq[slots], self.root[slots] = records["counts"].T
        self.ops[slots], self.shapes[slots] = records["ops"], records["shapes"]
        self.roots[slots] = records["roots"]
        self.reduce_op[slots] = records["reduce_op"]

    def calls_at(self, seq: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return every member's operation and shape at a seq, 0 where it is not known."""
        return self._at(seq, self.ops), self._at(seq, self.shapes)

    def roots_at(self, seq: int) -> NDArray[np.uint32]:
        """Return one more than every member's source or destination at a seq, 0 where it is not known."""
        return self._at(seq, self.roots)

    def _at(self, seq: int, figures: NDArray[np.uint32]) -> NDArray[np.uint32]:
        place = NUM_PAST - 1 - (self.latest_seq - seq)
        is_known = (place >= 0) & (place < NUM_PAST) & (self.latest_seq >= 0)
        found: NDArray[np.uint32] = np.where(is_known, figures[np.arange(len(place)), np.where(is_known, place, 0)], 0)
        return found


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """The calls that members of a group have made at one seq."""

    seq: int
    members: NDArray[np.int64]
    """Members whose call is known."""
    keys: NDArray[np.int64]
    """Number of each member's call: equal numbers are equal calls."""

    @property
    def is_alike(self) -> bool:
        """Whether all known calls are the same."""
        return len(self.keys) == 0 or bool((self.keys == self.keys[0]).all())

    def parts(self) -> list[NDArray[np.int64]]:
        """Return the members by call, the smallest part first."""
        parts = [self.members[self.keys == key] for key in np.unique(self.keys).tolist()]
        return sorted(parts, key=lambda part: (len(part), part.tolist()))
