"""Where every member stands in one process group: a column per fact, a slot per member, updated in place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpcore.wire import GroupReport

MAX_ELEMENTS = 2**62
"""Element counts are compared, never allocated: a peer's absurd sizes are cut to what an int64 holds."""
MAX_DIMENSIONS = 16
MAX_TENSORS = 256
"""What lies beyond is not compared: it keeps the cost of a hostile report small."""


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

    def put(self, slot: int, group: GroupReport, report_at_s: float, code: int, stamp: int) -> None:
        """Write what a member says of itself."""
        self.enqueued[slot] = group.enqueued_seq
        self.completed[slot] = group.completed_seq
        self.is_waiting[slot] = group.is_waiting
        self.code[slot] = code
        self.stamp[slot] = stamp
        if group.is_waiting:
            self.wait_since_s[slot] = report_at_s - group.waiting_s
            self.num_elements[slot] = count_elements(group.sizes)

    def validate(self, world_size: int) -> None:
        """State the invariants."""
        assert np.all(np.diff(self.members) > 0)
        assert len(self.members) > 0
        assert self.members[0] >= 0
        assert self.members[-1] < world_size
        assert np.all(np.isfinite(self.wait_since_s))


def count_elements(sizes: list[list[int]]) -> int:
    """Return how many elements tensors of these sizes hold together; -1 when none is given."""
    if not sizes:
        return -1
    if len(sizes) == 1 and len(sizes[0]) == 1:
        return max(-1, min(sizes[0][0], MAX_ELEMENTS))
    return max(-1, min(sum(math.prod(size[:MAX_DIMENSIONS]) for size in sizes[:MAX_TENSORS]), MAX_ELEMENTS))
