"""Where every member stands in one process group: a column per fact, a slot per member, updated in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.model.call_history import CallHistory, Comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class GroupTable:
    """One process group of one attempt.

    Attributes:
        members: Sorted global ranks, one per slot.
        slot_of: Slot by rank; None when the group holds every rank, whose slot is the rank itself.
        enqueued: Seq of the last collective that each member has called.
        completed: Seq of the last collective that is over for the member.
        is_waiting: Whether the member waited when it last reported this group.
        is_queued: Whether its call was then behind another one on the GPU: it waits there.
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
        self.is_waiting, self.is_queued = np.zeros((2, num_members), np.bool_)
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
        self.is_queued[slots] = told["is_queued"] != 0
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

    def compare(self, seq: int, is_waiting: NDArray[np.bool_] | None = None) -> Comparison | None:
        """Return what members have called at a seq; None where that of less than two is known.

        Args:
            seq: The place in the group's order.
            is_waiting: Members that wait there now: what else they have passed is known of them alone.
        """
        history = self.history
        if history is None:
            return None
        ops, shapes = history.calls_at(seq)
        # A rank that has opened the group anew has called less than it had before.
        is_known = (ops != 0) & (self.enqueued >= seq) & (history.newest <= self.enqueued)
        # Those of unknown size agree with every other.
        is_same_op = is_known & (ops == ops[is_known][0]) if is_known.any() else is_known
        if (is_same_op == is_known).all() and (shapes[is_known] != 0).any():
            is_known &= shapes != 0
        if is_known.sum() < 2:
            return None
        keys = ops.astype(np.int64) << 32 | shapes
        if (keys[is_known] != keys[is_known][0]).any() or is_waiting is None:
            return Comparison(seq, self.members[is_known], keys[is_known])
        return self._compare_arguments(history, seq, (is_known, is_waiting & (history.newest == seq)))

    def _compare_arguments(
        self, history: CallHistory, seq: int, members: tuple[NDArray[np.bool_], NDArray[np.bool_]]
    ) -> Comparison | None:
        """Return what members differ in, which have made the same call: its source, destination or reduction."""
        is_known, is_there = members
        figures = (
            (history.roots_at(seq).astype(np.int64), 0, is_known),
            (history.root, -1, is_known & is_there),
            (history.reduce_op.astype(np.int64), 0, is_known & is_there),
        )
        for passed, unknown, is_told in figures:
            tells = is_told & (passed != unknown)
            if tells.any() and (passed[tells] != passed[tells][0]).any():
                return Comparison(seq, self.members[tells], passed[tells])
        return None

    def validate(self, world_size: int) -> None:
        """State the invariants."""
        assert np.all(np.diff(self.members) > 0)
        assert len(self.members) > 0
        assert self.members[0] >= 0
        assert self.members[-1] < world_size
        assert np.all(np.isfinite(self.wait_since_s))
