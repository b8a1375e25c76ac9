"""Notes the source or destination of the collectives that the program calls with NCCL: no recorder holds them.

`broadcast`, `reduce`, `gather` and `scatter` all end in the method of `ProcessGroup` of the same name, whose options
hold the root as a rank of the group. The methods are wrapped, and a call is found again in the recorder by its time: it
was recorded while the method ran. NCCL's calls return at once, so that the stack shows nothing later; a call that
blocks, as gloo's do, shows its arguments there (`call_arguments`). 1.1 us a call (a stub in place of torch's, best of
7); no tensor is held.

DDP's own broadcasts are made in C++ and pass none of these: rank 0 is the source of them all.

Source: torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpcore.probing.samples import GroupMembers, RecorderDump, RecorderEntry

MAX_CALLS = 64
"""Latest calls that are kept: as many as the recorder has."""
TENSORS_AT = {"broadcast": 0, "reduce": 0, "gather": 1, "scatter": 0}
"""Wrapped methods, and which of their arguments lists tensors of this rank."""
_NS_PER_US = 1000


class _Call(NamedTuple):
    op: str
    group: str
    root: int
    """A rank of the group."""
    began_us: int
    ended_us: int


class CallRoots:
    """The latest calls of this process. The threads of the program write, the probe's reads."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=MAX_CALLS)

    def note(self, op: str, group: str, root: int, began_ns: int, ended_ns: int) -> None:
        """Take a call that has been made, with the wall clock before and after it."""
        self._calls.append(_Call(op, group, root, began_ns // _NS_PER_US, ended_ns // _NS_PER_US))

    def with_roots(self, dump: RecorderDump, members: Mapping[str, GroupMembers]) -> RecorderDump:
        """Return a dump with the roots that are known of its entries, as ranks of the job."""
        calls = self._calls.copy()
        if not calls:
            return dump
        return dump._replace(entries=[self._with_root(entry, calls, members) for entry in dump.entries])

    def _with_root(
        self, entry: RecorderEntry, calls: deque[_Call], members: Mapping[str, GroupMembers]
    ) -> RecorderEntry:
        op = entry.op.partition(":")[2]
        if op not in TENSORS_AT or entry.group not in members:
            return entry
        ranks = members[entry.group].ranks
        for call in calls:
            is_it = (call.op, call.group) == (op, entry.group) and call.began_us <= entry.called_us <= call.ended_us
            if is_it and 0 <= call.root < len(ranks):
                return msgspec.structs.replace(entry, root=ranks[call.root])
        return entry


call_roots = CallRoots()


def note_roots() -> bool:
    """Wrap the methods; return False where this torch lacks one of them."""
    group_class: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    originals = {name: getattr(group_class, name, None) for name in TENSORS_AT}
    for name, original in originals.items():
        if original is not None:
            setattr(group_class, name, _noted(original, name, call_roots))
    return all(originals.values())


def _noted(original: Callable[..., Any], op: str, roots: CallRoots) -> Callable[..., Any]:
    at = TENSORS_AT[op]

    @wraps(original, updated=())
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.time_ns()
        work = original(self, *args, **kwargs)
        with contextlib.suppress(Exception):
            # Called by place, as torch does: tensors, and the options last.
            if not args[at][0].is_cpu:
                roots.note(op, self.group_name, args[-1].rootRank, began_ns, time.time_ns())
        return work

    return call
