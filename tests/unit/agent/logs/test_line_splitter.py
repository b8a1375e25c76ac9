from __future__ import annotations

import pytest

from agent.logs.line_splitter import MAX_HELD_BYTES, MAX_LINE_CHARS, LineSplitter


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"on", b"e\ntw", b"o"], ["one"]),
        ([b"dos\r\nunix\n"], ["dos", "unix"]),
        ([b"dos\r", b"\nunix\n"], ["dos", "unix"]),
        ([b"one\r\r\ntwo\r\r", b"\r\n"], ["one", "two"]),
        ([b"\r 1%", b"\r 50%\r100%\n"], ["100%"]),
        ([b"a\n 1%\r 50%\r", b"100%\nb\nc\n"], ["a", "100%", "b", "c"]),
        ([b"a\n 1%\r 50%\nb\r\nc\n"], ["a", " 50%", "b", "c"]),
        ([b"a\nb\r\nc\r", b"\nd\r\r\ne\n"], ["a", "b", "c", "d", "e"]),
        ([b"\n\n"], ["", ""]),
        ([b"\xff\xfe\n"], ["\ufffd\ufffd"]),
        ([b"caf\xc3", b"\xa9\n"], ["caf\u00e9"]),
        ([b"\xe2\x82\n\xe2\x82", b"\xac\nlast \xe2\n"], ["\ufffd", "\u20ac", "last \ufffd"]),
        ([b"a\x00b\x1b[2J\n"], ["a\x00b\x1b[2J"]),
    ],
)
def test_bytes_become_lines_however_they_are_cut(pieces: list[bytes], lines: list[str]) -> None:
    splitter = LineSplitter()
    assert [line for piece in pieces for line in splitter.feed(piece)] == lines


def test_a_huge_line_is_cut_and_does_not_fill_memory() -> None:
    splitter = LineSplitter()
    for _ in range(100):
        assert splitter.feed(b"x" * 100_000) == []
        assert len(splitter._held) == MAX_HELD_BYTES
    assert splitter.feed(b"\r") == []
    assert splitter.feed(b"\nnext\n") == ["x" * MAX_LINE_CHARS, "next"]


def test_huge_lines_within_one_read_are_cut_too() -> None:
    long = "\U0001f600" * (MAX_LINE_CHARS + 1)
    assert LineSplitter().feed(f"a\n{long}\nb\n".encode()) == ["a", "\U0001f600" * MAX_LINE_CHARS, "b"]


def test_a_bar_that_never_ends_takes_the_memory_of_its_last_state() -> None:
    splitter = LineSplitter()
    for percent in range(1000):
        assert splitter.feed(b"\r%d%%" % percent) == []
        assert len(splitter._held) <= 4
    assert not splitter.is_empty
    assert splitter.flush() == "999%"
    assert splitter.is_empty
