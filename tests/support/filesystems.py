"""File systems that are full, or cannot be written. They need root; in CI that is no reason to skip."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

AGENT_DISK_BYTES = 24 * 2**20
"""A little more than an agent wants to be free before it takes a job."""


class SmallDisk:
    """A disk for an agent's directory, which can be filled to its last byte."""

    def __init__(self, path: Path) -> None:
        self._filler = path / "filler"
        self.directory = path / "a"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for num_bytes in (2**16, 1):
                try:
                    while file.write(b"x" * num_bytes):
                        pass
                except OSError:
                    continue

    def empty(self) -> None:
        self._filler.unlink()


@contextlib.contextmanager
def small_disk(path: Path, num_bytes: int, num_inodes: int = 0) -> Iterator[Path]:
    """Mount a file system of this size; 0 inodes are as many as it has by default."""
    path.mkdir()
    _mount(
        "-t",
        "tmpfs",
        "-o",
        f"size={num_bytes}" + (f",nr_inodes={num_inodes}" if num_inodes else ""),
        "tmpfs",
        str(path),
    )
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Make a directory's file system read-only for a while."""
    _mount("--bind", str(path), str(path))
    try:
        _mount("-o", "remount,bind,ro", str(path))
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _mount(*args: str) -> None:
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("mounting a file system needs root")
    subprocess.run(["mount", *args], check=True)
