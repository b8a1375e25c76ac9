from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agent.logs.log_file import MAX_BACKLOG_BYTES, LogFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANY = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.stdout.log"


@pytest.fixture
def file(path: Path) -> Iterator[LogFile]:
    file = LogFile(path, 0, "stdout")
    yield file
    file.close()


def lines(file: LogFile) -> list[str]:
    """Read all there is, looking often enough for a replaced file to be left."""
    found: list[str] = []
    for _ in range(3):
        while file.look():
            found += file.read(MANY, MANY)
    return found


def test_a_file_that_is_not_there_yet_is_waited_for(file: LogFile, path: Path) -> None:
    assert lines(file) == []
    assert file.read(MANY, MANY) == []
    path.write_text("one\n")
    assert lines(file) == ["one"]


def test_a_replaced_file_is_read_to_its_end_before_the_new_one_is_begun(file: LogFile, path: Path) -> None:
    path.write_text("one\n")
    assert lines(file) == ["one"]
    with path.open("a") as old:
        path.rename(path.with_suffix(".1"))
        path.write_text("new\n")
        old.write("two\nthr")
        old.flush()
        assert file.look() == 7
        assert file.read(MANY, MANY) == ["two"]
        assert file.look() == 0
        old.write("ee\nfou")
        old.flush()
        assert file.look() == 6
        assert file.read(MANY, MANY) == ["three"]
    assert lines(file) == ["fou", "new"]


def test_a_file_that_vanishes_is_followed_on_until_it_returns(file: LogFile, path: Path) -> None:
    path.write_text("one\n")
    assert lines(file) == ["one"]
    with path.open("a") as old:
        path.unlink()
        old.write("unseen by others\n")
        old.flush()
        assert lines(file) == ["unseen by others"]
    path.write_text("back\n")
    assert lines(file) == ["back"]
    path.unlink()
    assert lines(file) == []
    path.write_text("again\n")
    assert lines(file) == ["again"]


def test_a_file_that_is_cut_says_so_and_is_read_from_its_start(file: LogFile, path: Path) -> None:
    path.write_text("one\ntwo\nhalf")
    assert lines(file) == ["one", "two"]
    path.write_text("new\n")
    assert lines(file) == ["half", "(the file was cut from 12 bytes to 4: it is read from its start)", "new"]


def test_the_hole_before_a_writer_that_goes_on_where_it_was_is_no_line(file: LogFile, path: Path) -> None:
    with path.open("wb", buffering=0) as writer:
        writer.write(b"x" * 99_999 + b"\n")
        assert len(lines(file)) == 1
        os.truncate(path, 0)
        assert file.look() == 0
        writer.write(b"after\n")
        assert lines(file) == ["(the file was cut from 100000 bytes to 0: it is read from its start)", "after"]
        writer.write(b"and on\n")
        assert lines(file) == ["and on"]
    assert file.dropped_bytes == 0


def test_a_hole_without_an_end_is_passed_over(file: LogFile, path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 100_000)
    assert lines(file) == []
    with path.open("ab") as writer:
        writer.write(b"end\n")
    assert lines(file) == ["end"]


def test_zeros_that_were_written_are_kept(file: LogFile, path: Path) -> None:
    path.write_bytes(b"\0\0binary\n")
    assert lines(file) == ["\0\0binary"]


def test_a_burst_is_skipped_counted_and_the_first_whole_line_behind_it_is_shown(file: LogFile, path: Path) -> None:
    path.write_bytes(b"first\nhal")
    assert lines(file) == ["first"]
    num_lines = MAX_BACKLOG_BYTES // 8
    with path.open("ab") as writer:
        writer.write(b"f\n" + b"".join(b"%07d\n" % number for number in range(num_lines + 2000)))
    assert file.look()
    assert file.read(1000, MANY)[0] == "half"
    (note, *rest) = file.read(1000, MANY)
    assert file.dropped_bytes % 8 == 0
    assert note == f"({file.dropped_bytes} bytes are not shown here, from offset 1003 on; all of them are in {path})"
    last = [*rest, *lines(file)]
    assert last == [f"{number:07d}" for number in range(num_lines + 2000 - len(last), num_lines + 2000)]
    assert file.dropped_bytes + 8 * len(last) == path.stat().st_size - 1003


def test_a_skip_into_a_progress_bar_goes_on_with_its_next_state(file: LogFile, path: Path) -> None:
    path.write_bytes(b"\r50% loss=0.5" * (MAX_BACKLOG_BYTES // 10))
    assert file.look()
    assert file.read(1000, MANY) == []
    (note,) = lines(file)
    assert note.startswith(f"({file.dropped_bytes} bytes are not shown here, from offset 0 on")
    assert file.unfinished == "50% loss=0.5"
    with path.open("ab") as writer:
        writer.write(b"\r51% loss=0.4\r\ndone\n")
    assert lines(file) == ["51% loss=0.4", "done"]
    assert file.dropped_bytes % len(b"\r50% loss=0.5") == 1, "the next state begins behind its carriage return"


def test_a_skip_into_a_line_that_is_never_ended_is_counted_when_the_file_is(file: LogFile, path: Path) -> None:
    path.write_bytes(b"x" * (MAX_BACKLOG_BYTES + 100_000))
    assert file.look()
    assert file.read(1000, MANY) == []
    assert lines(file) == []
    (note,) = file.finish()
    assert note.startswith(f"({MAX_BACKLOG_BYTES + 100_000} bytes are not shown here, from offset 0 on")
    assert file.dropped_bytes == path.stat().st_size
    assert file.look() == 0


def test_a_read_is_bounded_in_lines(file: LogFile, path: Path) -> None:
    path.write_bytes(b"a\n" * 10 + b"rest")
    assert file.look() == 24
    assert file.read(MANY, 3) == ["a"] * 3
    assert file.look() == 18
    assert file.read(MANY, 7) == ["a"] * 7
    assert file.look() == 0
    assert file.finish() == ["rest"]


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(file: LogFile, path: Path, kind: str) -> None:
    match kind:
        case "link":
            path.symlink_to("/etc/passwd")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    assert lines(file) == []


def test_a_file_that_turns_into_a_directory_is_followed_by_its_descriptor(file: LogFile, path: Path) -> None:
    path.write_text("one\n")
    assert lines(file) == ["one"]
    path.unlink()
    path.mkdir()
    assert lines(file) == []


def test_a_disk_that_fails_ends_the_following_with_one_line(file: LogFile, path: Path) -> None:
    path.write_text("one\n")
    assert file.look()
    os.close(file._fd)
    file._fd = os.open(path.parent, os.O_RDONLY)  # reading a directory fails, as a broken disk does
    assert file.read(MANY, MANY) == [f"(this log can no longer be read: Is a directory; it is {path})"]
    assert file.look() == 0
    assert file.is_finished
