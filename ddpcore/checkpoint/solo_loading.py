"""Checkpoints read by one process for itself: it owns no directory, takes no lock, writes nothing, meets no rank.

    loaded = load_checkpoint("runs/gpt/checkpoints", model=model)             # the latest sound one, into the model
    state = load_checkpoint("checkpoints/step_00000100", device="cuda").state  # all of this one
    loaded = load_checkpoint("checkpoints", metric="val_loss", model=model)   # the best one of those that are there
    weight = load_tensors("checkpoints", ["model.head.weight"])["model.head.weight"]

The directory may be read-only, a copy, or that of a run which saves and deletes at the same moment: a checkpoint that
is deleted while it is read is passed over, and the directory is looked at again. All that `Checkpointer.load_latest`
checks is checked here: names, commit marker, manifest, every byte that is returned.
"""

from __future__ import annotations

import errno
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ddpcore.arguments import absolute_path, check_flag, check_has, check_is, refuse
from ddpcore.checkpoint.catalog import Retention, best_first, check_retention, list_checkpoints
from ddpcore.checkpoint.directory import step_of
from ddpcore.checkpoint.formats import COMMITTED
from ddpcore.checkpoint.reading import read_manifest
from ddpcore.checkpoint.restoring import Fit, restore_parts
from ddpcore.checkpoint.saving import check_step
from ddpcore.checkpoint.state_tree import keys_of
from ddpcore.checkpoint.tensor_files import read_checkpoint, read_tensors
from ddpcore.errors import (
    CheckpointCallError,
    CheckpointDirectoryError,
    CheckpointInvalidError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ddpcore.checkpoint.catalog import Mode, Published
    from ddpcore.checkpoint.formats import Manifest
    from ddpcore.checkpoint.restoring import Stateful

_T = TypeVar("_T")

NUM_LOOKS = 10
"""How often a directory is looked at, at least, while checkpoints are deleted under the reader."""

PATIENCE_S = 3.0
"""How long it is looked at then, at least."""


class LoadedCheckpoint(NamedTuple):
    """What one process has loaded.

    Attributes:
        step: The step it was taken at.
        path: Its directory.
        state: The parts of the objects as they were saved, on the device that was asked for; the whole state where no
            object was given.
        fit: What fits the objects and what does not; whole unless `strict=False` was given.
        skipped: Why newer ones were passed over, one sentence each.
    """

    step: int
    path: Path
    state: Any
    fit: Fit
    skipped: tuple[str, ...]


def load_checkpoint(
    path: str | Path,
    *,
    step: int | None = None,
    metric: str | None = None,
    mode: Mode = "min",
    device: torch.device | str = "cpu",
    strict: bool = True,
    **objects: Stateful,
) -> LoadedCheckpoint:
    """Load a checkpoint in this process alone, without writing to its directory or keeping anybody out of it.

    Needs no process group. Ranks that call it read for themselves and agree on nothing: while a run saves into the
    directory, give each the same `step`. Blocks for reading all of the checkpoint; memory is taken for the parts of
    the objects, or for all where there are none.

    Args:
        path: The directory of a run: its latest sound checkpoint is loaded. Or the directory of one checkpoint, then
            that one or none.
        step: Step of the checkpoint, instead of the latest.
        metric: Load the sound checkpoint of the latest training with the best value of it, instead of the latest: as
            given to `Engine.checkpoint` or in `Checkpointer.save(metrics=...)`.
        mode: "min" if the least value is best, or "max". Of equal ones the earlier.
        device: Where the tensors of the returned state are brought to. The objects stay where they are.
        strict: False loads what fits, see `restore`; the rest is in `LoadedCheckpoint.fit`. Objects that were added
            after the checkpoint was made stay as they are.
        objects: What to load it into, by the names in the checkpoint: `model=model`. Other parts stay out.

    Raises:
        CheckpointInvalidError: There is none, none is sound, or it does not fit into memory.
        CheckpointDirectoryError: The directory is not there or cannot be read.
        CheckpointMismatchError: The checkpoint is of other objects. Nothing has been loaded.
        CheckpointCallError: An argument makes no sense.
    """
    search = _Search(_check_where(path, step), step, _check_best(step, metric, mode))
    target = _check_device(device)
    check_flag(CheckpointCallError, "strict", strict)
    for name, one in objects.items():
        check_has(
            CheckpointCallError,
            name,
            one,
            ("state_dict", "load_state_dict"),
            "an object with state_dict and load_state_dict, such as a model or an optimizer",
        )
    parts = objects.keys() if objects else None

    def read(one: Path) -> tuple[Manifest, Any]:
        contents = read_checkpoint(one, parts=parts, device=target)
        return contents.manifest, contents

    found = search.run(read)
    manifest, state, _ = found.content
    fit = restore_parts(state, objects, strict=strict, saved=keys_of(manifest.state)) if objects else Fit()
    return LoadedCheckpoint(found.step, found.path, state, fit, found.skipped)


def load_tensors(
    path: str | Path,
    names: Collection[str],
    *,
    step: int | None = None,
    metric: str | None = None,
    mode: Mode = "min",
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return single tensors of a checkpoint; else like `load_checkpoint`. Takes memory for these alone.

    Reads and checks the files that hold them, each to its last byte, and no others.

    Args:
        path: The directory of a run, or of one checkpoint.
        names: Places in the state, keys joined by dots: "model.layers.0.weight".
        step: Step of the checkpoint, instead of the latest.
        metric: As of `load_checkpoint`.
        mode: As of `load_checkpoint`.
        device: Where they are brought to.

    Raises:
        CheckpointContentError: The latest sound checkpoint has no tensor of such a name; near ones are named.
        CheckpointInvalidError: There is no checkpoint, none is sound, or they do not fit into memory.
        CheckpointDirectoryError: The directory is not there or cannot be read.
        CheckpointCallError: An argument makes no sense.
    """
    search = _Search(_check_where(path, step), step, _check_best(step, metric, mode))
    target = _check_device(device)
    wanted = "a list of tensors' names"
    check_is(CheckpointCallError, "names", names, list | tuple | set | frozenset | type({}.keys()), wanted)
    if not names or not all(isinstance(name, str) for name in names):
        raise refuse(CheckpointCallError, "names", names, wanted)
    found = search.run(lambda one: read_tensors(one, names))
    return {name: tensor.to(target) for name, tensor in found.content.items()}


class _Found(NamedTuple):
    """What a search has read."""

    step: int
    path: Path
    content: Any
    skipped: tuple[str, ...]


class _Search:
    """One search for the latest sound checkpoint below a path, or at it.

    `step` is that of the only one that counts. With a metric the `best` of those that have it is searched for.
    """

    def __init__(self, path: Path, step: int | None, best: Retention) -> None:
        # A link such as `latest` leads to a checkpoint whose own name counts.
        self._path = Path(os.path.realpath(path))
        # Path.is_file raises where a directory may not be searched, or a name is too long.
        self._is_one = step_of(self._path.name) is not None or os.path.isfile(self._path / COMMITTED)  # noqa: PTH113
        self._step = step
        self._best = best
        self._skipped: list[str] = []
        self._num_vanished = 0

    def run(self, read: Callable[[Path], tuple[Manifest, _T]]) -> _Found:
        """Return the latest checkpoint that `read` can read and check."""
        if self._is_one:
            return self._run_on_one(read)
        deadline_s = time.monotonic() + PATIENCE_S
        num_looks = num_still = 0
        while num_looks < NUM_LOOKS or time.monotonic() < deadline_s:
            num_looks += 1
            num_vanished = self._num_vanished
            found = self._look(read)
            if found is not None:
                return found
            num_still = num_still + 1 if self._num_vanished == num_vanished else 0
            # Twice: a listing may miss both the one that is just deleted and the one that is just published.
            if num_still > 1:
                raise self._nothing()
        raise CheckpointInvalidError(
            f"no checkpoint in {self._path} can be read before it is deleted, {self._num_vanished} were tried: the run "
            "that saves there has to keep more of them (keep_last), or copy one elsewhere",
            self._skipped,
        )

    def _run_on_one(self, read: Callable[[Path], tuple[Manifest, _T]]) -> _Found:
        own_step = step_of(self._path.name)
        if self._step not in (None, own_step):
            raise CheckpointCallError(f"step={self._step}: {self._path} is the checkpoint of step {own_step}")
        if self._best.metric is not None:
            raise CheckpointCallError(
                f"metric={self._best.metric!r}: {self._path} is one checkpoint, not those of a run"
            )
        if own_step is None:
            raise CheckpointInvalidError(f"{self._path} was renamed, or copied: its name is not that of a checkpoint")
        content = self._try(self._path, None, read)
        if content is not None:
            return _Found(own_step, self._path, content[0], ())
        if self._num_vanished:
            raise CheckpointInvalidError(f"{self._path} is not there, or was deleted while it was read")
        raise CheckpointInvalidError(f"{self._path} cannot be used: {self._skipped[0]}", self._skipped)

    def _look(self, read: Callable[[Path], tuple[Manifest, _T]]) -> _Found | None:
        """Try what is there now, latest or best first."""
        try:
            listing = list_checkpoints(self._path)
        except CheckpointDirectoryError as error:
            why = getattr(error.__cause__, "strerror", None) or error
            raise CheckpointDirectoryError(
                f"{self._path} cannot be read: {why}; give the directory of a run's checkpoints, or of one of them"
            ) from error
        self._skipped = []
        for name, why in listing.refused.items():
            if self._step in (None, step_of(name)):
                self._pass_over(self._path / name, why)
        for one in self._best_first(listing.published):
            if self._step not in (None, one.step):
                continue
            content = self._try(self._path / one.name, one[1:], read)
            if content is not None:
                return _Found(one.step, self._path / one.name, content[0], tuple(self._skipped))
        return None

    def _best_first(self, published: list[Published]) -> list[Published]:
        """Return those of the latest training with the metric, the best first; all where none is asked for."""
        if self._best.metric is None:
            return published
        manifests = {}
        for one in published:
            try:
                manifests[one.name] = read_manifest(self._path / one.name)
            except CheckpointInvalidError as error:
                self._pass_over(self._path / one.name, str(error))
        since = next((manifest.since for manifest in manifests.values()), 0)
        metrics = {
            name: manifest.metrics.get(self._best.metric, math.nan)
            for name, manifest in manifests.items()
            if manifest.sequence >= since
        }
        return best_first(published, metrics, self._best.mode)

    def _try(
        self, path: Path, identity: tuple[int, int, str] | None, read: Callable[[Path], tuple[Manifest, _T]]
    ) -> tuple[_T] | None:
        """Return what a checkpoint holds; None if it is damaged or has vanished."""
        try:
            manifest, content = read(path)
        except CheckpointInvalidError as error:
            self._pass_over(path, str(error))
            return None
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise CheckpointInvalidError(f"{path.name} is not loaded: {error}", [str(error)]) from error
        if identity is not None and (manifest.step, manifest.sequence, manifest.id) != identity:
            self._num_vanished += 1
            return None
        return (content,)

    def _pass_over(self, path: Path, why: str) -> None:
        if _is_there(path):
            self._skipped.append(f"{path.name}: {why}")
        else:
            self._num_vanished += 1

    def _nothing(self) -> CheckpointInvalidError:
        what = "no checkpoint" if self._step is None else f"no checkpoint of step {self._step}"
        if self._best.metric is not None:
            what = f"no checkpoint with {self._best.metric}"
        if not self._skipped:
            return CheckpointInvalidError(
                f"there is {what} in {self._path}: `python -m ddpcore.checkpoint ls` lists them"
            )
        return CheckpointInvalidError(
            f"{what} in {self._path} can be used: {'; '.join(self._skipped)}. `python -m ddpcore.checkpoint verify` "
            "lists which are sound",
            self._skipped,
        )


def _is_there(path: Path) -> bool:
    """Return whether something has this name, as far as is known: what may not be looked at is not gone."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def _check_where(path: str | Path, step: int | None) -> Path:
    if step is not None:
        check_step(step)
    return absolute_path(CheckpointCallError, "path", path)


def _check_best(step: int | None, metric: str | None, mode: Mode) -> Retention:
    best = Retention(keep_best=None if metric is None else 1, metric=metric, mode=mode)
    check_retention(CheckpointCallError, best)
    if step is not None and metric is not None:
        raise CheckpointCallError(f"step={step} and metric={metric!r} name two checkpoints: give one of them")
    return best


def _check_device(device: torch.device | str) -> torch.device:
    wanted = "a torch.device or its name"
    check_is(CheckpointCallError, "device", device, torch.device | str, wanted)
    try:
        found = torch.device(device)
        is_usable = not torch.empty(0, device=found).is_meta
    except (RuntimeError, AssertionError) as error:
        # torch's own word for a device that it was not built for is an assertion.
        reason = str(error).strip().split("\n", maxsplit=1)[0]
        raise refuse(CheckpointCallError, "device", device, f"{wanted} that this process can use ({reason})") from error
    if not is_usable:
        raise refuse(CheckpointCallError, "device", device, "a device that holds data")
    return found
