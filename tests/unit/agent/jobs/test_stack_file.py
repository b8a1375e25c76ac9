"""A rank's stack file is read as what an enemy may have left there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agent.jobs.rank_stacks import read_stack_file
from ddpcore.wire import WIRE_VERSION, MalformedReportError
from ddpcore.wire_stacks import MAX_STACK_FILE_BYTES, StackDump, ThreadStack, encode_stack_dump

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DUMP = StackDump(WIRE_VERSION, 3, 1, 4001, [ThreadStack("MainThread")])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-1.stacks.json"


def test_what_a_probe_wrote_is_read(path: Path) -> None:
    assert read_stack_file(path) is None

    path.write_bytes(encode_stack_dump(DUMP))

    assert read_stack_file(path) == DUMP


def link_to_a_real_one(path: Path) -> None:
    real = path.with_name("real")
    real.write_bytes(encode_stack_dump(DUMP))
    path.symlink_to(real)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "a link": link_to_a_real_one,
    "a pipe that nobody writes to": os.mkfifo,
    "a directory": lambda path: path.mkdir(),
    "too much": lambda path: path.write_bytes(encode_stack_dump(DUMP) + b" " * MAX_STACK_FILE_BYTES),
    "no JSON": lambda path: path.write_bytes(b"\x00\xff"),
    "half of it": lambda path: path.write_bytes(encode_stack_dump(DUMP)[:-9]),
    "deep JSON": lambda path: path.write_bytes(b"[" * 100_000),
    "a rank that is none": lambda path: path.write_bytes(encode_stack_dump(DUMP).replace(b'"rank":1', b'"rank":-1')),
    "too many threads": lambda path: path.write_bytes(
        encode_stack_dump(StackDump(WIRE_VERSION, 3, 1, 1, [ThreadStack("t")] * 65))
    ),
    "another version": lambda path: path.write_bytes(encode_stack_dump(StackDump(WIRE_VERSION + 1, 3, 1, 1, []))),
}


@pytest.mark.parametrize("leave", HOSTILE.values(), ids=HOSTILE)
def test_anything_else_is_refused(path: Path, leave: Callable[[Path], object]) -> None:
    leave(path)

    with pytest.raises(MalformedReportError):
        read_stack_file(path)
