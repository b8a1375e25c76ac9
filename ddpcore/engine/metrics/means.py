"""Means of what a program logs: over micro-batches, steps and ranks.

What a step logs stays a tensor where it was computed, so that nothing waits for an accelerator until a line is due. The
ranks' sums are added up on a gloo group of their own while the next step computes, and read at the boundary after it:
waiting for them at once costs two processes' wake-up, a millisecond on a virtual machine.

A reduction needs one layout on all ranks. It is that of the names known so far; a rank that has logged a new one
sets the first place of the vector, and then all ranks exchange their names.
"""

from __future__ import annotations

import json
import math
import operator
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ddpcore.barriers.named_barriers import exchange
from ddpcore.errors import MetricMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


_MAX_VALUES = 256
"""Values kept before they are added: adding each immediately would be several operations of torch in every step."""


class _Logged:
    """Values of one rank under one name since the last line."""

    def __init__(self) -> None:
        self._values: list[Tensor | float] = []
        self._weights: list[float] = []

    def add(self, value: Tensor | float, weight: float) -> None:
        # A stand-in batch may well yield NaN, and NaN times nothing is NaN.
        self._values.append(value if weight else 0.0)
        self._weights.append(weight)
        if len(self._values) == _MAX_VALUES:
            # On an accelerator this stays there: nobody waits for it.
            total, weight = sum(map(operator.mul, self._values, self._weights)), sum(self._weights)
            self._values, self._weights = [total / weight if weight else 0.0], [weight]

    def totals(self) -> tuple[float, float]:
        """Return sum and weight. Waits, once, for an accelerator that holds values."""
        numbers = iter(_numbers_in([value for value in self._values if isinstance(value, torch.Tensor)]))
        values = [next(numbers) if isinstance(value, torch.Tensor) else value for value in self._values]
        return sum(map(operator.mul, values, self._weights)), sum(self._weights)


class _Pending(NamedTuple):
    """A reduction that is under way."""

    own: dict[str, _Logged]
    vector: Tensor
    work: Work | None


class MetricMeans:
    """One rank's part in the means. Main thread; every rank calls `launch` and `arrived` at the same boundaries.

    `group` is a gloo group of all ranks with collectives in the same order everywhere; None for one rank.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._names: list[str] = []
        self._own: dict[str, _Logged] = {}
        self._pending: _Pending | None = None

    def add(self, name: str, value: Tensor | float, weight: float) -> None:
        """Take a value that is a mean over this rank's samples; `weight` is their number, 0 keeps it out of the mean.

        A tensor has one element, and nobody writes into it.
        """
        logged = self._own.get(name)
        if logged is None:
            logged = self._own[name] = _Logged()
        logged.add(value, weight)

    def launch(self) -> None:
        """Begin to add up what the ranks have logged; what is logged from now on belongs to the next line."""
        own, self._own = self._own, {}
        self._pending = self._reduce(own)

    def arrived(self) -> dict[str, float] | None:
        """Return the mean of each metric, NaN without any sample; None if nothing was launched. Blocks for the others.

        Raises MetricMismatchError if the ranks have not logged the same metrics.
        """
        if self._pending is None:
            return None
        own, vector, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        num_with_new_names, *sums = vector.tolist()
        if num_with_new_names:
            self._learn_names(own)
            *_, vector, work = self._reduce(own)
            if work is not None:
                work.wait()
            _, *sums = vector.tolist()
        return self._means(own, sums)

    def _reduce(self, own: dict[str, _Logged]) -> _Pending:
        """Lay the sums out as 1 + 3 N numbers: a flag for new names, then for each name sum, weight and presence."""
        has_new = any(name not in self._names for name in own)
        layout = [float(has_new)]
        for name in self._names:
            logged = own.get(name)
            layout += [0.0, 0.0, 0.0] if logged is None else [*logged.totals(), 1.0]
        vector = torch.tensor(layout, dtype=torch.float64)
        work = None if self._group is None else dist.all_reduce(vector, group=self._group, async_op=True)
        return _Pending(own, vector, work)

    def _means(self, own: dict[str, _Logged], sums: list[float]) -> dict[str, float]:
        num_ranks = 1 if self._group is None else self._group.size()
        means = {}
        for name, total, weight, num_loggers in zip(self._names, sums[::3], sums[1::3], sums[2::3], strict=True):
            if 0 < num_loggers < num_ranks:
                raise MetricMismatchError(_mismatch(self._names_of_ranks(own)))
            if num_loggers:
                means[name] = total / weight if weight else math.nan
        return means

    def _learn_names(self, own: dict[str, _Logged]) -> None:
        self._names = sorted({*self._names, *(name for names in self._names_of_ranks(own) for name in names)})

    def _names_of_ranks(self, own: dict[str, _Logged]) -> list[list[str]]:
        if self._group is None:
            return [list(own)]
        return [json.loads(text) for text in exchange("metrics", json.dumps(sorted(own)))]


def _numbers_in(tensors: list[Tensor]) -> list[float]:
    """Return one-element tensors as numbers, with one transfer."""
    if not tensors:
        return []
    device = tensors[0].device
    numbers: list[float] = torch.stack([tensor.reshape(()).to(device) for tensor in tensors]).tolist()
    return numbers


def _mismatch(names_of_ranks: Sequence[Sequence[str]]) -> str:
    """Return which rank has logged what others have not."""
    everywhere = set.intersection(*map(set, names_of_ranks))
    rank, own = next((rank, set(names)) for rank, names in enumerate(names_of_ranks) if set(names) - everywhere)
    return (
        f"rank {rank} has logged {', '.join(sorted(own - everywhere))} and other ranks have not: "
        "log on every rank, the means are taken over all of them"
    )
