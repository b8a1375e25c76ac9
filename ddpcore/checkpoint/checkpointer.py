"""Checkpoints of a data-parallel training: taken while it goes on, published whole or not at all, checked when loaded.

    checkpointer = Checkpointer("checkpoints", keep_last=3)
    checkpoint = checkpointer.load_latest()
    if checkpoint is not None:
        restore(checkpoint.state, {"model": model, "optimizer": optimizer})
    ...
    checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ...
    checkpointer.close()

Every rank makes the same calls. A save blocks for as long as it takes to copy this rank's share of the state, 1/N of
it, into memory; a process without torch writes it from there. What fails behind is raised by the next call, on every
rank.
"""

from __future__ import annotations

import math
import secrets
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ddpcore.arguments import absolute_path, check_is, check_number, check_seconds, check_text
from ddpcore.checkpoint.catalog import Catalog, Mode, Retention, check_retention, is_among_best
from ddpcore.checkpoint.loading import Loader
from ddpcore.checkpoint.meeting import Meeting, find_site
from ddpcore.checkpoint.saving import Saver, check_step
from ddpcore.errors import CheckpointCallError, CheckpointDirectoryError, CheckpointInvalidError
from ddpcore.placement import current_placement
from ddpcore.probe import probe

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from ddpcore.checkpoint.loading import Loaded

MEETING_TIMEOUT_S = 60.0

LEFTOVER_PATIENCE_S = 60.0
"""Seconds to wait for writers that have outlived their trainers: what they publish is worth waiting for."""

OPENING = "Checkpointer()"

MAX_METRIC = 1e300


class Checkpoint(NamedTuple):
    """What was loaded, checked to the last byte.

    Attributes:
        step: The step it was taken at.
        state: As it was saved, on the CPU.
        per_rank: What this rank alone had saved; None at another world size, or if not every rank has its own.
        skipped: Why newer ones were passed over, one sentence each.
    """

    step: int
    state: Any
    per_rank: Any
    skipped: tuple[str, ...]


class Checkpointer:
    """Saves and loads the checkpoints of one run in one directory.

    Every rank makes one, on its main thread and after the process group, and calls the same methods in the same order;
    without a process group it works alone. A context manager: an exception within closes it without waiting for other
    ranks.

    While a save is still being written, the next one waits for it: memory for one share, not two, is taken from
    training, and no checkpoint overtakes an earlier one. Saves that are further apart than writing takes never wait.

    Args:
        directory: Where the checkpoints lie. Nodes may share it, or each have one of their own under this name: then
            each node keeps a whole copy. Made if it is not there.
        keep_last: How many of the latest stay; None keeps all.
        keep_every: Checkpoints of steps that are a multiple of this stay permanently.
        keep_best: How many of this training with the best `metric` stay besides; None for none. A run that saves
            without having loaded a checkpoint begins a new training: what lies there does not count.
        metric: Which of a save's `metrics` that is.
        mode: "min" if the least is best, or "max". Of equal ones the earlier.
        timeout_s: How long a call waits for ranks that do not make it.

    Raises:
        CheckpointDirectoryError: The directory cannot be used, or another run uses it.
        CheckpointCallError: An argument makes no sense, or some ranks did not come.
    """

    def __init__(  # noqa: PLR0913 - what can stay, with defaults
        self,
        directory: str | Path,
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str | None = None,
        mode: Mode = "min",
        timeout_s: float = MEETING_TIMEOUT_S,
    ) -> None:
        self._root = absolute_path(CheckpointCallError, "directory", directory)
        self._retention = Retention(keep_last, keep_every, keep_best, metric, mode)
        check_retention(CheckpointCallError, self._retention)
        check_seconds(CheckpointCallError, "timeout_s", timeout_s)
        self._placement = current_placement()
        self._meeting = Meeting(timeout_s)
        self._site = find_site(self._root, self._meeting, OPENING)
        self._metrics: list[tuple[int, float]] = []
        """Sequence number and metric of each checkpoint."""
        self._unsettled: list[tuple[int, float]] = []
        self._catalog, self._saver = self._open()
        # Also at the interpreter's end: a container may vanish with its trainer, and the writer with it.
        self._end = weakref.finalize(self, *self._saver.finalizer())

    @property
    def last_step(self) -> int | None:
        """Step of the last checkpoint that this run knows to be published, or has loaded."""
        return self._saver.last_step

    def prepare(self, state: object, per_rank: object = None) -> None:
        """Make memory for such states ready in the background, so that the first save blocks no longer than the others.

        Returns at once, and needs no other rank. Call it once the state has its size: after the optimizer's first step.

        Args:
            state: As of `save`; nothing is copied.
            per_rank: As of `save`.

        Raises:
            StateNotStorableError: The state cannot be saved.
        """
        self._check_usable("prepare()")
        self._saver.prepare(state, per_rank)

    def save(
        self, step: int, state: object, per_rank: object = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Take a checkpoint. Every rank calls it; blocks until this rank's share is copied, not until it is written.

        Numbers and small tensors are rank 0's (BatchNorm's statistics may differ between ranks), large tensors come
        from all ranks: replicas are equal in them. Where nodes share no directory, numbers and small tensors of each
        node's copy are those of its first rank: a number that decides what ranks do next must be equal on all.

        Args:
            step: Steps done. Saving a step again replaces its checkpoint.
            state: Nested dicts, lists and tuples of tensors on any device, numbers, texts, booleans and None; of the
                same structure on all ranks.
            per_rank: The same for what differs between ranks, such as random states.
            metrics: What has been measured of this state, by name: rank 0's numbers stand in the manifest, where
                `keep_best` and `python -m ddpcore.checkpoint ls` find them.

        Raises:
            StateNotStorableError: A part of it cannot be stored; the message names its place.
            CheckpointWriteError: An earlier save has failed. This one was not begun; save again once that is mended.
            CheckpointDirectoryError: The directory can no longer be written.
            CheckpointCallError: Some ranks did not come, or with another step or structure.
            RankFailedError: Some have died, or raised.
        """
        with probe.phase("checkpoint"):
            self._check_usable(f"save(step={step})")
            measured = checked_metrics(metrics)
            before, self._unsettled = self._unsettled, []
            self._saver.save(step, state, per_rank, measured)
            self._metrics += before
            own = self._saver.sequence
            self._unsettled = [(own, value) for name, value in measured.items() if name == self._retention.metric]

    def would_keep(self, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with such metrics would now be among the best: the same on every rank.

        Args:
            metrics: As of `save`.

        Raises:
            CheckpointCallError: They are no finite numbers by name.
        """
        check_is(CheckpointCallError, "metrics", metrics, Mapping, "numbers by name")
        value = checked_metrics(metrics).get(self._retention.metric or "")
        since = math.inf if self._saver.since is None else self._saver.since
        others = [other for sequence, other in (*self._metrics, *self._unsettled) if sequence >= since]
        return value is not None and is_among_best(value, others, self._retention)

    def wait(self) -> None:
        """Wait until what was saved is published: from then on nothing but its disk can lose it. Every rank calls it.

        Raises:
            CheckpointWriteError: It could not be written.
            CheckpointCallError: Some ranks did not come.
            RankFailedError: Some have died, or raised.
        """
        with probe.phase("checkpoint"):
            self._check_usable("wait()")
            self._saver.settle("wait()", None, {})

    def load_latest(self) -> Checkpoint | None:
        """Return the latest sound checkpoint, the same on every rank; None if there is none.

        Every rank calls it; blocks for reading all of it. Where nodes share no directory, each reads its own copy of
        it, whose numbers and small tensors are those of that node's first rank (`save`).

        The latest is the one saved last: who loads an earlier step and trains on from there goes on with that. Every
        byte is checked before anything is returned. What is damaged is passed over, and named in `Checkpoint.skipped`.

        Raises:
            CheckpointInvalidError: There are checkpoints, and none of them is sound.
            CheckpointDirectoryError: The directory cannot be read.
            CheckpointCallError: Some ranks did not come.
            RankFailedError: Some have died, or raised.
        """
        loaded = self._load("load_latest()", None)
        return None if loaded is None else self._checkpoint(loaded)

    def load(self, step: int) -> Checkpoint:
        """Return the checkpoint of a step; else like `load_latest`.

        Raises:
            CheckpointInvalidError: There is none of that step, or it is damaged.
            CheckpointDirectoryError: The directory cannot be read.
            CheckpointCallError: Some ranks did not come.
            RankFailedError: Some have died, or raised.
        """
        check_step(step)
        loaded = self._load(f"load(step={step})", step)
        if loaded is None:
            raise CheckpointInvalidError(
                f"there is no checkpoint of step {step} in {self._root}: `python -m ddpcore.checkpoint ls` lists them"
            )
        return self._checkpoint(loaded)

    def load_best(self) -> Checkpoint | None:
        """Return this training's sound checkpoint with the best metric; None if none has it. Else like `load_latest`.

        Before anything is loaded or saved this training is that of the latest checkpoint.

        Raises:
            CheckpointInvalidError: Some have it, and none of them is sound.
            CheckpointCallError: This Checkpointer has no `metric`, or some ranks did not come.
            CheckpointDirectoryError: The directory cannot be read.
            RankFailedError: Some have died, or raised.
        """
        call = "load_best()"
        if self._retention.metric is None:
            raise CheckpointCallError(f"{call} wants to know what is best: Checkpointer(keep_best=1, metric=...)")
        self._check_usable(call)
        self._saver.settle(call, None, {})
        own = {"steps": self._catalog.best_steps if self._catalog else []}
        steps = self._meeting.agree(call, None, own)[0]["steps"]
        problems = []
        for step in steps:
            try:
                checkpoint = self.load(step)
            except CheckpointInvalidError as error:
                problems.append(str(error))
            else:
                return checkpoint._replace(skipped=(*problems, *checkpoint.skipped))
        if problems:
            raise CheckpointInvalidError(f"no checkpoint with {self._retention.metric} is sound: {'; '.join(problems)}")
        return None

    def close(self) -> None:
        """Wait as `wait` does, and let go of the directory. Every rank calls it; a second time it does nothing.

        Raises:
            CheckpointWriteError: What was saved last could not be written.
            CheckpointCallError: Some ranks did not come.
            RankFailedError: Some have died, or raised.
        """
        if not self._end.alive:
            return
        try:
            with probe.phase("checkpoint"):
                if current_placement() == self._placement:
                    self._saver.settle("close()", None, {})
                else:
                    self._saver.settle_alone()
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The others may never come: this rank's writer finishes what it has, and no more.
            self._end()

    def _open(self) -> tuple[Catalog | None, Saver]:
        catalog, error = None, None
        if self._site.is_leader:
            try:
                catalog = Catalog(
                    self._root,
                    retention=self._retention,
                    patience_s=LEFTOVER_PATIENCE_S,
                )
            except CheckpointDirectoryError as problem:
                error = problem
        own = {
            "sequence": catalog.last_sequence if catalog else 0,
            "run": secrets.token_hex(4),
            "metrics": catalog.metrics if catalog else [],
        }
        is_open = False
        try:
            answers = self._meeting.agree(OPENING, error, own, extra_s=LEFTOVER_PATIENCE_S)
            is_open = True
        finally:
            if catalog is not None and not is_open:
                catalog.lock.release()
        last_sequence = max(answer["sequence"] for answer in answers)
        self._metrics = [(sequence, value) for sequence, value in answers[0]["metrics"]]
        return catalog, Saver(
            self._root,
            self._site,
            self._meeting,
            catalog=catalog,
            run=answers[0]["run"],
            last_sequence=last_sequence,
        )

    def _load(self, call: str, step: int | None) -> Loaded | None:
        with probe.phase("checkpoint"):
            self._check_usable(call)
            self._saver.settle(call, None, {})
            loaded = Loader(self._root, self._site, self._meeting, call).load(step)
            if loaded is not None and self._catalog is not None:
                self._catalog.mark_invalid(loaded.invalid)
            return loaded

    def _checkpoint(self, loaded: Loaded) -> Checkpoint:
        self._saver.last_step = loaded.step
        self._saver.go_on(loaded.since)
        return Checkpoint(loaded.step, loaded.state, loaded.per_rank, loaded.skipped)

    def _check_usable(self, call: str) -> None:
        if not self._end.alive:
            raise CheckpointCallError(f"{call} on a Checkpointer that is closed: make a new one")
        if current_placement() != self._placement:
            raise CheckpointCallError(
                f"{call}: the process group is not the one this Checkpointer was made in: make it after the group"
            )


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats by name; raise CheckpointCallError for something else, or what is not finite."""
    if metrics is None:
        return {}
    check_is(CheckpointCallError, "metrics", metrics, Mapping, "numbers by name, or None")
    for name, value in metrics.items():
        check_text(CheckpointCallError, "a metric's name", name)
        check_number(CheckpointCallError, name, value, range_=(-math.inf, MAX_METRIC), wanted="a finite number")
    return {name: float(value) for name, value in metrics.items()}
