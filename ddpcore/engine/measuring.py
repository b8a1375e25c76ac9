"""What a program measures on all ranks: metrics, evaluations, and whatever it gathers itself. `Engine` inherits it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from ddpcore.arguments import check_is, check_whole, refuse
from ddpcore.collecting import ReduceOp, gather, reduce
from ddpcore.engine.evaluation import Measure, Prediction, Tree, evaluate, predict_own
from ddpcore.engine.loader_options import check_loader_options
from ddpcore.errors import EngineUseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.utils.data import Dataset

    from ddpcore.engine.batches import MicroBatch
    from ddpcore.engine.loader_options import LoaderOptions
    from ddpcore.engine.loop import Loop


class Measuring:
    """The measuring half of `Engine`, whose constructor sets everything that is declared here."""

    device: torch.device
    _control_group: ProcessGroup | None
    _dtype: torch.dtype | None
    _loop: Loop
    _micro_batch: MicroBatch | None
    _num_local: int
    _timeout_s: float
    _is_evaluating = False

    def autocast(self) -> torch.autocast:
        """Return a context in which operations take the engine's precision: for forward and loss."""
        return torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None)

    def log(self, **values: Tensor | float) -> None:
        """Take metrics of this step: means are taken over samples, steps and ranks until the next line is written.

        `loss` is what the console shows. Every rank logs the same names. Nothing waits for an accelerator.

        Args:
            values: Numbers by name, True counts as 1; tensors have one element.

        Raises:
            EngineUseError: A tensor has more elements, or none; a value is no number; or a name is one that every line
                has by itself, such as `step`.
        """
        weight = self._num_local if self._micro_batch is None else self._micro_batch.num_samples
        for name, value in values.items():
            self._loop.take(name, value, weight)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        measure: Measure,
        *,
        batch_size: int,
        **loader_options: Unpack[LoaderOptions],
    ) -> dict[str, float]:
        """Return the mean of each measure over a data set, exact and the same on every rank; see `evaluate`."""
        self._check_evaluated(model, batch_size, "measure", measure, loader_options)
        with self._evaluating(), self.autocast():
            return evaluate(
                model,
                dataset,
                measure,
                batch_size=batch_size,
                device=self.device,
                group=self._control_group,
                timeout_s=self._timeout_s,
                **loader_options,
            )

    def predict(
        self,
        model: nn.Module,
        dataset: Dataset[Any],
        function: Prediction[Tree],
        *,
        batch_size: int,
        **loader_options: Unpack[LoaderOptions],
    ) -> Tree:
        """Return what a function makes of each sample, once and in the data set's order, the same on every rank.

        For measures of the whole set, such as an area under a curve: `roc_auc(**engine.predict(...))`. Every rank calls
        it, and gets all of it in the host's memory; blocks.

        Args:
            model: Wrapped or not; it runs in eval mode and without its wrapper, with rank 0's buffers.
            dataset: Map-style, the same on every rank, which reads its own share of it.
            function: Function of the module and a batch on the device: a tree of tensors with a row for each sample.
            batch_size: Samples of a forward pass on one rank.
            loader_options: As of `evaluate`.

        Raises:
            EngineUseError: The function returned something else, or the ranks have data sets of different sizes.
            MetricMismatchError: The ranks' outputs differ in names, types, or shapes beyond dimension 0.
        """
        self._check_evaluated(model, batch_size, "function", function, loader_options)
        with self._evaluating(), self.autocast():
            own = predict_own(
                model,
                dataset,
                function,
                batch_size=batch_size,
                device=self.device,
                group=self._control_group,
                timeout_s=self._timeout_s,
                **loader_options,
            )
            return gather(own, group=self._control_group, timeout_s=self._timeout_s)

    def gather(self, tree: Tree) -> Tree:
        """Return the ranks' tensors one behind the other in dimension 0, the same on every rank, without gradients.

        Every rank calls it, at the same place; blocks. Numbers, and tensors without dimensions, become a row each. For
        what was computed from the stand-in of a rank without samples, give `tensor[:batch.num_samples]`.

        Args:
            tree: A tensor or a number, or dicts, lists and tuples of them. Dimension 0 may differ between ranks.

        Raises:
            EngineUseError: There is something else in it, or this is a measure of `evaluate`, which each rank calls
                differently often: `predict` gathers what it returns.
            MetricMismatchError: The ranks bring other names, types or shapes; it names them.
            BarrierTimeoutError: Some ranks did not come; it names them.
        """
        self._check_not_evaluating("gather")
        return gather(tree, group=self._control_group, timeout_s=self._timeout_s)

    def reduce(self, tree: Tree, op: ReduceOp = "sum") -> Tree:
        """Return the sum, mean, least or greatest of the ranks' values, element by element, the same on every rank.

        Every rank calls it, at the same place; blocks. Values are added up in float64 or int64; sums of whole numbers
        stay whole. NaN on any rank is NaN.

        Args:
            tree: As of `gather`, but of one shape on all ranks.
            op: "sum", "mean" (in which each rank counts the same, with however many samples; of whole numbers it is
                float64), "min" or "max".

        Raises:
            EngineUseError: As of `gather`, or there is no such `op`.
            MetricMismatchError: The ranks bring other names, types or shapes, or another `op`; it names them.
            BarrierTimeoutError: Some ranks did not come; it names them.
        """
        self._check_not_evaluating("reduce")
        return reduce(tree, op, group=self._control_group, timeout_s=self._timeout_s)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._is_evaluating = True
        try:
            with self._loop.aside():
                yield
        finally:
            self._is_evaluating = False

    def _check_not_evaluating(self, call: str) -> None:
        if self._is_evaluating:
            raise EngineUseError(
                f"engine.{call} in a function that each rank calls for its own batches, of which it may have more or "
                "fewer than others: return the values, engine.predict gathers them"
            )

    def _check_evaluated(
        self, model: object, batch_size: object, name: str, function: object, options: LoaderOptions
    ) -> None:
        check_is(EngineUseError, "model", model, nn.Module, "a torch.nn.Module")
        check_whole(EngineUseError, "batch_size", batch_size)
        if isinstance(function, type) or not callable(function):
            raise refuse(EngineUseError, name, function, "a function of a module and a batch")
        check_loader_options(options)
