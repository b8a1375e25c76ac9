"""Lists the checkpoints of a directory, refuses those that are not sound by name and marker, and deletes old ones.

`list_checkpoints` returns what a directory holds and which of it is refused already by what names it; it needs no
torch. `Catalog` is the view of the leading rank of a site on its directory, and what that rank alone does there.
`Retention` and `victims` decide, without side effects, which checkpoints stay.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ddpcore.arguments import check_text, check_whole, refuse
from ddpcore.checkpoint.directory import (
    TEMPORARY,
    RunLock,
    checkpoint_name,
    collect_leftovers,
    directory_error,
    discard,
    step_of,
)
from ddpcore.checkpoint.formats import COMMITTED, marker_tail
from ddpcore.checkpoint.reading import read_manifest, read_marker
from ddpcore.errors import CheckpointDirectoryError, CheckpointInvalidError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

PREFIX = "step_"


class Listing(NamedTuple):
    """Checkpoints of one directory: the usable ones, latest first, and by name why the others cannot be used."""

    published: list[Published]
    refused: dict[str, str]


def list_checkpoints(root: Path) -> Listing:
    """Return the checkpoints of a directory; raise CheckpointDirectoryError if it cannot be read."""
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.name.startswith(PREFIX))
    except OSError as error:
        raise directory_error(root, error) from error
    published: dict[str, Published] = {}
    refused: dict[str, str] = {}
    for name in names:
        if step_of(name) is None and not os.path.lexists(root / name / COMMITTED):
            continue
        try:
            one = identify(root / name)
        except CheckpointInvalidError as error:
            refused[name] = str(error)
            continue
        if one.id in published:
            refused[name] = f"it has the id of {published[one.id].name}: it is a copy of that one"
        else:
            published[one.id] = one
    latest_first = sorted(published.values(), key=lambda one: (one.sequence, one.step), reverse=True)
    return Listing(latest_first, refused)


def identify(path: Path) -> Published:
    """Return which checkpoint this is; raise CheckpointInvalidError unless directory, marker and manifest agree."""
    step = step_of(path.name)
    if step is None:
        raise CheckpointInvalidError("this is not the name of a checkpoint: it was renamed, or copied")
    marker = read_marker(path)
    if not marker.name:
        # Of an earlier version: nothing but the manifest confirms what the marker holds.
        read_manifest(path)
    return Published(path.name, step, marker.sequence, marker.id)


_log = logging.getLogger(__name__)


class Catalog:
    """Checkpoints of one directory that exists, held by one run.

    Opening it waits at most `patience_s` for writers that have outlived their trainers, and deletes what dead runs have
    left. It raises CheckpointDirectoryError if the directory cannot be used, or another run uses it. `since` is the
    sequence number of the first checkpoint that counts among the best: at first that of the latest one.
    """

    def __init__(self, root: Path, *, retention: Retention, patience_s: float) -> None:
        self._root = root
        self._retention = retention
        self._invalid: set[str] = set()
        self._in_flight: Published | None = None
        self._temporary: Path | None = None
        self.since = 0
        self.lock = RunLock(root)
        try:
            collect_leftovers(root, patience_s)
            self._published = list_checkpoints(root).published
            self._metrics = self._read_metrics()
        except CheckpointDirectoryError:
            self.lock.release()
            raise

    @property
    def last_sequence(self) -> int:
        """Highest sequence number of any checkpoint here, 0 without one."""
        return max((one.sequence for one in self._published), default=0)

    @property
    def metrics(self) -> list[tuple[int, float]]:
        """Sequence number and metric of each checkpoint here that has one."""
        return [(one.sequence, self._metrics[one.name]) for one in self._published if one.name in self._metrics]

    @property
    def best_steps(self) -> list[int]:
        """Steps of the checkpoints with a metric, the best first."""
        sound = [one for one in self._published if one.name not in self._invalid]
        metrics = self._counting(self._published)
        return list(dict.fromkeys(one.step for one in best_first(sound, metrics, self._retention.mode)))

    def begin(self, step: int, sequence: int, checkpoint_id: str, metrics: Mapping[str, float]) -> str:
        """Make the temporary directory of a new checkpoint and return its name; raise CheckpointDirectoryError."""
        try:
            existing = [entry.name for entry in self._root.iterdir()]
            name = checkpoint_name(step, existing)
            self._temporary = self._root / f"{TEMPORARY}{name}-{checkpoint_id}"
            self._temporary.mkdir()
        except OSError as error:
            raise directory_error(self._root, error) from error
        self._in_flight = Published(name, step, sequence, checkpoint_id)
        self._metrics.pop(name, None)
        if (metric := self._retention.metric) is not None and metric in metrics:
            self._metrics[name] = metrics[metric]
        return self._temporary.name

    def order(self, files: list[str], body_bytes: int) -> dict[str, Any]:
        """Return what a writer needs to publish the checkpoint that was begun."""
        assert self._in_flight is not None
        new = self._in_flight
        doomed = self._victims([*self._published, new])
        return {
            "root": str(self._root),
            "name": new.name,
            "files": files,
            "body_bytes": body_bytes,
            "marker": marker_tail(new.sequence, new.id, new.name),
            "delete": doomed,
        }

    def finish(self, undeleted: list[str]) -> None:
        """Note that what was begun, if anything, is published."""
        for problem in undeleted:
            _log.warning("in %s: %s", self._root, problem)
        if self._in_flight is not None:
            known = [*self._published, self._in_flight]
            gone = self._victims(known)
            self._published = [one for one in known if one.name not in gone]
        self._in_flight = self._temporary = None

    def drop(self) -> None:
        if self._temporary is not None:
            discard(self._temporary)
        self._in_flight = self._temporary = None

    def mark_invalid(self, names: Collection[str]) -> None:
        """Note damaged checkpoints: they do not count among those to keep."""
        self._invalid.update(names)

    def _victims(self, published: Sequence[Published]) -> list[str]:
        metrics = self._counting(published)
        return victims(published, self._retention, metrics=metrics, invalid=self._invalid)

    def _counting(self, published: Sequence[Published]) -> dict[str, float]:
        """Return the metrics of this training's checkpoints, by name."""
        own = {one.name for one in published if one.sequence >= self.since}
        return {name: value for name, value in self._metrics.items() if name in own}

    def _read_metrics(self) -> dict[str, float]:
        """Return the metric that retention uses, from the manifest of each checkpoint that has it."""
        metric, manifests = self._retention.metric, {}
        for one in self._published if metric is not None else []:
            # One that cannot be read is refused where it would be loaded.
            with contextlib.suppress(CheckpointInvalidError):
                manifests[one.name] = read_manifest(self._root / one.name)
        self.since = next((manifest.since for manifest in manifests.values()), 0)
        found = {name: manifest.metrics.get(metric or "", math.nan) for name, manifest in manifests.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}


Mode = Literal["min", "max"]


class Retention(NamedTuple):
    """Rule for which checkpoints stay.

    The latest `keep_last` (None: all), steps that are a multiple of `keep_every`, and the `keep_best` with the best
    metric.
    """

    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: int | None = None
    metric: str | None = None
    mode: Mode = "min"


class Published(NamedTuple):
    """A checkpoint of the directory, as its commit marker has it.

    `sequence` counts the checkpoints of this directory. `id` is the same for all copies of one checkpoint.
    """

    name: str
    step: int
    sequence: int
    id: str


def check_retention(kind: type[Exception], retention: Retention) -> None:
    for name in ("keep_last", "keep_every", "keep_best"):
        if getattr(retention, name) is not None:
            check_whole(kind, name, getattr(retention, name), wanted="a number above 0, or None")
    if retention.metric is not None:
        check_text(kind, "metric", retention.metric)
    if retention.mode not in tuple(get_args(Mode)):
        raise refuse(kind, "mode", retention.mode, '"min" where the least value is best, or "max"')
    if (retention.keep_best is None) != (retention.metric is None):
        raise kind('keep_best and metric go together: keep_best=3, metric="val_loss" keeps the three with the least')


def is_better(value: float, other: float, mode: Mode) -> bool:
    """Return whether a metric's value is better than another; NaN is never, and anything is better than NaN."""
    if math.isnan(value) or math.isnan(other):
        return not math.isnan(value)
    return value < other if mode == "min" else value > other


def is_among_best(value: float, others: Iterable[float], retention: Retention) -> bool:
    """Return whether a checkpoint with this value would be kept as one of the best."""
    if retention.keep_best is None or math.isnan(value):
        return False
    num_better = sum(not is_better(value, other, retention.mode) and not math.isnan(other) for other in others)
    return num_better < retention.keep_best


def best_first(published: Iterable[Published], metrics: Mapping[str, float], mode: Mode) -> list[Published]:
    """Return the checkpoints that have a metric, by their names, the best first; of equal ones the earlier step."""
    sign = 1.0 if mode == "min" else -1.0
    measured = [one for one in published if not math.isnan(metrics.get(one.name, math.nan))]
    return sorted(measured, key=lambda one: (sign * metrics[one.name], one.sequence))


def victims(
    published: Sequence[Published],
    retention: Retention,
    *,
    metrics: Mapping[str, float] | None = None,
    invalid: Collection[str] = (),
) -> list[str]:
    """Return the names of those to delete, oldest first, once the latest of `published` is known to be whole.

    A checkpoint that a later one of the same step has replaced goes first. One that is known to be damaged (`invalid`)
    does not count among the last or the best ones, and the latest sound one never goes.
    """
    by_age = sorted(published, key=lambda one: one.sequence)
    latest_of_step = {one.step: one for one in by_age if one.name not in invalid}
    sound = [one for one in by_age if latest_of_step.get(one.step) is one]
    last = sound if retention.keep_last is None else sound[-max(1, retention.keep_last) :]
    kept = {one.name for one in last}
    if retention.keep_every is not None:
        kept |= {one.name for one in sound if one.step % retention.keep_every == 0}
    if retention.keep_best is not None:
        kept |= {one.name for one in best_first(sound, metrics or {}, retention.mode)[: retention.keep_best]}
    oldest_of_last = min((one.sequence for one in last), default=0)
    # A damaged one among the last ones is left for people to look at.
    return [
        one.name
        for one in by_age
        if one.name not in kept and (one.name not in invalid or one.sequence < oldest_of_last)
    ]
