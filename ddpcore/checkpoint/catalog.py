"""What the leading rank of a site knows of its directory, and what it alone does there."""

from __future__ import annotations

import logging
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
from ddpcore.checkpoint.retention import Published, victims
from ddpcore.errors import CheckpointDirectoryError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_log = logging.getLogger(__name__)


class Catalog:
    """The checkpoints of one directory, held by one run.

    Opening it waits for writers that have outlived their trainers, and deletes what dead runs have left.

    Args:
        root: The directory; it exists.
        keep_last: As of `Checkpointer`.
        keep_every: As of `Checkpointer`.
        patience_s: How long to wait for such writers.

    Raises:
        CheckpointDirectoryError: It cannot be used, or another run uses it.
    """

    def __init__(self, root: Path, *, keep_last: int | None, keep_every: int | None, patience_s: float) -> None:
        self._root = root
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._invalid: set[str] = set()
        self._in_flight: Published | None = None
        self._temporary: Path | None = None
        self.lock = RunLock(root)
        try:
            collect_leftovers(root, patience_s)
            self._published = list_checkpoints(root).published
        except CheckpointDirectoryError:
            self.lock.release()
            raise

    @property
    def last_sequence(self) -> int:
        """The highest sequence number of any checkpoint here, 0 without one."""
        return max((one.sequence for one in self._published), default=0)

    def begin(self, step: int, sequence: int, checkpoint_id: str) -> str:
        """Make the temporary directory of a new checkpoint; return its name.

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
        return self._temporary.name

    def order(self, files: list[str], body_bytes: int) -> dict[str, Any]:
        """Return what a writer needs to publish the checkpoint that was begun."""
        assert self._in_flight is not None
        new = self._in_flight
        doomed = victims(
            [*self._published, new], keep_last=self._keep_last, keep_every=self._keep_every, invalid=self._invalid
        )
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
            gone = victims(known, keep_last=self._keep_last, keep_every=self._keep_every, invalid=self._invalid)
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
