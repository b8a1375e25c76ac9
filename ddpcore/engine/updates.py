"""Updates, from a micro-batch's loss to new weights: scaled and weighted backwards, one optimizer step, averages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddpcore.checkpoint.restoring import is_sharded
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.hooks import RemovableHandle

    from ddpcore.engine.batches import MicroBatch
    from ddpcore.engine.cadence import Cadence
    from ddpcore.engine.loss_weights import LossWeights

_log = logging.getLogger(__name__)

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


class _Scheduled(NamedTuple):
    """A schedule of learning rates; `every` None is each update of its optimizer."""

    schedule: LRScheduler
    every: Cadence | None


class StepEnd(NamedTuple):
    """Result of a step.

    `num_updates` are calls of `Engine.update` with gradients so far: the same on all ranks that have the same weights.
    `left_out` is what this rank has not called in the step, a predicate, or "". With `is_open` there are gradients, of
    this step or earlier ones, that no update has used.
    """

    num_updates: int
    left_out: str
    is_open: bool


class Updates:
    """Updates of one training. Main thread; a context manager, which watches all optimizers of this process.

    `scaler` is for fp16's losses; without `is_scaled` it does nothing.
    """

    def __init__(self, device: torch.device, weights: LossWeights, *, is_scaled: bool) -> None:
        self.scaler = torch.amp.GradScaler(device.type, enabled=is_scaled)
        self._weights = weights
        self._averages: list[tuple[AveragedModel, nn.Module]] = []
        self._schedules: list[_Scheduled] = []
        self._handle: RemovableHandle | None = None
        self._scaled: set[torch.optim.Optimizer] = set()
        """Optimizers that have been updated with scaled gradients in this step."""
        self.num_updates = 0
        self._num_taken = self._num_called = 0
        """Micro-batches of this step, and those of them that have been through backward."""
        self._latest: MicroBatch | None = None
        self._has_last = self._has_begun = self._is_open = False
        self._is_loss_scaled = False
        self._has_gradients = self._has_updated = self._has_stepped = self._has_applied = self._has_warned = False

    def follow(self, average: AveragedModel, source: nn.Module) -> None:
        self._averages.append((average, source))

    def schedule(self, schedule: LRScheduler, every: Cadence | None) -> None:
        self._schedules.append(_Scheduled(schedule, every))

    def take(self, micro_batch: MicroBatch) -> None:
        """Note a micro-batch that the program begins."""
        self._num_taken += 1
        self._latest = micro_batch

    def backward(self, loss: Tensor, weight: Tensor | float | None, micro_batch: MicroBatch) -> None:
        self._num_called += self._latest is not None
        self._latest = None
        self._has_last, self._has_begun = micro_batch.is_last, True
        self._has_gradients = self._is_loss_scaled = True
        weighted = self._weights.apply(loss, weight, micro_batch)
        self.scaler.scale(weighted).backward()  # type: ignore[no-untyped-call]

    def update(self, optimizer: torch.optim.Optimizer, clip_norm: float | None) -> Tensor | None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        is_scaled = self.scaler.is_enabled() and bool(gradients)
        self._check_update(optimizer, is_scaled=is_scaled)
        self._has_applied = self._has_applied or bool(gradients)
        if self._num_called and not self._has_last:
            # Its gradients are this rank's own: each rank would go on with weights of its own.
            raise EngineUseError(
                f"update before the last micro-batch: this rank has called backward in {self._num_called} of "
                f"{self._num_taken} so far; call it in each, and update behind the loop over micro_batches"
            )
        self._weights.scale_gradients(gradients)
        norm = None
        if clip_norm is not None:
            if is_scaled:
                self.scaler.unscale_(optimizer)
            norm = clip_grad_norm_(parameters, clip_norm)
            if is_sharded(norm):
                norm = norm.full_tensor()
        has_stepped, self._has_stepped = self._has_stepped, False
        if is_scaled:
            self._scaled.add(optimizer)
            self.scaler.step(optimizer)
        else:
            # Without gradients torch's scaler fails an assertion, and an optimizer does nothing.
            optimizer.step()
        if self._has_stepped and not self._has_overflown(optimizer):
            for schedule, every in self._schedules:
                if every is None and schedule.optimizer is optimizer:
                    schedule.step()
        self._has_stepped = self._has_stepped or has_stepped
        optimizer.zero_grad()
        self._has_updated = True
        self.num_updates += bool(gradients)
        return norm

    def finish_step(self, step: int, is_due: Callable[[Cadence], bool]) -> StepEnd:
        """End a step of training: averages follow, the loss's scale is set for the next one.

        `is_due` is whether the step completes a multiple of a cadence. Raises EngineUseError as
        `LossWeights.finish_step`.
        """
        has_stepped, self._has_stepped = self._has_stepped, False
        has_updated, self._has_updated = self._has_updated, False
        self._weights.finish_step(has_updated=has_updated, has_stepped=has_stepped)
        if self._has_gradients and not self._has_warned:
            self._warn(step, has_updated=has_updated, has_stepped=has_stepped)
        # A program may run a loss's backward itself.
        left_out = self._left_out(step, has_own=self._has_applied and not self._has_gradients and not self._is_open)
        self._is_open = (self._is_open or self._has_gradients) and not (has_updated or has_stepped)
        self._has_gradients = self._has_applied = False
        for schedule, every in self._schedules:
            if every is not None and is_due(every):
                schedule.step()
        if has_updated:
            self._is_loss_scaled = False
            if self._scaled:
                self._scaled.clear()
                self.scaler.update()
            for average, source in self._averages:
                average.update_parameters(source)
        return StepEnd(self.num_updates, left_out, self._is_open)

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_post_hook(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _left_out(self, step: int, *, has_own: bool) -> str:
        """Begin the next step; return what this rank has not called, for which others may wait in theirs."""
        taken, called, has_last = self._num_taken, self._num_called, self._has_last
        self._num_taken = self._num_called = 0
        self._has_last = False
        if has_last or has_own or not self._has_begun:
            return ""
        return f"did not call engine.backward in the last micro-batch of step {step} (it did in {called} of {taken})"

    def _check_update(self, optimizer: torch.optim.Optimizer, *, is_scaled: bool) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise EngineUseError("LBFGS calls forward and backward itself, which update cannot: take another optimizer")
        if is_scaled and not self._is_loss_scaled:
            raise EngineUseError(
                'gradients that are not of engine.backward: with precision="fp16" it scales the loss, and update '
                "undoes that; call engine.backward(loss) in place of loss.backward()"
            )
        if is_scaled and optimizer in self._scaled:
            raise EngineUseError(
                'a second update of one optimizer in a step: with precision="fp16" the scale of the loss is set once a '
                'step; take precision="bf16", or a step of engine.steps for each update'
            )

    def _warn(self, step: int, *, has_updated: bool, has_stepped: bool) -> None:
        """Warn once if gradients of this step are used for nothing."""
        if has_updated and not self._has_applied:
            advice = "engine.update was given an optimizer without any of their parameters, as of another model"
        elif not has_updated and not has_stepped:
            advice = (
                "call engine.update(optimizer) after the micro-batches; right only where gradients are meant to add up "
                "over steps"
            )
        else:
            return
        self._has_warned = True
        _log.warning("step %d has computed gradients and changed no weight: %s", step, advice)

    def _has_overflown(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a fused optimizer was called and left out its step itself: torch's hook shows nothing."""
        if not self.scaler.is_enabled() or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]  # noqa: SLF001 - no other way
        return any(bool(one.item()) for one in found.values())

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note a step of any optimizer, whoever calls it: torch's own hook."""
        self._has_stepped = True
        groups = optimizer.param_groups
        self._has_applied = self._has_applied or any(
            one.grad is not None for group in groups for one in group["params"]
        )


def moving_average(source: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a model that `update_parameters` makes an exponential moving average; buffers included.

    `decay`, 0 to 1, is kept of the average in each update.
    """
    return AveragedModel(source, multi_avg_fn=_averaging(decay), use_buffers=True)


def _averaging(decay: float) -> Callable[[_Tensors, _Tensors, Tensor | int], None]:
    """Return torch's average for numbers that have one; whole numbers are copied.

    Source: torch.optim.swa_utils.get_ema_multi_avg_fn multiplies whole numbers and cuts them off: 11 becomes 10.
    """
    average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]

    def update(averages: _Tensors, sources: _Tensors, num_averaged: Tensor | int) -> None:
        if averages[0].is_floating_point() or averages[0].is_complex():
            average(averages, sources, num_averaged)
            return
        for own, source in zip(averages, sources, strict=True):
            own.copy_(source)

    return update
