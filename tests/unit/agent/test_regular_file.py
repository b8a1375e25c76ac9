"""What a rank has planted where a file should be is not followed, not waited for, and leaves nothing open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.files import open_regular


def num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    fd = open_regular(tmp_path / "file")
    assert os.read(fd, 10) == b"hello"
    os.close(fd)


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "nothing"])
def test_anything_else_is_an_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "planted"
    (tmp_path / "victim").write_text("mine")
    if kind == "link":
        path.symlink_to(tmp_path / "victim")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    num_open = num_open_files()

    with pytest.raises(OSError, match="planted"):
        open_regular(path)

    assert num_open_files() == num_open
