"""What the members of a process group have called last, as checksums side by side, and where they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.digest import NUM_PAST

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CallHistory:
    """What each member of a group has called last, as checksums, of which 0 is unknown.

    Attributes:
        newest: Seq of the newest call that is known of each member; -1 where none is.
        ops: Operations of the `NUM_PAST` calls up to it, ascending.
        shapes: Sizes and element types of these, where all members must bring the same.
        roots: One more than the source or destination of each of these; 0 where it is not known.
        root: Source or destination that the newest call names; -1 where none is known.
        reduce_op: Its reduction.
    """

    def __init__(self, num_members: int) -> None:
        self.newest = np.full(num_members, -1, np.int64)
        self.ops = np.zeros((num_members, NUM_PAST), np.uint32)
        self.shapes = np.zeros((num_members, NUM_PAST), np.uint32)
        self.roots = np.zeros((num_members, NUM_PAST), np.uint32)
        self.root = np.full(num_members, -1, np.int64)
        self.reduce_op = np.zeros(num_members, np.uint32)

    def put(self, slots: NDArray[np.int64], told: NDArray[np.void]) -> None:
        """Write what members say of themselves: records of `app.model.rank_batch.HISTORIES`, one for each slot."""
        self.newest[slots], self.root[slots] = told["counts"].T
        self.ops[slots], self.shapes[slots] = told["ops"], told["shapes"]
        self.roots[slots] = told["roots"]
        self.reduce_op[slots] = told["reduce_op"]

    def calls_at(self, seq: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Return every member's operation and shape at a seq, 0 where it is not known."""
        return self._at(seq, self.ops), self._at(seq, self.shapes)

    def roots_at(self, seq: int) -> NDArray[np.uint32]:
        """Return one more than every member's source or destination at a seq, 0 where it is not known."""
        return self._at(seq, self.roots)

    def _at(self, seq: int, figures: NDArray[np.uint32]) -> NDArray[np.uint32]:
        place = NUM_PAST - 1 - (self.newest - seq)
        is_known = (place >= 0) & (place < NUM_PAST) & (self.newest >= 0)
        found: NDArray[np.uint32] = np.where(is_known, figures[np.arange(len(place)), np.where(is_known, place, 0)], 0)
        return found


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """The calls that members of a group have made at one seq."""

    seq: int
    members: NDArray[np.int64]
    """Those whose call is known."""
    keys: NDArray[np.int64]
    """A number for each of them: who has the same number has made the same call."""

    @property
    def is_alike(self) -> bool:
        """Whether all known calls are the same."""
        return len(self.keys) == 0 or bool((self.keys == self.keys[0]).all())

    def parts(self) -> list[NDArray[np.int64]]:
        """Return the members by call, the smallest part first."""
        parts = [self.members[self.keys == key] for key in np.unique(self.keys).tolist()]
        return sorted(parts, key=lambda part: (len(part), part.tolist()))
