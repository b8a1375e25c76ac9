"""Metrics that decide something: which checkpoints are best, when training stops early, how a schedule goes on.

A decision is the same on all ranks, so they agree on the value: at the boundary behind the step that has logged such a
metric they meet at a barrier, and take the mean over samples and ranks.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

from ddpcore.barriers.named_barriers import exchange
from ddpcore.checkpoint.catalog import is_better
from ddpcore.errors import CheckpointContentError, EngineUseError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from ddpcore.checkpoint.catalog import Mode


class WatchedMetrics:
    """One rank's part in the agreement. Main thread."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._watchers: dict[str, list[Callable[[float], None]]] = {}
        self._logged: dict[str, list[tuple[Tensor | float, float]]] = {}

    def watch(self, name: str, watcher: Callable[[float], None] | None = None) -> None:
        """Agree on a metric from now on; `watcher` takes each value, on all ranks at the same boundary."""
        watchers = self._watchers.setdefault(name, [])
        if watcher is not None:
            watchers.append(watcher)

    def take(self, name: str, value: Tensor | float, weight: float) -> None:
        """Take a value of the running step, if this metric is watched."""
        if name in self._watchers:
            self._logged.setdefault(name, []).append((value, weight))

    def begin(self, *, is_first: bool) -> None:
        """Begin a loop; before the first one nothing logged counts.

        Raises EngineUseError if something was logged in no step that has ended: it would count for the next one.
        """
        names, self._logged = ", ".join(sorted(self._logged)), {}
        if names and not is_first:
            raise EngineUseError(
                f"{names} was logged after the last finished step: log it in the step that it is of, "
                '`if engine.is_due("1 epoch")` for one. It decides about checkpoints, early stopping or a schedule'
            )

    def at_boundary(self) -> dict[str, float]:
        """Return what all ranks have agreed on of the step that ends here: nothing at most boundaries.

        Blocks for the others where this rank has logged such a metric, and for an accelerator that holds it. Raises
        BarrierTimeoutError with the ranks that have not logged it in this step.
        """
        logged, self._logged = self._logged, {}
        agreed = {}
        # Ranks may log in different orders.
        for name, entries in sorted(logged.items()):
            # What a rank without samples has logged does not count.
            kept = [(float(value), weight) for value, weight in entries if weight]
            own = [_sum(value * weight for value, weight in kept), _sum(weight for _, weight in kept)]
            of_ranks = exchange(
                f"engine.log({name}=...)", json.dumps([*own, [value for value, _ in kept]]), self._timeout_s
            )
            agreed[name] = _mean([json.loads(text) for text in of_ranks])
        for name, value in agreed.items():
            for watcher in self._watchers[name]:
                watcher(value)
        return agreed


def _mean(of_ranks: list[tuple[float, float, list[float]]]) -> float:
    """Return the mean over all ranks, NaN without any sample; of equal values their value, to the last digit."""
    values = [value for *_, values in of_ranks for value in values]
    if values and all(value == values[0] for value in values):
        return float(values[0])
    total, weight = (_sum(numbers) for numbers in zip(*(one[:2] for one in of_ranks), strict=True))
    return total / weight if weight else math.nan


def _sum(numbers: Iterable[float]) -> float:
    """Return an exact sum; infinite or NaN where there is none."""
    terms = list(numbers)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):
        # Too large, or of both infinities.
        return sum(terms)


class EarlyStoppingState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State in a checkpoint."""

    best: float | None = None
    """Best value so far; None before the first."""
    num_without: int = 0
    """Number of values since the best one."""


class EarlyStopping:
    """Counts how long a metric has not improved: pure.

    Training is over after `patience` values without one that is better by more than `min_delta`.
    """

    def __init__(self, patience: int, mode: Mode, min_delta: float) -> None:
        self._patience = patience
        self._mode: Mode = mode
        self._min_delta = min_delta
        self._state = EarlyStoppingState()

    @property
    def is_over(self) -> bool:
        """True once patience has run out."""
        return self._state.num_without >= self._patience

    def observe(self, value: float) -> None:
        """Take the next value; NaN is never better."""
        best = self._state.best
        goal = math.nan if best is None else best - self._min_delta if self._mode == "min" else best + self._min_delta
        if is_better(value, goal, self._mode):
            self._state = EarlyStoppingState(value, 0)
        else:
            self._state = EarlyStoppingState(best, self._state.num_without + 1)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = msgspec.to_builtins(self._state)
        return state

    def load_state_dict(self, state: object) -> None:
        """Continue from an earlier count; raise CheckpointContentError if the state is not of `state_dict`."""
        try:
            self._state = msgspec.convert(state, EarlyStoppingState)
        except msgspec.ValidationError as error:
            raise CheckpointContentError(f"the checkpoint's early stopping makes no sense: {error}") from error
