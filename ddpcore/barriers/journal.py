"""Records what this process does at store barriers: for its heartbeat thread, and for the probe.

The threads that come to store barriers write the `Journal`; the heartbeat thread reads it.

`open_barrier`, `close_barrier` and `report_first` report to the probe what the main thread waits in, so that the
console shows named barriers beside collectives. A barrier is one pretended group whose number is this rank's count of
calls. A first-block is a pretended group of its own for each name: blocks nest, and in them not everybody waits for
everybody, but all for the lowest member.
"""

from __future__ import annotations

import heapq
import threading
import time
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.barriers.arrivals import barrier_key
from ddpcore.barriers.rank_status import MAX_CALLS, BarrierKind, Call
from ddpcore.probe import probe
from ddpcore.probe.faults import omission
from ddpcore.probe.samples import BarrierMark
from ddpcore.probe.stack import sendable
from ddpcore.wire import FIRST_GROUP, FIRST_LABEL, Place

if TYPE_CHECKING:
    from ddpcore.probe.stack import StackLine

MAX_LABEL_CHARS = 256


class OpenWait(NamedTuple):
    """A barrier that a thread has called and not passed."""

    kind: BarrierKind
    label: str
    nth: int
    """Number of calls of this label so far."""
    key: str
    entered_s: float
    """Monotonic time of the call."""
    timeout_s: float | None
    master: int | None = None


class LabelCalls:
    """Calls of one label."""

    __slots__ = ("_key_end", "_key_start", "_numbers", "finished", "kind", "label", "last_s", "line", "nth")

    def __init__(self, kind: BarrierKind, scope: str, label: str) -> None:
        self.kind = kind
        self.label = label
        self.nth = 0
        self.last_s = 0.0
        self.line: StackLine = ("", 0, "")
        self.finished = 0
        self._numbers = count(1)
        self._key_start, self._key_end = barrier_key(kind, scope, label)

    def enter(self, now_s: float, timeout_s: float | None, master: int | None = None) -> OpenWait:
        # One bytecode: threads never get the same number.
        self.nth = nth = next(self._numbers)
        self.last_s = now_s
        key = f"{self._key_start}{nth}{self._key_end}"
        return OpenWait(self.kind, self.label, nth, key, now_s, timeout_s, master)

    def reported(self) -> Call:
        """Return the last call as the others may know it."""
        file, number, function = self.line
        place = Place(sendable(file, 4096), number, sendable(function, 256)) if file else None
        return Call(self.kind, self.label, self.nth, place)


class Journal:
    """This process's calls of the barriers of one process group."""

    def __init__(self) -> None:
        self.wait: OpenWait | None = None
        self.num_threads = 0
        self._calls: dict[tuple[BarrierKind, str], LabelCalls] = {}
        self._lock = threading.Lock()

    def calls(self, kind: BarrierKind, label: str, scope: str = "") -> LabelCalls:
        """Return the calls of a label; `scope` is the name of the node, for kinds of barrier that a node has."""
        return self._calls.get((kind, label)) or self._begin(kind, label, scope)

    def count(self, kind: BarrierKind, label: str) -> int:
        """Return how often this rank has called a barrier."""
        calls = self._calls.get((kind, label))
        return calls.nth if calls else 0

    def finished(self, kind: BarrierKind, label: str) -> int:
        """Return how many blocks of this label this rank has finished first."""
        calls = self._calls.get((kind, label))
        return calls.finished if calls else 0

    def latest(self) -> tuple[Call, ...]:
        """Return the last call of each of the latest labels, the latest first."""
        with self._lock:
            calls = [calls for calls in self._calls.values() if calls.nth]
        latest = heapq.nlargest(MAX_CALLS, dict.fromkeys(calls), key=attrgetter("last_s"))
        return tuple(calls.reported() for calls in latest)

    def _begin(self, kind: BarrierKind, label: str, scope: str) -> LabelCalls:
        reported = reported_label(label)
        with self._lock:
            calls = self._calls.get((kind, reported)) or LabelCalls(kind, scope, reported)
            self._calls[kind, reported] = self._calls[kind, label] = calls
        return calls


def reported_label(label: str) -> str:
    """Return a label as messages carry it: two that agree in their first 256 characters are one."""
    return sendable(label, MAX_LABEL_CHARS)


MAX_FIRSTS = 4
"""First-blocks reported at a time, the latest; deeper nests are left out."""

_num_calls = 0


def is_main_thread() -> bool:
    """Return whether the calling thread is the one that the console shows."""
    return threading.current_thread() is threading.main_thread()


def is_left_out() -> bool:
    """Return whether a requested fault makes this thread leave out the barrier that it calls."""
    return omission.take()


def open_barrier(label: str, entered_s: float) -> None:
    """Report that the main thread, which calls this, waits at a barrier."""
    global _num_calls  # noqa: PLW0603 - counts the calls of this process
    _num_calls += 1
    probe.marks.barrier = BarrierMark(label, _num_calls, entered_s, is_over=False)


def close_barrier() -> None:
    """Report that the main thread, which calls this, waits at no barrier any more."""
    mark = probe.marks.barrier
    if mark is not None:
        # Not _replace, which is two thirds of the cost of a mark.
        probe.marks.barrier = BarrierMark(mark.label, mark.seq, mark.entered_s, is_over=True)


def report_first(scope: str, name: str, count: int, ranks: tuple[int, ...], *, is_over: bool) -> None:
    """Report how far the main thread, which calls this, is in a first-block.

    The rank that goes first reports `count` when it has finished, and until then the call before: so it is missing
    where the others wait. `ranks` are sorted; empty for all ranks of the job. `is_over` is False while it waits.
    """
    group = f"{FIRST_GROUP}{scope}/{name}"
    mark = BarrierMark(f"{FIRST_LABEL}{name}", count, time.monotonic(), is_over, group, ranks)
    others = tuple(known for known in probe.marks.firsts if known.group != group)
    probe.marks.firsts = (*others, mark)[-MAX_FIRSTS:]
