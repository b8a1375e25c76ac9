"""How all ranks come to stop, or to save, at the same step boundary.

Each rank has wishes of its own: a signal has come, its clock is up. At a boundary the ranks reduce these wishes to
their maximum, on a gloo group of their own, so that no collective of the program is ever in between. The reduction runs
while the next step computes and is read at the boundary after it: there every rank holds the same word.

A key in the store would not do: ranks may be a step apart when they read it.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ddpcore.barriers.own_collectives import CONTROL_GROUP
from ddpcore.engine.stop_signals import MAX_PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

HEARTBEAT_S = 1.0
"""Least time between two reductions. Each wakes a thread of gloo: where all cores compute, the main thread loses a
millisecond to it, which is more than a quicker stop is worth."""

MAX_STEPS_BETWEEN = 1000

LONGEST_HOLD_S = 10.0
"""Longest time in seconds for which a stop waits for the next update."""

STEPS_TO_AGREE = 4
"""Steps of an agreement: up to three, and the one that is waited for ends behind its time."""


def new_group_of_all(timeout_s: float, description: str = CONTROL_GROUP, backend: str | None = "gloo") -> ProcessGroup:
    """Return a group of all ranks that serves nothing but the engine. Every rank calls it.

    `backend` None is that of the program's own group.
    """
    group = dist.new_group(timeout=timedelta(seconds=timeout_s), backend=backend, group_desc=description)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


class StopReason(IntEnum):
    """Reason why training ends early; the highest of all ranks' reasons counts."""

    NONE = 0
    REQUEST = 1
    """The agent or the console has asked."""
    SIGNAL = 2
    """SIGTERM or SIGUSR1 has arrived."""
    DEADLINE = 3
    """The scheduler's time is nearly over."""
    EARLY = 4
    """A metric has not improved for too long: `Engine.early_stopping`."""

    def __str__(self) -> str:
        return self.name.lower()


class Wishes(NamedTuple):
    """Decision of one rank, or the one that all have agreed on: to stop or save at this boundary.

    `step_s` is the mean time of the steps since the last agreement, of the slowest rank; in a rank's own wishes its
    time for this step. `num_updates` are calls of `Engine.update` with gradients on this rank, when the ranks agreed;
    with `is_uneven` other ranks had made more or fewer.
    """

    stop: StopReason = StopReason.NONE
    save: bool = False
    step_s: float = 0.0
    num_updates: int = 0
    is_uneven: bool = False


class StopAgreement:
    """One rank's part in the agreement. Main thread; every rank calls `at_boundary` after every step."""

    def __init__(self, group: ProcessGroup | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group
        self._pending: tuple[Work, torch.Tensor, int] | None = None
        self._clock = clock
        self._launched_s = clock()
        self._num_since = 0
        self._gap = 0

    def at_boundary(self, wishes: Wishes) -> Wishes:
        """Return what all ranks have agreed on at this boundary: nothing at most of them.

        Blocks until every rank has reached the boundary before this one, which the gradients' own reduction asks for
        anyway.
        """
        if self._group is None:
            return wishes
        agreed = self._read()
        self._num_since += 1
        if agreed is not None:
            self._gap = min(steps_between(agreed.step_s), 2 * self._gap + 1)
            if agreed.save:
                # What is wished here is what has just been agreed on.
                wishes = wishes._replace(save=False)
        if self._num_since > self._gap and not (agreed and agreed.stop):
            self._launch(self._group, wishes)
        return agreed or Wishes()

    def drain(self) -> None:
        """Wait for a reduction that is under way; every rank calls it when the loop is over."""
        self._read()

    def _launch(self, group: ProcessGroup, wishes: Wishes) -> None:
        # The mean of many steps: on an accelerator the host may be through with a single one long before it is done.
        now_s = self._clock()
        step_us = round(1e6 * (now_s - self._launched_s) / self._num_since)
        self._launched_s, self._num_since = now_s, 0
        num_updates = wishes.num_updates
        word = torch.tensor([wishes.stop, wishes.save, step_us, num_updates, -num_updates], dtype=torch.int64)
        work = dist.all_reduce(word, dist.ReduceOp.MAX, group=group, async_op=True)
        assert work is not None
        self._pending = work, word, num_updates

    def _read(self) -> Wishes | None:
        if self._pending is None:
            return None
        work, word, num_updates = self._pending
        self._pending = None
        work.wait()
        stop, save, step_us, most, minus_least = word.tolist()
        return Wishes(StopReason(stop), bool(save), step_us / 1e6, num_updates, is_uneven=most != -minus_least)


def steps_between(step_s: float) -> int:
    """Return how many boundaries pass without a new reduction, from the agreed time of a step."""
    if step_s <= 0:
        return 0
    return min(math.ceil(HEARTBEAT_S / step_s) - 1, MAX_STEPS_BETWEEN)


class UntilUpdate:
    """Holds what is agreed on back until an update has used the gradients of the steps before it. Pure.

    These gradients are in no checkpoint: a stop between two updates would lose them. A program that makes no update is
    waited for only once, and not for long. All ranks reach the same answers: they agree on a step's time, and make
    their updates in the same steps. `patience_s` is how long after SIGTERM a rank may take to stop; None for the
    longest that it takes by default.
    """

    def __init__(self, patience_s: float | None = None) -> None:
        self._patience_s = MAX_PATIENCE_S if patience_s is None else patience_s
        self._step_s = HEARTBEAT_S
        self.held = Wishes()
        self._last_step: float | None = None
        """Step at which waiting ends without an update; None where nothing waits."""

    def at_boundary(self, agreed: Wishes, step: int, *, is_open: bool) -> Wishes:
        """Return what is to be done at this boundary; with `is_open` there are gradients that no update has used."""
        self._step_s = agreed.step_s or self._step_s
        due = agreed._replace(stop=max(agreed.stop, self.held.stop), save=agreed.save or self.held.save)
        self.held = Wishes()
        if not is_open:
            self._last_step = None
        elif due.stop or due.save:
            if self._last_step is None:
                longest_s = min(LONGEST_HOLD_S, 0.8 * self._patience_s - STEPS_TO_AGREE * self._step_s)
                self._last_step = step + longest_s // self._step_s
            if step < self._last_step:
                self.held, due = due, Wishes()
        return due
