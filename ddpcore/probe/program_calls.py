"""Reads what the program passes to its calls: roots and reductions of collectives, and all sends and receives.

torch's recorder holds sizes and element types, but no source, destination or reduction.

`arguments_of` reads what the main thread has passed to the collective that it waits in. These values are locals of
torch's own Python function, which is on the stack while a call that blocks waits, as gloo's do; a `Work.wait()` has no
such frame, and NCCL's calls return immediately, so that the stack shows nothing later.

`CallRoots` notes the source or destination of the collectives that the program calls with NCCL. `broadcast`, `reduce`,
`gather` and `scatter` all end in the method of `ProcessGroup` of the same name, whose options hold the root as a rank
of the group. `note_roots` wraps these methods, and a call is found again in the recorder by its time: it was recorded
while the method ran. The cost is 1.1 us a call (a stub in place of torch's, best of 7); no tensor is held. DDP's own
broadcasts are made in C++ and pass none of these methods: rank 0 is the source of them all.

`PeerCalls` counts the sends and receives between two ranks. `isend`, `irecv`, `send`, `recv` and `batch_isend_irecv`
all end in `ProcessGroup.send`, `.recv` or `.recv_anysource`. `count_peer_calls` wraps these three, so that the public
functions stay what they are for every importer. A wrapper keeps a weak reference to the work, none to a tensor: 1.8 us
a call. gloo's flight recorder has no such calls. NCCL's has those that are not over, and its works must not be asked
from another thread while a CUDA graph is captured: calls with tensors on a device are only counted, without their tags,
which NCCL does not look at.

Source: torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ddpcore.probe.samples import CallArguments
from ddpcore.probe.stack import current_frames, no_collection, sendable
from ddpcore.wire import PeerCall

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from ddpcore.probe.samples import GroupMembers, RecorderDump, RecorderEntry

MAX_DEPTH = 8
"""Innermost frames looked at: torch's function and what wraps it."""

_FILE = "torch/distributed/distributed_c10d.py"
_FUNCTIONS = frozenset({"all_reduce", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"})


def arguments_of(thread_id: int) -> CallArguments | None:
    """Return the arguments of the collective that a thread stands in, None where it stands in none of these."""
    with no_collection:
        frame: FrameType | None = current_frames().get(thread_id)
        for _ in range(MAX_DEPTH):
            if frame is None:
                break
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


MAX_CALLS = 64
"""Latest calls that are kept: as many as the recorder has."""
TENSORS_AT = {"broadcast": 0, "reduce": 0, "gather": 1, "scatter": 0}
"""Wrapped methods, and the argument of each that lists tensors of this rank."""
_NS_PER_US = 1000


class _Call(NamedTuple):
    op: str
    group: str
    root: int
    """Rank in the group."""
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
    """Wrap the methods; return False where this torch has not all of them."""
    group_class: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    originals = {name: getattr(group_class, name, None) for name in TENSORS_AT}
    for name, original in originals.items():
        if original is not None:
            _put(group_class, name, _noted(original, name, call_roots))
    return all(originals.values())


def _put(group_class: Any, name: str, wrapper: Any) -> None:
    """Put a wrapper in a method's place.

    Its code has the method's name: by that pybind11 sees, in a group whose class a program has derived from torch's,
    that the method is called from where it seems to be overridden. Else the two would call each other without end.
    Source: pybind11/pybind11.h, `get_type_override`.
    """
    wrapper.__code__ = wrapper.__code__.replace(co_name=name)
    setattr(group_class, name, wrapper)


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


SEND, RECV = "send", "recv"
MAX_KEYS = 64
"""Kinds of call, peers, groups and tags in a report: those of the latest calls."""
MAX_COUNTED = 4096
"""Kinds that are counted; the longest unused is forgotten. Pipelines have hundreds; some programs use up tags."""
MAX_OPEN = 256
MAX_OPEN_CALLS = 16
MAX_SIZES = 4
"""Sizes kept: a sender makes a few more sends before it learns that its peer has died of one."""
_MAX_NUMBER = 2**63 - 1
_MAX_NAME_CHARS = 256

_Key = tuple[str, int | None, str, int]
"""Operation, rank of the peer in the group (None is any), the group's name, the tag."""


class _Open(NamedTuple):
    key: _Key
    number: int
    thread_id: int
    work: weakref.ref[Any]


class PeerCalls:
    """The calls of this process. The threads of the program write, the probe's reads."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[_Key, int] = OrderedDict()
        """Number of the calls of each kind."""
        self._counts: OrderedDict[_Key, tuple[int, tuple[int, ...]]] = OrderedDict()
        """The same of the latest kinds, and the sizes in bytes of their last calls."""
        self._num_calls = 0
        self._open: deque[_Open] = deque(maxlen=MAX_OPEN)

    @property
    def num_calls(self) -> int:
        """How many calls there have been: it changes with each."""
        return self._num_calls

    @property
    def is_used(self) -> bool:
        """Whether there has been a call."""
        return bool(self._counts)

    def note(self, key: _Key, work: Any, num_bytes: int | None = None) -> None:
        """Count a call that has been made; on the thread that makes it."""
        counts, numbers = self._counts, self._numbers
        numbers[key] = number = numbers.get(key, 0) + 1
        numbers.move_to_end(key)
        if len(numbers) > MAX_COUNTED:
            numbers.popitem(last=False)
        self._num_calls += 1
        _, sizes = counts.get(key, (0, ()))
        counts[key] = number, () if num_bytes is None else (*sizes[1 - MAX_SIZES :], num_bytes)
        counts.move_to_end(key)
        if len(counts) > MAX_KEYS:
            counts.popitem(last=False)
        if work is not None:
            self._open.append(_Open(key, number, threading.get_ident(), weakref.ref(work)))

    def latest(self) -> tuple[PeerCall, ...]:
        """Return the last call of each kind, the latest first."""
        counts = self._counts.copy()
        return tuple(call for key in reversed(counts) if (call := _peer_call(key, *counts[key])) is not None)

    def open_calls(self, thread_id: int) -> list[PeerCall]:
        """Return the calls of a thread that are not known to be over, in their order: who waits, waits for one."""
        found: list[PeerCall] = []
        for one in self._open.copy():
            if _is_over(one.work()):
                with contextlib.suppress(ValueError):
                    self._open.remove(one)
            elif (
                one.thread_id == thread_id and len(found) < MAX_OPEN_CALLS and (call := _peer_call(one.key, one.number))
            ):
                found.append(call)
        return found


def _is_over(work: Any) -> bool:
    """Return whether a work is released, or has been waited for; gloo knows of its end no sooner."""
    return work is None or bool(work.is_completed())


def _peer_call(key: _Key, number: int, sizes: tuple[int, ...] = ()) -> PeerCall | None:
    """Return a call with the peer's global rank; None of a group that is gone."""
    op, peer, group, tag = key
    if peer is not None:
        peer = _global_rank(group, peer)
        if peer is None:
            return None
    return PeerCall(op, peer, sendable(group, _MAX_NAME_CHARS), max(0, min(tag, _MAX_NUMBER)), number, sizes)


def _global_rank(name: str, group_rank: int) -> int | None:
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    try:
        for group, known in list(world.pg_names.items()):
            if known == name:
                ranks = world.pg_group_ranks[group]
                return next((rank for rank, place in ranks.items() if place == group_rank), None)
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None
    return None


peer_calls = PeerCalls()


def count_peer_calls() -> bool:
    """Wrap what all sends and receives end in; return False where this torch has nothing of the kind."""
    group_class: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "ProcessGroup", None)
    names = {"send": SEND, "recv": RECV, "recv_anysource": RECV}
    originals = {name: getattr(group_class, name, None) for name in names}
    for name, original in originals.items():
        if original is not None:
            _put(group_class, name, _counted(original, names[name], has_peer=name != "recv_anysource"))
    return all(originals.values())


def _counted(original: Callable[..., Any], op: str, *, has_peer: bool) -> Callable[..., Any]:
    note = peer_calls.note

    @wraps(original, updated=())
    def call(self: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        work = original(self, tensors, *args, **kwargs)
        with contextlib.suppress(Exception):
            # Called by place, as torch does.
            if len(args) == 1 + has_peer:
                is_cpu = tensors[0].is_cpu
                key = (op, args[0] if has_peer else None, self.group_name, args[-1] if is_cpu else 0)
                note(key, work if is_cpu else None, tensors[0].nbytes if is_cpu else None)
        return work

    return call
