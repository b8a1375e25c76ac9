"""The process groups of one attempt: opened when a rank first speaks of them, fed with where ranks stand in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.model.group_table import GroupTable
from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from agent.wire.digest import GroupCall
    from app.model.rank_batch import RankBatch

MAX_GROUPS = 8_192
MAX_MEMBERSHIPS = 8 * 131_072
"""Bounds on what peers can make this console allocate: groups, and members summed over groups."""
MAX_CALLS = 4_096
"""Distinct (operation, label) pairs; later ones share the nameless first."""


class GroupTables:
    """All groups of an attempt.

    Attributes:
        tables: By the group's name.
        calls: (operation, label) by the tables' codes.
    """

    def __init__(self, world_size: int) -> None:
        self.tables: dict[str, GroupTable] = {}
        self.calls: list[tuple[str, str]] = [("", "")]
        self._world_size = world_size
        self._num_memberships = 0
        self._code_of: dict[tuple[str, str], int] = {("", ""): 0}

    def put(
        self, batch: RankBatch, ranks: NDArray[np.int64], report_at_s: NDArray[np.float64], stamp: NDArray[np.int64]
    ) -> int:
        """Write where ranks stand; return of how many standings it was refused: no members, or contradictions.

        Args:
            batch: What was heard.
            ranks: Of each of its records, -1 where it tells nothing new.
            report_at_s: When the newest report was made, by rank.
            stamp: The number of that report, by rank.
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
        """Return the group of a call, None if it is not believed."""
        table = self.tables.get(call.group) or self._open(call)
        if table is None:
            return None
        is_whole = table.slot_of is None and len(call.ranks) in (0, self._world_size)
        return table if is_whole or (table.slot_of is not None and len(call.ranks) == len(table.members)) else None

    def _open(self, call: GroupCall) -> GroupTable | None:
        members = None if call.group in (DEFAULT_GROUP, BARRIER_GROUP) or not call.ranks else sorted(set(call.ranks))
        if members is not None and (members[-1] >= self._world_size or len(members) != len(call.ranks)):
            return None
        if members is not None and len(members) == self._world_size:
            members = None
        num_members = self._world_size if members is None else len(members)
        if len(self.tables) >= MAX_GROUPS or self._num_memberships + num_members > MAX_MEMBERSHIPS:
            return None
        self._num_memberships += num_members
        table = GroupTable(call.group, members, self._world_size)
        self.tables[call.group] = table
        return table

    def _code(self, call: GroupCall) -> int:
        named = (call.op, call.label)
        code = self._code_of.get(named)
        if code is None:
            if len(self.calls) >= MAX_CALLS:
                return 0
            code = self._code_of[named] = len(self.calls)
            self.calls.append(named)
        return code


def _of_news(
    ranks: NDArray[np.int64], found: NDArray[np.void], row: NDArray[np.int64], call: NDArray[np.int64]
) -> tuple[NDArray[np.void], NDArray[np.int64], NDArray[np.int64]]:
    """Return the records of ranks that say something new."""
    is_new = ranks[row] >= 0
    return (found, row, call) if is_new.all() else (found[is_new], row[is_new], call[is_new])


def _by_table(
    tables: Sequence[GroupTable | None], ranks: NDArray[np.int64], call: NDArray[np.int64]
) -> Iterator[tuple[GroupTable | None, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]]:
    """Yield each group with its records, their ranks and slots, and how many records are of no member of it.

    The first is None, of the records whose group is not believed.
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
