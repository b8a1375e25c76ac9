"""When a line of metrics is due, and its text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, SupportsFloat

import torch

from ddpcore.arguments import refuse
from ddpcore.engine.metrics.means import MetricMeans
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ddpcore.engine.cadence import Cadence, Progress
    from ddpcore.engine.metrics.log import Logger, MetricLog


_OF_EVERY_LINE = frozenset({"step", "epoch", "wall_time", "step_ms", "goodput_frac"})
"""Names that every line has by itself."""


MIN_ITEM_BYTES = 4
"""Bytes of a number of the types that values on an accelerator are added in."""


def _kept(name: str, value: Tensor | float) -> Tensor | float:
    """Return a value that does not change any more, without waiting for an accelerator."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, SupportsFloat):
            raise EngineUseError(f"{name} was logged as {type(value).__name__}: log a number, or a tensor with one")
        try:
            return float(value)
        except OverflowError as error:
            raise EngineUseError(f"{name} was logged as a number that no float holds: log a smaller one") from error
        except (TypeError, ValueError) as error:
            raise EngineUseError(f"{name} was logged as no one number ({error}): log one, such as its mean") from error
    if value.numel() != 1:
        raise EngineUseError(f"{name} was logged with shape {tuple(value.shape)}: log one number, such as its mean")
    if value.is_complex():
        raise EngineUseError(f"{name} was logged as {value.dtype}: log a real number")
    if value.device.type == "cpu":
        return value.item()
    # Sums of many values would leave what 16 bits hold.
    return value.detach().to(torch.float32 if value.dtype.itemsize < MIN_ITEM_BYTES else value.dtype, copy=True)


class _Heading(NamedTuple):
    """Step, epoch and time of a line."""

    at: Progress
    step_ms: float | None


class MetricLines:
    """Lines of one attempt. A line is written at the boundary after the one at which it was due.

    `loss` is the latest that is a number, `loss_step` its step: this rank's own, or a line's mean where own ones are
    on an accelerator; None before there is one. `log` is where rank 0 writes; None on the others.
    """

    def __init__(self, group: ProcessGroup | None, log: MetricLog | None, every: Cadence) -> None:
        self.loss: float | None = None
        self.loss_step: int | None = None
        self._own_loss: Tensor | float | None = None
        self._loggers: list[Logger] = []
        self._means = MetricMeans(group)
        self._log = log
        self._every = every
        self._heading: _Heading | None = None
        self._began_s = 0.0
        self._num_steps = 0

    def begin(self, now: Progress) -> None:
        self._began_s = now.elapsed_s

    def add_logger(self, logger: Logger) -> None:
        """Send this rank's lines there too; raise EngineUseError if it is no function."""
        if isinstance(logger, type) or not callable(logger):
            raise refuse(EngineUseError, "logger", logger, "a function of metrics and step, such as wandb's run.log")
        self._loggers.append(logger)

    def take(self, name: str, value: Tensor | float, weight: int) -> None:
        if name in _OF_EVERY_LINE:
            raise EngineUseError(f"{name} stands in every line of metrics by itself: log yours under another name")
        value = _kept(name, value)
        if name == "loss":
            self._own_loss = value
        self._means.add(name, value, weight)

    def at_boundary(self, before: Progress, now: Progress, goodput_frac: Callable[[], float]) -> None:
        """Write the line that was due at the last boundary, and begin one that is due now. Every rank calls it."""
        self._num_steps += 1
        if self._heading is not None:
            self._write(goodput_frac())
        own, self._own_loss = self._own_loss, None
        # One on an accelerator is not read, which would wait for it.
        if own is not None and not isinstance(own, torch.Tensor):
            self.loss, self.loss_step = own, now.step
        if self._every.is_due(before, now):
            self._launch(now)

    def finish(self, now: Progress, goodput_frac: float) -> None:
        """Write what has been logged so far. Every rank calls it; blocks for the others."""
        self._write(goodput_frac)
        self._launch(now)
        self._write(goodput_frac)

    def _launch(self, now: Progress) -> None:
        self._means.launch()
        step_ms = 1000 * (now.elapsed_s - self._began_s) / self._num_steps if self._num_steps else None
        self._heading = _Heading(now, step_ms)
        self._began_s, self._num_steps = now.elapsed_s, 0

    def _write(self, goodput_frac: float) -> None:
        heading, self._heading = self._heading, None
        means = self._means.arrived()
        if heading is None or not means:
            return
        if "loss" in means:
            self.loss, self.loss_step = means["loss"], heading.at.step
        if heading.step_ms is not None:
            means["step_ms"] = heading.step_ms
        line = {**means, "goodput_frac": goodput_frac}
        if self._log is not None:
            self._log.write(heading.at.step, heading.at.epoch, line)
        for logger in self._loggers:
            logger({**line, "epoch": float(heading.at.epoch)}, step=heading.at.step)
