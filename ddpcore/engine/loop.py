"""What happens between two steps: the cursor moves, the ranks agree, metrics and checkpoints are written."""

from __future__ import annotations

import inspect
import math
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpcore.engine.cadence import Cadence, Progress
from ddpcore.engine.goodput import Goodput
from ddpcore.engine.loop_meetings import (
    Leaving,
    agree_on_left_out,
    agree_on_updates,
    agree_to_begin,
    agree_to_end,
)
from ddpcore.engine.metrics.lines import MetricLines
from ddpcore.engine.metrics.watched import WatchedMetrics
from ddpcore.engine.seeds import random_state, restore_random_state, seed_everything
from ddpcore.engine.stop_agreement import StopAgreement, StopReason, UntilUpdate, Wishes
from ddpcore.engine.stop_signals import Deadline, StopSignals
from ddpcore.errors import EngineUseError, SamplerStateError
from ddpcore.probe import probe
from ddpcore.probe.samples import TrainingMark
from ddpcore.probe.stack import caller_line
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ddpcore.checkpoint import Stateful
    from ddpcore.engine.batches import Batches
    from ddpcore.engine.metrics.log import Logger, MetricLog
    from ddpcore.engine.metrics.watched import EarlyStopping
    from ddpcore.engine.saving import Resumed, Saving
    from ddpcore.engine.updates import Updates

BATCHES = "batches "
"""Beginning of the name of a loader's part; the loader's own name follows."""

MARK_INTERVAL_S = 0.2
"""Least time in seconds between two marks for the probe, which looks five times a second."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Facts of the job that a loop needs.

    `control_group` is a gloo group of all ranks that serves nothing but the loop; None for one rank. `log` is None on
    all ranks but the first. `stop_patience_s` is as of `StopSignals`.
    """

    seed: int
    rank: int
    device: torch.device
    control_group: ProcessGroup | None
    log: MetricLog | None
    log_every: Cadence
    deadline: Deadline
    stop_patience_s: float | None
    timeout_s: float


class Loop:
    """Boundaries of one training.

    `stop_reason` is why training ended early. `wants_stop` asks all ranks to stop; one rank is enough. `watched` are
    metrics that the ranks agree on immediately.
    """

    def __init__(self, options: LoopOptions, updates: Updates) -> None:
        self.stop_reason = StopReason.NONE
        self.wants_stop = False
        self._options = options
        self._updates = updates
        self._control = StopAgreement(options.control_group)
        self._until_update = UntilUpdate(options.stop_patience_s)
        self._signals = StopSignals(options.stop_patience_s)
        self._lines = MetricLines(options.control_group, options.log, options.log_every)
        self._goodput = Goodput(_wall_time())
        self._parts: dict[str, Stateful] = {"goodput": self._goodput}
        self.watched = WatchedMetrics(options.timeout_s)
        self._early: list[EarlyStopping] = []
        self._measured: dict[str, float] = {}
        self._saving: Saving | None = None
        self._resumed: Resumed | None = None
        self._taken_s: float | None = None
        self._now = Progress(0, 0)
        self._step_began_s = 0.0
        self._aside_s = 0.0
        self._marked_s = -math.inf
        self._running: Batches | None = None
        self._leaving: Leaving | None = None
        self._contents: Callable[[], Generator[Any, None, None] | None] = lambda: None
        self._ended: Generator[Any, None, None] | None = None
        self._has_begun = False
        self._is_prepared = False

    @property
    def step(self) -> int:
        """Finished steps, over all attempts."""
        return self._now.step

    @property
    def where(self) -> str:
        """Place of an exception in a loop: `in step 7`, or "" outside of one."""
        if self._leaving is not None:
            return f"in step {self._leaving.step}"
        return f"in step {self.step + 1}" if self._running is not None else ""

    def add_logger(self, logger: Logger) -> None:
        self._lines.add_logger(logger)

    def add_part(self, name: str, part: Stateful) -> None:
        """Save a part of the engine with every checkpoint, and set it back before the next step.

        Raises EngineUseError if there is a part of this name.
        """
        if name in self._parts:
            raise EngineUseError(f"there is a part called {name!r} already: give each loader a name of its own")
        self._parts[name] = part
        if self._saving is not None:
            self._saving.set_rates_back(getattr(part, "optimizer", None))

    def stop_early(self, metric: str, early: EarlyStopping) -> None:
        """Stop once a metric has not improved for long enough.

        Raises EngineUseError if the steps have begun, or this metric is watched already.
        """
        if self._has_begun:
            raise EngineUseError("early_stopping comes too late: call it before steps, which go on with its count")
        self.add_part(f"early stopping {metric}", early)
        self.watched.watch(metric, early.observe)
        self._early.append(early)

    def load_best(self) -> int:
        if self._saving is None:
            raise EngineUseError("load_best without checkpoints: call engine.checkpoint(..., keep_best=1, metric=...)")
        with self.aside():
            return self._saving.load_best()

    def check_takes_saving(self) -> None:
        """Raise EngineUseError if checkpoints are being saved already, or the steps have begun."""
        if self._saving is not None:
            raise EngineUseError("checkpoint was called before: name everything that is to be saved in one call")
        if self._has_begun:
            raise EngineUseError("checkpoint comes too late: call it before steps, which go on from what it finds")

    def set_saving(self, saving: Saving, *, resume: bool) -> bool:
        """Save checkpoints from now on; return whether training continues from one. Every rank calls it; blocks.

        With `resume` it continues from the latest one, if there is one; the engine's parts follow when the steps begin.
        """
        self._saving = saving
        self._resumed = saving.resume() if resume else None
        if self._resumed is None:
            return False
        self._now = Progress(self._resumed.step, 0)
        return True

    def take(self, name: str, value: Tensor | float, weight: int) -> None:
        self._lines.take(name, value, weight)
        self.watched.take(name, value, weight)

    def is_due(self, every: Cadence) -> bool:
        """Return whether the running step completes a multiple of a cadence in steps or epochs: equal on all ranks."""
        if self._running is None:
            return False
        step, epoch, _ = self._now
        ends_epoch = len(self._running.sampler) == 1
        return every.is_due(self._now, Progress(step + 1, epoch + ends_epoch))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Mark time within a step that is no training: an evaluation."""
        self.settle()
        began_s = time.monotonic()
        with self._signals.aside(), probe.phase(Phase.EVAL):
            yield
        self._aside_s += time.monotonic() - began_s

    def run(self, batches: Batches, until_text: str) -> Generator[Any, None, None]:
        """Return this rank's batches until training is over; see `Engine.steps`."""
        self.leave()
        contents = self._run(batches, until_text)
        # Weakly: `break` tells itself by the generator's end.
        self._contents = weakref.ref(contents)
        return contents

    def leave(self) -> None:
        """Do as `settle`, also where the program holds a loop that it has left: in a variable, or in a progress bar."""
        contents = self._contents()
        if contents is not None and inspect.getgeneratorstate(contents) == inspect.GEN_SUSPENDED:
            self._ended = contents
            contents.close()
        self.settle()

    def check_not_left(self, contents: Generator[Any, None, None]) -> None:
        """Raise EngineUseError if `leave` has ended this loop: its end would look like that of training."""
        if contents is self._ended:
            raise EngineUseError(
                "engine.steps goes on after another one has begun, or the engine has ended: end each loop first"
            )

    def _run(self, batches: Batches, until_text: str) -> Generator[Any, None, None]:
        self.watched.begin(is_first=not self._has_begun)
        until = self._begin(batches, until_text)
        self._running = batches
        with self._options.deadline, self._signals, _stoppable():
            try:
                while not self._is_over(until):
                    for content in batches.rest_of_epoch():
                        yield content
                        self._at_boundary(batches, until)
                        if self._is_over(until):
                            break
            except GeneratorExit:
                # By `break`, `return` or an exception: which of them shows only in what the program does next.
                file, line, _ = caller_line()
                self._leaving = Leaving(self._now.step + 1, f"{file.rpartition('/')[2]}:{line}")
                raise
            finally:
                self._running = None
            agree_to_end(None, self._now.step, self._updates.num_updates, self._options.timeout_s)
            self._control.drain()
            self.write_metrics()
            self._save(self._now, is_last=True)
            if self._saving is not None:
                with self._signals.aside(), probe.phase(Phase.CHECKPOINT):
                    self._saving.wait()
        self._mark(batches, until)

    def settle(self) -> None:
        """Meet the other ranks if this one has left a loop early: they must have left it in the same step.

        Raises EngineUseError if they have not, BarrierTimeoutError if some did not arrive.
        """
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            agree_to_end(leaving, self._now.step, self._updates.num_updates, self._options.timeout_s)

    def write_metrics(self) -> None:
        """Write what has been logged since the last line. Every rank calls it; blocks for the others."""
        self._lines.finish(self._now, self._goodput_frac())

    def _is_over(self, until: Cadence) -> bool:
        return bool(self.stop_reason) or until.is_reached(self._now)

    def _begin(self, batches: Batches, until: str) -> Cadence:
        """Set the engine's parts back to the checkpoint, once the program has set up everything else."""
        self._has_begun = True
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            _check_batches(resumed.own, self._parts)
            for name, part in self._parts.items():
                if name in resumed.own:
                    part.load_state_dict(resumed.own[name])
        if resumed is not None and resumed.per_rank is not None:
            restore_random_state(resumed.per_rank, self._options.device)
        elif resumed is not None or self.step == 0:
            # At another world size there is no state of this rank: start one, and a different one at each resumption.
            seed_everything(self._options.seed, self.step, 1 + self._options.rank)
        if any(early.is_over for early in self._early):
            self.stop_reason = StopReason.EARLY
        self._now = Progress(self.step, batches.epoch, time.monotonic())
        self._step_began_s = self._now.elapsed_s
        self._lines.begin(self._now)
        if self._saving is not None:
            self._saving.begin(self._now)
        facts = {"the number of finished steps": self.step, "the number of finished epochs": batches.epoch}
        return agree_to_begin(until, facts, self._options.timeout_s)

    def _at_boundary(self, batches: Batches, until: Cadence) -> None:
        before = self._now
        num_updates, left_out, is_open = self._updates.finish_step(before.step + 1, self.is_due)
        if left_out:
            agree_on_left_out(left_out, self._options.timeout_s)
        batches.sampler.finish_step()
        now = self._now = Progress(before.step + 1, batches.epoch, time.monotonic())
        step_s = max(0.0, now.elapsed_s - self._step_began_s - self._aside_s)
        self._goodput.add_step(step_s)
        self._signals.step_done(step_s)
        wants_save = self._saving is not None and self._saving.is_time_up(now) and not self._until_update.held.save
        agreed = self._control.at_boundary(Wishes(self._wished_stop(now), wants_save, step_s, num_updates))
        if agreed.is_uneven:
            agree_on_updates(agreed.num_updates, self._options.timeout_s)
        agreed = self._until_update.at_boundary(agreed, now.step, is_open=is_open)
        if self._until_update.held.stop:
            self._signals.take_longer()
        self._measured = self.watched.at_boundary()
        if agreed.stop or any(early.is_over for early in self._early):
            self.stop_reason = agreed.stop or StopReason.EARLY
            self._signals.stop_reached()
        self._lines.at_boundary(before, now, self._goodput_frac)
        if self._saving is not None and not self._is_prepared:
            self._is_prepared = True
            self._saving.prepare(self._own_state(), random_state(self._options.device))
        if self._saving is not None:
            is_best = bool(self._measured) and self._saving.is_among_best(self._measured)
            if agreed.save or self._saving.is_due(now) or is_best:
                agree_on_updates(num_updates, self._options.timeout_s)
                self._save(now)
        self._report_to_probe(batches, until)
        # What the boundary itself took, a checkpoint's snapshot above all, is not training.
        self._step_began_s, self._aside_s = time.monotonic(), 0.0

    def _wished_stop(self, now: Progress) -> StopReason:
        if now.elapsed_s >= self._options.deadline.at_s:
            return StopReason.DEADLINE
        if self._signals.is_asked:
            return StopReason.SIGNAL
        return StopReason.REQUEST if self.wants_stop or probe.marks.is_stop_requested else StopReason.NONE

    def _save(self, now: Progress, *, is_last: bool = False) -> None:
        if self._saving is None:
            return
        own, per_rank = self._own_state(), random_state(self._options.device)
        with self._signals.aside(), probe.phase(Phase.CHECKPOINT):
            if self._saving.save(now, own, per_rank, self._measured, is_last=is_last):
                self._taken_s = time.monotonic()
                self._marked_s = -math.inf

    def _own_state(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def _goodput_frac(self) -> float:
        return self._goodput.frac(_wall_time())

    def _report_to_probe(self, batches: Batches, until: Cadence) -> None:
        probe.report_step(self._now.step, self._lines.loss, self._now.epoch, loss_step=self._lines.loss_step)
        if self._now.elapsed_s - self._marked_s >= MARK_INTERVAL_S:
            self._mark(batches, until)

    def _mark(self, batches: Batches, until: Cadence) -> None:
        self._marked_s = self._now.elapsed_s
        probe.marks.training = TrainingMark(
            last_step=batches.last_step(self._now.step, until),
            goodput_frac=self._goodput_frac(),
            checkpoint_step=self._saving.last_step if self._saving is not None else None,
            checkpoint_taken_s=self._taken_s,
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let the probe report that a stop can be agreed on, the last checkpoint included."""
    probe.marks.can_stop = True
    try:
        yield
    finally:
        probe.marks.can_stop = False


def _check_batches(saved: Iterable[str], own: Iterable[str]) -> None:
    """Raise where the cursor of batches is in the checkpoint under another name: they would begin at the start."""
    saved_batches = {name for name in saved if name.startswith(BATCHES)}
    own_batches = {name for name in own if name.startswith(BATCHES)}
    there, here = ", ".join(sorted(saved_batches - own_batches)), ", ".join(sorted(own_batches - saved_batches))
    if there and here:
        raise SamplerStateError(
            f"the checkpoint holds {there}, and here are {here}: give the loaders the names that they had"
        )


def _wall_time() -> float:
    """Return Unix time in seconds: goodput counts the time between attempts too, over which no other clock runs."""
    return time.time()  # noqa: TID251 - see above
