"""Models that follow another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from collections.abc import Callable

_Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]


def moving_average(source: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a model that `update_parameters` makes an exponential moving average; buffers included.

    Args:
        source: What it follows.
        decay: What is kept of the average in each update, 0 to 1.
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
