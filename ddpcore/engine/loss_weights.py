"""Means over something else than samples: the gradient of the mean over all tokens of a global batch.

    gradient = sum of weight * d(loss) / sum of weight         over all ranks and micro-batches since the last update

What the weights add up to is known only with the last micro-batch of the last rank. So each loss counts with its weight
over a reference, DDP averages as it always does, and `Engine.update` multiplies the gradients by
`world_size * reference / sum of weights`. The weights are added up by one reduction of three numbers, beside the last
micro-batch's backward. Nothing waits for it before the update; with weights on an accelerator the host never does.

The reference is a power of two near a rank's sum of weights, the same on all ranks: gradients travel with nearly the
size that they end up with, which fp16 and its comm hook need, and no digit depends on it. Ranks agree on the first one
at a barrier, the sums of the last update give the next.

Source: a division after the reduction is also what torchtune's recipes do, with a blocking all_reduce (`scale_grads_`).
"""

from __future__ import annotations

import json
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ddpcore.agreement import common_problem
from ddpcore.arguments import BELOW_ZERO, check_number, refuse
from ddpcore.barriers.named_barriers import exchange
from ddpcore.engine.stop_agreement import new_group_of_all
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    from ddpcore.engine.batches import MicroBatch

WEIGHTS_GROUP = "rankdeck.weights"
"""c10d's description of the group in which accelerators add up weights."""

WANTED = "a finite number, 0 or more, or a tensor with one: what the loss is a mean over, such as its tokens"

LARGEST = 1e300
"""Largest weight that can still be added up."""

_MIXED = "give every backward of an update a weight, on all ranks, or none"


class _Check(NamedTuple):
    """A reduction's result on its way to the host: sum of weights, ranks with weights, and weights that are none.

    `arrived` is recorded behind the copy; None on the CPU.
    """

    sums: Tensor
    arrived: torch.Event | None


class LossWeights:
    """One rank's weights. Main thread; every rank makes the same calls, with weights of its own.

    `control_group` is a gloo group of all ranks that serves nothing but the engine; None for one rank. `is_on_host`
    adds up in the host's memory: right without an accelerator. None decides by the device.
    """

    def __init__(
        self,
        device: torch.device,
        world_size: int,
        control_group: ProcessGroup | None,
        timeout_s: float,
        *,
        is_on_host: bool | None = None,
    ) -> None:
        self.refused = ""
        """Reason why this training takes no weights; "" if it does."""
        self._device = device
        self._is_on_host = device.type == "cpu" if is_on_host is None else is_on_host
        self._world_size = world_size
        self._group = control_group
        self._timeout_s = timeout_s
        self._reference: Tensor | float | None = None
        self._is_weighted: bool | None = None
        self._latest: MicroBatch | None = None
        self._own: Tensor | float = 0.0
        self._num_bad: Tensor | float = 0.0
        self._pending: list[tuple[Work | None, Tensor]] = []
        self._scale: Tensor | float | None = None
        self._checks: deque[_Check] = deque()

    def apply(self, loss: Tensor, weight: Tensor | float | None, micro_batch: MicroBatch) -> Tensor:
        """Return what to run a micro-batch's backward from.

        `loss` is a mean over what `weight` counts, over samples without it. `weight` is that of this loss among all
        since the last update; a stand-in's counts as 0. Raises EngineUseError if the weight is none or does not go with
        the others, BarrierTimeoutError if ranks brought no weight to the first step with weights.
        """
        weight = None if weight is None else self._checked(weight)
        self._begin(micro_batch, is_weighted=weight is not None)
        factor: Tensor | float = micro_batch.loss_factor
        if weight is not None:
            if not micro_batch.num_samples:
                weight = 0.0
            if self._reference is None:
                self._reference = self._first_reference(float(weight))
            self._own = self._own + weight
            factor = weight / self._reference
            if isinstance(factor, torch.Tensor):
                # Else the product with a loss without dimensions would be of the factor's type.
                factor = factor.to(loss.device, loss.dtype)
        if micro_batch.is_last and self._reference is not None:
            self._launch()
        return loss if isinstance(factor, float) and factor == 1.0 else loss * factor

    def scale_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Make sums means, if the losses since the last update had weights: before clipping and the optimizer's step.

        `gradients` are of an optimizer whose step comes next, reduced over ranks. With all weights 0 they become 0.
        Raises EngineUseError if ranks differ in whether there are weights.
        """
        if self._scale is None and self._reference is not None:
            self._scale = self._finished()
        if self._is_weighted and self._scale is not None:
            _multiply(gradients, self._scale)

    def finish_step(self, *, has_updated: bool, has_stepped: bool) -> None:
        """Note a step's end: without an update, what has weights adds up over steps.

        Raises EngineUseError if an optimizer stepped without `Engine.update`: its gradients were no mean.
        """
        if self._is_weighted and self._scale is None and has_stepped and not has_updated:
            raise EngineUseError(
                "an optimizer has stepped without engine.update, which divides gradients by the weights of the losses: "
                "call engine.update(optimizer), or leave out weight="
            )
        if not self._is_weighted:
            self._is_weighted = None
            self._pending.clear()

    def _begin(self, micro_batch: MicroBatch, *, is_weighted: bool) -> None:
        if is_weighted and self.refused:
            raise EngineUseError(self.refused)
        if self._scale is not None:
            self._is_weighted, self._scale = None, None
        if self._is_weighted is not None and self._is_weighted != is_weighted:
            which = (
                "this one has a weight, earlier ones none" if is_weighted else "this one has no weight, earlier ones do"
            )
            raise EngineUseError(f"losses with and without weight before one update ({which}): {_MIXED}")
        if is_weighted and micro_batch is self._latest:
            raise EngineUseError(
                "a second backward with a weight in one micro-batch: add the losses up, and run backward once"
            )
        self._latest, self._is_weighted = micro_batch, is_weighted

    def _checked(self, weight: Tensor | float) -> Tensor | float:
        """Return a weight as a number; on an accelerator as it is, its value is read later."""
        if isinstance(weight, torch.Tensor):
            if weight.numel() != 1 or weight.dtype == torch.bool or weight.is_complex():
                raise refuse(EngineUseError, "weight", weight, WANTED)
            if weight.device.type != "cpu" or not self._is_on_host:
                on_device = weight.detach().reshape(()).to(self._device, torch.float64)
                self._num_bad = self._num_bad + ~(on_device.isfinite() & (on_device >= 0))
                return on_device
            weight = weight.item()
        check_number(EngineUseError, "weight", weight, range_=(BELOW_ZERO, LARGEST), wanted=WANTED)
        return float(weight)

    def _first_reference(self, weight: float) -> Tensor | float:
        """Exchange the first weights with the other ranks in the first step with weights."""
        total = weight
        if self._group is not None:
            total = sum(json.loads(text) for text in exchange("weights of losses", json.dumps(weight), self._timeout_s))
            if not self._is_on_host:
                # On the accelerator's own backend, so that no host waits for it.
                self._group = new_group_of_all(self._timeout_s, WEIGHTS_GROUP, backend=None)
        reference = _power_of_two(total / self._world_size)
        return reference if self._is_on_host else self._on_device(reference)

    def _launch(self) -> None:
        """Begin to add up the weights of what backward has been through on all ranks."""
        own = self._as_vector(self._own, bool(self._is_weighted), self._num_bad)
        work = None if self._group is None else dist.all_reduce(own, group=self._group, async_op=True)
        self._pending.append((work, own))
        self._own = self._num_bad = 0.0

    def _as_vector(self, *values: Tensor | float) -> Tensor:
        if self._is_on_host:
            return torch.tensor([float(value) for value in values], dtype=torch.float64)
        return torch.stack([self._on_device(value) for value in values])

    def _on_device(self, value: Tensor | float) -> Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float64)
        return torch.full((), float(value), dtype=torch.float64, device=self._device)

    def _finished(self) -> Tensor | float:
        """Return the factor of gradients."""
        pending, self._pending = self._pending, []
        total: Tensor | float = 0.0
        for work, sums in pending:
            if work is not None:
                work.wait()
            self._checks.append(_on_its_way(sums))
            total = total + (sums[0].item() if self._is_on_host else sums[0])
        self._check_arrived()
        reference = self._reference
        assert reference is not None, "without one there is nothing to finish"
        if not isinstance(total, torch.Tensor):
            if self._is_weighted and total:
                self._reference = _power_of_two(total / self._world_size)
            return self._world_size * reference / total if total else 0.0
        if self._is_weighted:
            _, exponent = torch.frexp(total / self._world_size)
            power = torch.ldexp(torch.ones_like(total), exponent - 1)
            self._reference = torch.where(total > 0, power, reference)
        return torch.where(total > 0, self._world_size * reference / total, 0.0)

    def _check_arrived(self) -> None:
        """Raise for weights of any rank that are none, as soon as they are known without waiting for an accelerator."""
        while self._checks and (self._checks[0].arrived is None or self._checks[0].arrived.query()):
            _, num_weighted, num_bad = self._checks.popleft().sums.tolist()
            if num_bad:
                raise EngineUseError(f"{num_bad:g} weights of losses are no weights, over all ranks: give {WANTED}")
            if 0 < num_weighted < self._world_size:
                has = "" if self._is_weighted else "has called backward without a weight"
                problem = common_problem(exchange("weights of losses differ", has, self._timeout_s))
                raise EngineUseError(f"{problem or 'some ranks called backward without a weight'}: {_MIXED}")


def _on_its_way(sums: Tensor) -> _Check:
    if sums.device.type != "cuda":
        return _Check(sums, None)
    # Into pinned memory: a copy into any other would make the host wait.
    copy = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
    return _Check(copy, torch.cuda.current_stream(sums.device).record_event())


def _power_of_two(value: float) -> float:
    """Return the power of two below a positive number; 1 for 0."""
    return math.ldexp(1.0, math.frexp(value)[1] - 1) if value > 0 else 1.0


@torch.no_grad()
def _multiply(gradients: Iterable[Tensor], scale: Tensor | float) -> None:
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        # Of a sharded one what this rank holds, in place. Its class is not imported: that takes a second.
        local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), group in by_kind.items():
        # In half precision the scale alone would be off by up to 0.4 %.
        is_half = dtype.itemsize < 4
        factor = scale.to(device, torch.float32 if is_half else dtype) if isinstance(scale, torch.Tensor) else scale
        if not is_half:
            torch._foreach_mul_(group, factor)
            continue
        for local in group:
            local.copy_(local.float() * factor)
