"""What a rank's GPU does: kernels in the order in which they were launched, long after the main thread has gone on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.corpus.generator.exchange import Exchange, Operation

QUEUE = 64
"""Launches that the driver takes before the next one waits. CUDA's own limit is 1,024 kernels; a piece of work here
stands for some twenty."""

NEVER_S = float("inf")


@dataclass
class _Task:
    does: float | tuple[Operation, ...]
    """Work of some seconds, or what runs in one kernel: a collective, or transfers that were called as a batch."""
    launched_s: float
    has_begun: bool = False


class Gpu:
    """One GPU with one order of kernels.

    torch gives NCCL streams of its own, and makes the current stream wait for each call that is not asynchronous: the
    order is then that of the calls. DDP's buckets may run beside the backward; here they run between its pieces.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tasks: deque[_Task] = deque()
        self._free_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the next launch has to wait."""
        return len(self._tasks) > QUEUE

    def launch(self, takes_s: float, now_s: float) -> None:
        """Put work into the queue."""
        self._tasks.append(_Task(takes_s, now_s))

    def enqueue(self, operations: Sequence[Operation], now_s: float) -> None:
        """Put the kernel of a collective, or of a batch of transfers, into the queue."""
        self._tasks.append(_Task(tuple(operations), now_s))

    def advance(self, exchange: Exchange, now_s: float) -> bool:
        """Run what can run until now; return whether anything has begun or ended."""
        has_moved = False
        while self._tasks:
            task = self._tasks[0]
            start_s = max(self._free_s, task.launched_s)
            if start_s > now_s:
                return has_moved
            if isinstance(task.does, tuple):
                if not task.has_begun:
                    task.has_begun = has_moved = True
                    for operation in task.does:
                        exchange.came(self._rank, operation, start_s)
                over_s = self._over_s(task.does)
                if over_s > now_s:
                    return has_moved
                self._free_s = max(start_s, over_s)
            else:
                self._free_s = start_s + task.does
            self._tasks.popleft()
            has_moved = True
        return has_moved

    def running(self) -> list[Operation]:
        """Return the operations whose kernel runs now."""
        task = self._tasks[0] if self._tasks else None
        return list(task.does) if task is not None and task.has_begun and isinstance(task.does, tuple) else []

    def idle_s(self) -> float | None:
        """Return when all that was launched is over; None while that is open."""
        return None if self._tasks else self._free_s

    def room_s(self, now_s: float) -> float | None:
        """Return when the next launch is possible; None while that is open."""
        return None if self.is_full else min(self._free_s, now_s)

    def due_s(self) -> float:
        """Return when the next kernel can begin or end by itself."""
        if not self._tasks:
            return NEVER_S
        task = self._tasks[0]
        if isinstance(task.does, tuple) and task.has_begun:
            return self._over_s(task.does)
        return max(self._free_s, task.launched_s)

    def _over_s(self, operations: tuple[Operation, ...]) -> float:
        return max(operation.done_s.get(self._rank, NEVER_S) for operation in operations)
