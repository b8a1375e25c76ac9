"""What the leading rank of a site knows of its directory, and what it alone does there."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import TYPE_CHECKING, Any

from ddpcore.checkpoint.directory import (
    TEMPORARY,
    RunLock,
    checkpoint_name,
    collect_leftovers,
    directory_error,
    discard,
)
from ddpcore.checkpoint.listing import list_checkpoints
from ddpcore.checkpoint.marker import marker_tail
from ddpcore.checkpoint.reading import read_manifest
from ddpcore.checkpoint.retention import Published, best_first, victims
from ddpcore.errors import CheckpointDirectoryError, CheckpointInvalidError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ddpcore.checkpoint.retention import Retention

_log = logging.getLogger(__name__)


class Catalog:
    """The checkpoints of one directory, held by one run.

    Opening it waits for writers that have outlived their trainers, and deletes what dead runs have left.

    Args:
        root: The directory; it exists.
        retention: Which checkpoints stay.
        patience_s: How long to wait for such writers.

    Attributes:
        since: Sequence number of the first checkpoint that counts among the best: at first as of the newest one.

    Raises:
        CheckpointDirectoryError: It cannot be used, or another run uses it.
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
        """The highest sequence number of any checkpoint here, 0 without one."""
        return max((one.sequence for one in self._published), default=0)

    @property
    def metrics(self) -> list[tuple[int, float]]:
        """Sequence number and metric of each checkpoint here that has it."""
        return [(one.sequence, self._metrics[one.name]) for one in self._published if one.name in self._metrics]

    @property
    def best_steps(self) -> list[int]:
        """Steps of the checkpoints with a metric, the best first."""
        sound = [one for one in self._published if one.name not in self._invalid]
        metrics = self._counting(self._published)
        return list(dict.fromkeys(one.step for one in best_first(sound, metrics, self._retention.mode)))

    def begin(self, step: int, sequence: int, checkpoint_id: str, metrics: Mapping[str, float]) -> str:
        """Make the temporary directory of a new checkpoint; return its name.

        Args:
            step: Of the checkpoint.
            sequence: Of the checkpoint.
            checkpoint_id: Of the checkpoint.
            metrics: What was measured of it.

        Raises:
            CheckpointDirectoryError: It cannot be made.
        """
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
        """Take note that what was begun, if anything, is published."""
        for problem in undeleted:
            _log.warning("in %s: %s", self._root, problem)
        if self._in_flight is not None:
            known = [*self._published, self._in_flight]
            gone = self._victims(known)
            self._published = [one for one in known if one.name not in gone]
        self._in_flight = self._temporary = None

    def drop(self) -> None:
        """Delete what was begun."""
        if self._temporary is not None:
            discard(self._temporary)
        self._in_flight = self._temporary = None

    def mark_invalid(self, names: Collection[str]) -> None:
        """Take note of damaged ones: they do not count among those to keep."""
        self._invalid.update(names)

    def _victims(self, published: Sequence[Published]) -> list[str]:
        metrics = self._counting(published)
        return victims(published, self._retention, metrics=metrics, invalid=self._invalid)

    def _counting(self, published: Sequence[Published]) -> dict[str, float]:
        """Return the metrics of this training's checkpoints, by name."""
        own = {one.name for one in published if one.sequence >= self.since}
        return {name: value for name, value in self._metrics.items() if name in own}

    def _read_metrics(self) -> dict[str, float]:
        """Return the metric that retention goes by of each checkpoint that has it: it stands in the manifest."""
        metric, manifests = self._retention.metric, {}
        for one in self._published if metric is not None else []:
            # One that cannot be read is refused where it would be loaded.
            with contextlib.suppress(CheckpointInvalidError):
                manifests[one.name] = read_manifest(self._root / one.name)
        self.since = next((manifest.since for manifest in manifests.values()), 0)
        found = {name: manifest.metrics.get(metric or "", math.nan) for name, manifest in manifests.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}
