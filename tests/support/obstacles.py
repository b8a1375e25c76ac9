"""What may stand where a program wants to write a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OBSTACLES = ("directory", "pipe", "link")


def put_in_the_way(obstacle: str, path: Path, victim: Path) -> None:
    """Put one of `OBSTACLES` there; a link leads to `victim`."""
    match obstacle:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(victim)
        case _:
            raise ValueError(obstacle)
