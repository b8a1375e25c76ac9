"""What the main thread has passed to the collective that it waits in: source or destination, and reduction.

torch's recorder holds sizes and element types, but no source, destination or reduction. They are locals of torch's own
Python function, which stands on the stack while a call that blocks waits; a `Work.wait()` has no such frame, and NCCL's
calls return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpcore.probing.code_places import current_frames
from ddpcore.probing.samples import CallArguments

if TYPE_CHECKING:
    from types import FrameType

MAX_DEPTH = 8
"""Innermost frames looked at: torch's function and what wraps it."""

_FILE = "torch/distributed/distributed_c10d.py"
_FUNCTIONS = frozenset({"all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"})


def arguments_of(thread_id: int) -> CallArguments | None:
    """Return what a thread has passed to the collective that it stands in, None where it stands in none of these.

    No tensor is kept: all that leaves are numbers and a name.
    """
    frame: FrameType | None = current_frames().get(thread_id)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name in _FUNCTIONS and code.co_filename.endswith(_FILE):
            return _arguments(code.co_name, frame.f_locals)
        frame = frame.f_back
    return None


def _arguments(function: str, values: Any) -> CallArguments:
    root = values.get("src", values.get("dst"))
    group_root = values.get("group_src", values.get("group_dst"))
    return CallArguments(function, _rank(root), _rank(group_root), _name(values.get("op")))


def _rank(value: object) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _name(reduce_op: object) -> str:
    """Return `SUM`; `ReduceOp.SUM` is an enumeration's member, or an object that holds one."""
    name = getattr(getattr(reduce_op, "op", reduce_op), "name", "")
    return name if isinstance(name, str) else ""
