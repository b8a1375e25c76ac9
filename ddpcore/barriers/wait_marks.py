"""Tells the probe what the main thread waits in, so that the console shows named gates beside collectives.

A barrier is one pretended group whose number is this rank's count of calls. A first-block is a pretended group of its
own for each name: blocks nest, and in them not everybody waits for everybody, but all for the lowest member.
"""

from __future__ import annotations

import threading
import time

from ddpcore.probing import probe
from ddpcore.probing.faults import omission
from ddpcore.probing.samples import BarrierMark
from ddpcore.wire import FIRST_GROUP, FIRST_LABEL

MAX_FIRSTS = 4
"""First-blocks told at a time, the latest; deeper nests than that are not."""

_num_calls = 0


def is_main_thread() -> bool:
    """Say whether the calling thread is the one that the console shows."""
    return threading.current_thread() is threading.main_thread()


def is_left_out() -> bool:
    """Say whether a fault that was asked for has this thread leave out the barrier that it comes to."""
    return omission.take()


def open_barrier(label: str, entered_s: float) -> None:
    """Tell that the main thread, which calls this, has come to a barrier."""
    global _num_calls  # noqa: PLW0603 - counts the calls of this process
    _num_calls += 1
    probe.marks.barrier = BarrierMark(label, _num_calls, entered_s, is_over=False)


def close_barrier() -> None:
    """Tell that the main thread, which calls this, waits at no barrier any more."""
    mark = probe.marks.barrier
    if mark is not None:
        # Not _replace, which is two thirds of the cost of a mark.
        probe.marks.barrier = BarrierMark(mark.label, mark.seq, mark.entered_s, is_over=True)


def tell_first(scope: str, name: str, count: int, ranks: tuple[int, ...], *, is_over: bool) -> None:
    """Tell how far the main thread, which calls this, is with a first-block.

    The one that goes first tells `count` when it is done, and before that the one before, so that it is missing where
    the others wait.

    Args:
        scope: Name of the node, or empty for the whole job.
        name: Of the block.
        count: The n-th call of it.
        ranks: Sorted members, the lowest goes first; empty for all ranks of the job.
        is_over: False while it waits.
    """
    group = f"{FIRST_GROUP}{scope}/{name}"
    mark = BarrierMark(f"{FIRST_LABEL}{name}", count, time.monotonic(), is_over, group, ranks)
    others = tuple(known for known in probe.marks.firsts if known.group != group)
    probe.marks.firsts = (*others, mark)[-MAX_FIRSTS:]
