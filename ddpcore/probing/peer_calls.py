"""Counts the sends and receives between two ranks that the program makes.

`isend`, `irecv`, `send`, `recv` and `batch_isend_irecv` all end in `ProcessGroup.send`, `.recv` or `.recv_anysource`.
These three are wrapped, so that the public functions stay what they are, whoever has imported them. A wrapper keeps a
weak reference to the work, none to a tensor: 1.8 us a call. gloo's flight recorder has no such calls. NCCL's has those
that are not over, and its works must not be asked from another thread while a CUDA graph is captured: calls with
tensors on a device are only counted, without their tags, which NCCL does not look at.

Source: torch/distributed/distributed_c10d.py, torch 2.4 to 2.13.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import OrderedDict, deque
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpcore.probing.stack import sendable
from ddpcore.wire import PeerCall

if TYPE_CHECKING:
    from collections.abc import Callable

SEND, RECV = "send", "recv"
MAX_KEYS = 64
"""Kinds of call, peers, groups and tags that are counted; the longest unused is forgotten."""
MAX_OPEN = 256
MAX_TOLD_OPEN = 16
MAX_TOLD_SIZES = 4
"""A sender goes on to a few more sends before it learns that its peer has died of one."""
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
        self._counts: OrderedDict[_Key, tuple[int, tuple[int, ...]]] = OrderedDict()
        """Number of the calls of each kind, and how many bytes the last ones had."""
        self._open: deque[_Open] = deque(maxlen=MAX_OPEN)

    @property
    def num_calls(self) -> int:
        """How many calls there have been of the kinds that are still counted: it changes with each."""
        return sum(number for number, _ in self._counts.copy().values()) if self._counts else 0

    @property
    def is_used(self) -> bool:
        """Whether there has been a call."""
        return bool(self._counts)

    def note(self, key: _Key, work: Any, num_bytes: int | None = None) -> None:
        """Take a call that has been made; on the thread that makes it."""
        counts = self._counts
        number, sizes = counts.get(key, (0, ()))
        number += 1
        counts[key] = number, () if num_bytes is None else (*sizes[1 - MAX_TOLD_SIZES :], num_bytes)
        counts.move_to_end(key)
        if len(counts) > MAX_KEYS:
            counts.popitem(last=False)
        if work is not None:
            self._open.append(_Open(key, number, threading.get_ident(), weakref.ref(work)))

    def latest(self) -> tuple[PeerCall, ...]:
        """Return the last call of each kind, the latest first."""
        counts = self._counts.copy()
        return tuple(call for key in reversed(counts) if (call := _told(key, *counts[key])) is not None)

    def open_calls(self, thread_id: int) -> list[PeerCall]:
        """Return the calls of a thread that are not known to be over, in their order: who waits, waits for one."""
        told: list[PeerCall] = []
        for one in self._open.copy():
            if _is_over(one.work()):
                with contextlib.suppress(ValueError):
                    self._open.remove(one)
            elif one.thread_id == thread_id and len(told) < MAX_TOLD_OPEN and (call := _told(one.key, one.number)):
                told.append(call)
        return told


def _is_over(work: Any) -> bool:
    """Say whether a work is forgotten, or has been waited for; gloo knows of its end no sooner."""
    return work is None or bool(work.is_completed())


def _told(key: _Key, number: int, sizes: tuple[int, ...] = ()) -> PeerCall | None:
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
            setattr(group_class, name, _counted(original, names[name], has_peer=name != "recv_anysource"))
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
