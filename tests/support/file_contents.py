"""What is in the files of a directory in which others are at work."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def contents(*places: Path) -> dict[Path, bytes]:
    """Return the files below some directories, with what is in them; one that vanishes meanwhile is not among them."""
    found = {}
    for place in places:
        for directory, _, names in os.walk(place):  # `Path.rglob` raises where a directory vanishes
            for path in (Path(directory, name) for name in names):
                with contextlib.suppress(FileNotFoundError):
                    if path.is_file() and not path.is_symlink():
                        found[path] = path.read_bytes()
    return found
