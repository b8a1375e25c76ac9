"""Where every member stands in one process group: a column per fact, a slot per member, updated in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agent.wire.digest import NUM_PAST

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class CallHistory:
    """What each member of a group has called last, as checksums, of which 0 is unknown.

    Attributes:
        newest: Seq of the newest call that is known of each member; -1 where none is.
        ops: Operations of the `NUM_PAST` calls up to it, ascending.
        shapes: Sizes and element types of these, where all members must bring the same.
        root: Source or destination that the newest call names; -1 where none is known.
        reduce_op: Its reduction.
    """

    def __init__(self, num_members: int) -> None:
        self.newest = np.full(num_members, -1, np.int64)
        self.ops = np.zeros((num_members, NUM_PAST), np.uint32)
        self.shapes = np.zeros((num_members, NUM_PAST), np.uint32)
        self.root = np.full(num_members, -1, np.int64)
        self.reduce_op = np.zeros(num_members, np.uint32)

    def put(self, slots: NDArray[np.int64], told: NDArray[np.void]) -> None:
        """Write what members say of themselves: records of `app.model.rank_batch.HISTORIES`, one for each slot."""
        self.newest[slots], self.root[slots] = told["counts"].T
        self.ops[slots], self.shapes[slots] = told["ops"], told["shapes"]
        self.reduce_op[slots] = told["reduce_op"]

    def calls_at(self, seq: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return every member's operation and shape at a seq, 0 where it is not known."""
        place = NUM_PAST - 1 - (self.newest - seq)
        is_known = (place >= 0) & (place < NUM_PAST) & (self.newest >= 0)
        column = np.where(is_known, place, 0)
        rows = np.arange(len(place))
        return np.where(is_known, self.ops[rows, column], 0), np.where(is_known, self.shapes[rows, column], 0)


class GroupTable:
    """One process group of one attempt.

    Attributes:
        members: Sorted global ranks, one per slot.
        slot_of: Slot by rank; None when the group holds every rank, whose slot is the rank itself.
        enqueued: Seq of the last collective that each member has called.
        completed: Seq of the last collective that is over for the member.
        is_waiting: Whether the member waited when it last reported this group.
        wait_since_s: When it began to wait, on this console's clock.
        code: Index of (operation, label) in `JobModel.calls`.
        num_elements: Elements of the call's inputs; -1 when it does not wait or has none.
        stamp: Number of the rank's report that brought these facts (`JobModel.stamp`).
        history: What members have called last; None until one of them reports it.
    """

    def __init__(self, name: str, members: Sequence[int] | None, world_size: int) -> None:
        self.name = name
        self.slot_of = None if members is None else {rank: slot for slot, rank in enumerate(members)}
        self.members: NDArray[np.int64] = np.arange(world_size) if members is None else np.array(members, np.int64)
        num_members = len(self.members)
        self.enqueued = np.zeros(num_members, np.int64)
        self.completed = np.zeros(num_members, np.int64)
        self.is_waiting = np.zeros(num_members, np.bool_)
        self.wait_since_s = np.zeros(num_members, np.float64)
        self.code = np.zeros(num_members, np.int32)
        self.num_elements = np.full(num_members, -1, np.int64)
        self.stamp = np.zeros(num_members, np.int64)
        self.history: CallHistory | None = None

    def slots(self, ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the slots of ranks, and which of them are members at all."""
        if self.slot_of is None:
            return ranks, ranks < len(self.members)
        slots = np.minimum(np.searchsorted(self.members, ranks), len(self.members) - 1)
        return slots, self.members[slots] == ranks

    def put(
        self,
        slots: NDArray[np.int64],
        told: NDArray[np.void],
        report_at_s: NDArray[np.float64],
        codes: NDArray[np.int32],
        stamps: NDArray[np.int64],
    ) -> None:
        """Write what members say of themselves: records of `app.model.rank_batch.STANDINGS`, one for each slot."""
        is_waiting = told["is_waiting"] != 0
        enqueued, completed, num_elements = told["counts"].T
        self.enqueued[slots] = enqueued
        self.completed[slots] = completed
        self.is_waiting[slots] = is_waiting
        self.code[slots] = codes
        self.stamp[slots] = stamps
        if is_waiting.any():
            waiting = slots[is_waiting]
            self.wait_since_s[waiting] = (report_at_s - told["waiting_s"])[is_waiting]
            self.num_elements[waiting] = num_elements[is_waiting]

    def put_history(self, slots: NDArray[np.int64], told: NDArray[np.void]) -> None:
        """Write what members have called last."""
        if self.history is None:
            self.history = CallHistory(len(self.members))
        self.history.put(slots, told)

    def validate(self, world_size: int) -> None:
        """State the invariants."""
        assert np.all(np.diff(self.members) > 0)
        assert len(self.members) > 0
        assert self.members[0] >= 0
        assert self.members[-1] < world_size
        assert np.all(np.isfinite(self.wait_since_s))
