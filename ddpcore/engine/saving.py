"""What a training's checkpoint holds, when one is due, and how a run goes on from it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch import Tensor, nn

from ddpcore.checkpoint import Checkpointer, restore
from ddpcore.checkpoint.checkpointer import MAX_METRIC
from ddpcore.engine.cadence import Cadence, Progress, Unit, parse_cadence
from ddpcore.errors import CheckpointContentError, CheckpointDirectoryError, CheckpointWriteError, EngineUseError
from ddpcore.parallel.wrapping import unwrap
from ddpcore.placement import current_placement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import TracebackType

    from ddpcore.checkpoint import Stateful
    from ddpcore.checkpoint.catalog import Retention

_log = logging.getLogger(__name__)

ENGINE = "engine"
"""Name of the engine's own part of a checkpoint, beside the objects' names."""


class CheckpointOptions(NamedTuple):
    retention: Retention
    timeout_s: float


class Resumed(NamedTuple):
    """State of the engine in a checkpoint: the same on all ranks, and this rank's; None at another world size."""

    step: int
    own: dict[str, Any]
    per_rank: dict[str, Any] | None


class Saving:
    """Checkpoints of one training. Every rank calls the same methods in the same order. A context manager.

    `every` is a cadence in steps, epochs or time, `options` are those of the `Checkpointer`. `objects` are saved
    besides the engine's own state, by name; models without their DDP wrapper. Raises CadenceError, and EngineUseError
    if there is nothing to save, or an object cannot be.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: str,
        options: CheckpointOptions,
        objects: Mapping[str, Stateful],
    ) -> None:
        self._every = parse_cadence(every)
        _check(objects)
        self._objects = {
            name: unwrap(object_) if isinstance(object_, nn.Module) else object_ for name, object_ in objects.items()
        }
        self._checkpointer = Checkpointer(directory, **options.retention._asdict(), timeout_s=options.timeout_s)
        self._saved_at = Progress(0, 0)
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Parameter groups of the objects' optimizers, and what a checkpoint has set them to."""
        self.last_step: int | None = None

    @property
    def every(self) -> Cadence:
        """Cadence of checkpoints."""
        return self._every

    def resume(self) -> Resumed | None:
        """Set the objects back to the latest valid checkpoint; None without one. Blocks.

        Raises CheckpointMismatchError if it is one of other objects, none of which has been touched;
        CheckpointContentError if no engine wrote it.
        """
        checkpoint = self._checkpointer.load_latest()
        if checkpoint is None:
            return None
        if current_placement().rank == 0:
            for reason in checkpoint.skipped:
                _log.warning("training goes on from step %d; passed over %s", checkpoint.step, reason)
        state = dict(checkpoint.state) if isinstance(checkpoint.state, dict) else {}
        own = state.pop(ENGINE, None)
        if not isinstance(own, dict):
            raise CheckpointContentError(
                f"the checkpoint of step {checkpoint.step} was not written by an engine: give the engine a directory "
                "of its own, or load that checkpoint with ddpcore.checkpoint"
            )
        restore(state, self._objects)
        groups = [group for object_ in self._objects.values() for group in getattr(object_, "param_groups", ())]
        self._groups = [(group, _settings(group)) for group in groups]
        self.last_step = checkpoint.step
        per_rank = checkpoint.per_rank
        return Resumed(checkpoint.step, own, per_rank if isinstance(per_rank, dict) else None)

    def set_rates_back(self, optimizer: object) -> None:
        """Set the optimizer of a schedule back to what the checkpoint holds: the schedule's constructor has changed it.

        Source: torch 2.13, `LRScheduler._initial_step` steps for the first time.
        """
        own = [id(group) for group in getattr(optimizer, "param_groups", ())]
        for group, kept in self._groups:
            if id(group) in own:
                group.update(_settings(kept))

    def begin(self, now: Progress) -> None:
        self._saved_at = now

    def is_time_up(self, now: Progress) -> bool:
        """Return whether this rank's clock asks for a checkpoint. Clocks differ: the ranks have to agree first."""
        return self._every.unit is Unit.SECOND and self._every.is_due(self._saved_at, now)

    def is_due(self, now: Progress) -> bool:
        """Return whether a checkpoint is due by steps or epochs: on all ranks at the same boundary."""
        return self._every.unit is not Unit.SECOND and self._every.is_due(self._saved_at, now)

    def prepare(self, own: dict[str, Any], per_rank: dict[str, Any]) -> None:
        """Prepare memory for a snapshot behind the next steps, once all states have their size."""
        self._checkpointer.prepare(self._state(own), per_rank)

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint of this boundary would stay for its metric: the same on all ranks."""
        return self._checkpointer.would_keep(_finite(metrics))

    def load_best(self) -> int:
        """Set the objects back to the checkpoint with the best metric; return its step. Blocks.

        Raises EngineUseError if there is none, CheckpointMismatchError as of `resume`.
        """
        # Before the first save of a training that has started over there is nothing but another one's.
        checkpoint = self._checkpointer.load_best() if self.last_step is not None else None
        if checkpoint is None:
            raise EngineUseError(
                "there is no checkpoint with the metric yet: log it with engine.log in the steps that measure it"
            )
        restore({name: part for name, part in checkpoint.state.items() if name != ENGINE}, self._objects)
        return checkpoint.step

    def save(
        self,
        now: Progress,
        own: dict[str, Any],
        per_rank: dict[str, Any],
        metrics: Mapping[str, float],
        *,
        is_last: bool = False,
    ) -> bool:
        """Take a checkpoint of this boundary, unless there is one: then it returns False.

        Blocks for the snapshot; the files are written behind. A disk that is full or away does not end training: what
        could not be written is logged as an error, and the next checkpoint is tried; the last one raises
        CheckpointDirectoryError.
        """
        if self.last_step == now.step:
            return False
        self._saved_at = now
        state = self._state(own)
        try:
            try:
                self._checkpointer.save(now.step, state, per_rank, _finite(metrics))
            except CheckpointWriteError as error:
                _log.error("training goes on without its last checkpoint: %s", error)
                self._checkpointer.save(now.step, state, per_rank, _finite(metrics))
        except CheckpointDirectoryError as error:
            if is_last:
                raise
            _log.error("training goes on without a checkpoint of step %d: %s", now.step, error)
            return False
        self.last_step = now.step
        return True

    def wait(self) -> None:
        """Wait until what was saved lies on the disk, whole; raise CheckpointWriteError if it could not be written."""
        self._checkpointer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._checkpointer.__exit__(kind, error, trace)

    def _state(self, own: dict[str, Any]) -> dict[str, Any]:
        return {**{name: object_.state_dict() for name, object_ in self._objects.items()}, ENGINE: own}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group's settings, such as `lr`."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that a checkpoint can keep: not NaN, nor infinity."""
    return {name: value for name, value in metrics.items() if abs(value) <= MAX_METRIC}


def _check(objects: Mapping[str, Stateful]) -> None:
    if not objects:
        raise EngineUseError("a checkpoint of nothing: name what is to be saved, checkpoint(..., model=model)")
    for name, object_ in objects.items():
        if name == ENGINE:
            raise EngineUseError(f"{ENGINE!r} is the name of the engine's own part of a checkpoint: choose another one")
        if isinstance(object_, type) or not (hasattr(object_, "state_dict") and hasattr(object_, "load_state_dict")):
            raise EngineUseError(f"{name} cannot be saved: it has no state_dict and load_state_dict")
