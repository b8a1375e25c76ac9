from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis.strategies as st
import pytest
from hypothesis import given

from agent import log_tail
from agent.log_tail import MAX_LINE_CHARS, LineSplitter, LogTail, find_error, last_exception_line

if TYPE_CHECKING:
    from pathlib import Path

TRACEBACK = """[rank1]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in main
[rank1]:     loss.backward()
[rank1]: RuntimeError: Connection closed by peer
"""


@pytest.fixture
def tail(tmp_path: Path) -> LogTail:
    tail = LogTail()
    tail.follow("train", tmp_path, range(2))
    return tail


def texts(tail: LogTail, seq: int = 0, limit: int = 100) -> list[str]:
    return [line.text for line in tail.since(seq, limit)]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o"], ["one"]),
        ([b"dos\r\nunix\n"], ["dos", "unix"]),
        ([b"dos\r", b"\nunix\n"], ["dos", "unix"]),
        ([b"\r 1%", b"\r 50%\r100%\n"], ["100%"]),
        ([b"\n\n"], ["", ""]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"caf\xc3", b"\xa9\n"], ["caf\u00e9"]),
    ],
)
def test_bytes_become_lines_however_they_are_cut(pieces: list[bytes], lines: list[str]) -> None:
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_the_cuts_between_reads_do_not_matter(pieces: list[bytes]) -> None:
    whole, cut = LineSplitter(), LineSplitter()
    assert [line for piece in pieces for line in cut.feed(piece)] == whole.feed(b"".join(pieces))
    assert cut.flush() == whole.flush()


def test_a_huge_line_is_cut_and_does_not_fill_memory() -> None:
    splitter = LineSplitter()
    for _ in range(100):
        assert splitter.feed(b"x" * 100_000) == []
    assert splitter.feed(b"\r") == []
    assert splitter.feed(b"\nnext\n") == ["x" * MAX_LINE_CHARS, "next"]


def test_lines_are_numbered_over_all_files_of_a_node(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text("zero\n")
    tail.poll()
    (tmp_path / "rank-1.stderr.log").write_text("one\n")
    (tmp_path / "launcher.log").write_text("torchrun\n")
    tail.poll()
    lines = tail.since(0, 100)
    assert [(line.seq, line.rank, line.stream, line.text) for line in lines] == [
        (1, 0, "stdout", "zero"),
        (2, -1, "stderr", "torchrun"),
        (3, 1, "stderr", "one"),
    ]
    assert tail.log_seq == 3
    assert texts(tail, 2) == ["one"]
    assert texts(tail, 3) == texts(tail, 99) == []
    assert texts(tail, 0, limit=2) == ["zero", "torchrun"]
    tail.close()


def test_the_unfinished_last_line_comes_when_the_job_has_ended(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text("half")
    tail.poll()
    assert texts(tail) == []
    tail.unfollow("train")
    assert texts(tail) == ["half"]
    tail.unfollow("train")


def test_a_rest_longer_than_one_read_is_read_to_its_end(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_bytes(b"\r" * 200_000 + b"end\n")
    tail.unfollow("train")
    assert texts(tail) == ["end"]


def test_only_the_newest_lines_are_kept(tail: LogTail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tail, "MAX_KEPT_LINES", 10)
    (tmp_path / "rank-0.stdout.log").write_text("".join(f"{number}\n" for number in range(25)))
    tail.poll()
    assert texts(tail) == [str(number) for number in range(15, 25)]
    assert (tail.first_seq, tail.log_seq) == (16, 25)
    monkeypatch.setattr(log_tail, "MAX_KEPT_CHARS", 4)
    (tmp_path / "rank-1.stdout.log").write_text("abc\n")
    tail.poll()
    assert texts(tail) == ["abc"]
    tail.close()


def test_a_pull_is_bounded_in_characters(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").write_text(("x" * 4000 + "\n") * 60)
    for _ in range(4):
        tail.poll()
    assert tail.log_seq == 60
    assert len(tail.since(0, 1000)) == log_tail.MAX_PULLED_CHARS // 4000
    tail.close()


def test_a_burst_is_skipped_and_says_so(tail: LogTail, tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stdout.log"
    path.write_text("line\n" * 1_000_000 + "last\n")
    tail.poll()
    tail.poll()
    newest = texts(tail, tail.log_seq - 1)
    assert newest == ["last"]
    (note,) = [line for line in texts(tail, 0, 10**6) if "bytes are not shown" in line]
    assert str(path) in note
    tail.close()


def test_a_planted_link_is_not_followed(tail: LogTail, tmp_path: Path) -> None:
    (tmp_path / "rank-0.stdout.log").symlink_to("/etc/passwd")
    tail.poll()
    assert tail.log_seq == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", ""),
        ("fine\nso far\n", ""),
        (TRACEBACK, "RuntimeError: Connection closed by peer"),
        (TRACEBACK + TRACEBACK.replace("Runtime", "Value"), "ValueError: Connection closed by peer"),
        ("Traceback (most recent call last):\n  File\n\nKeyboardInterrupt\nmore\n", "KeyboardInterrupt"),
        ("terminate called\n  what():  [enforce fail] sizes\n", "what():  [enforce fail] sizes"),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault"),
        ("Traceback (most recent call last):\n  cut", ""),
    ],
)
def test_the_last_exception_is_found(text: str, error: str) -> None:
    assert last_exception_line(text) == error


def test_the_error_is_looked_for_at_the_end_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.stderr.log"
    assert find_error(path) == ""
    path.write_text("noise\n" * 100_000 + TRACEBACK)
    assert find_error(path) == "RuntimeError: Connection closed by peer"
