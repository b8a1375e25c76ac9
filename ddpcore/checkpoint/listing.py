"""Which checkpoints a directory holds, and which of them are refused already by what names them. Needs no torch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from ddpcore.checkpoint.directory import directory_error, step_of
from ddpcore.checkpoint.marker import COMMITTED
from ddpcore.checkpoint.reading import read_manifest, read_marker
from ddpcore.checkpoint.retention import Published
from ddpcore.errors import CheckpointInvalidError

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "step_"


class Listing(NamedTuple):
    """The checkpoints of one directory.

    Attributes:
        published: Those whose directory and commit marker agree, newest first.
        refused: Why the others cannot be used, by their names.
    """

    published: list[Published]
    refused: dict[str, str]


def list_checkpoints(root: Path) -> Listing:
    """Return the checkpoints of a directory.

    Raises:
        CheckpointDirectoryError: The directory cannot be read.
    """
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
    newest_first = sorted(published.values(), key=lambda one: (one.sequence, one.step), reverse=True)
    return Listing(newest_first, refused)


def identify(path: Path) -> Published:
    """Return which checkpoint this is, by everything that names it.

    Raises:
        CheckpointInvalidError: Its directory, marker and manifest do not agree.
    """
    step = step_of(path.name)
    if step is None:
        raise CheckpointInvalidError("this is not the name of a checkpoint: it was renamed, or copied")
    marker = read_marker(path)
    if not marker.name:
        # Of an earlier version: nothing but the manifest confirms what the marker holds.
        read_manifest(path)
    return Published(path.name, step, marker.sequence, marker.id)
