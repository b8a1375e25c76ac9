"""Whatever ranks print, and however it is cut into reads: the same lines, none invented, none lost."""

from __future__ import annotations

import tempfile
from pathlib import Path

import hypothesis.strategies as st
import msgspec
from hypothesis import example, given, settings

from agent.logs import log_tail
from agent.logs.line_splitter import MAX_LINE_CHARS, LineSplitter
from agent.logs.log_file import LogFile
from agent.logs.log_tail import read_log
from agent.logs.traceback_text import failure_in
from agent.wire.logs import LogChunk, LogStream, ReadLog
from agent.wire.reports import ExitReport
from ddpcore.wire import Place

PIECES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=50).map(str.encode),
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\xe2\x82", b"\xac", b"\x00", b"x" * 5000]),
    ),
    max_size=20,
)


def plainly(data: bytes) -> list[str]:
    """Return the lines by the rule, in the plainest way, and the unfinished one."""
    lines = []
    for raw in data.split(b"\n"):
        shown = raw.rstrip(b"\r")
        lines.append(shown[shown.rfind(b"\r") + 1 :].decode(errors="replace")[:MAX_LINE_CHARS])
    return lines


@given(PIECES)
def test_the_cuts_between_reads_do_not_matter(pieces: list[bytes]) -> None:
    splitter = LineSplitter()
    lines = [line for piece in pieces for line in splitter.feed(piece)]
    assert [*lines, splitter.flush()] == plainly(b"".join(pieces))


@settings(max_examples=60)
@given(PIECES, st.integers(1, 5000), st.integers(1, 7))
def test_a_file_that_grows_is_followed_whatever_the_bounds_of_a_read(
    pieces: list[bytes], max_bytes: int, max_lines: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "rank-0.stdout.log")
        followed = LogFile(path, 0, "stdout")
        lines = []
        for piece in pieces:
            with path.open("ab") as file:
                file.write(piece)
            if followed.look():
                lines += followed.read(max_bytes, max_lines)
        while followed.look():
            lines += followed.read(max_bytes, max_lines)
        lines += followed.finish()
        expected = plainly(b"".join(pieces))
        assert lines == (expected if b"".join(pieces).rpartition(b"\n")[2] else expected[:-1])
        assert followed.dropped_bytes == 0


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(1, 64), st.integers(0, 400))
def test_what_is_skipped_is_counted_to_the_byte(pieces: list[bytes], max_bytes: int, max_backlog: int) -> None:
    with tempfile.TemporaryDirectory() as directory, PatchedBacklog(max_backlog):
        path = Path(directory, "rank-0.stdout.log")
        followed = LogFile(path, 0, "stdout")
        data = b"".join(pieces).replace(b"\r", b"") + b"\n"
        written, lines = 0, []
        for piece in [*pieces, b""]:
            written = min(len(data), written + len(piece)) if piece else len(data)
            path.write_bytes(data[:written])
            if followed.look():
                lines += followed.read(max_bytes, 3)
        while followed.look():
            lines += followed.read(max_bytes, 3)
        lines += followed.finish()
        told = [line for line in lines if "bytes are not shown here" in line]
        kept = [line for line in lines if line not in told]
        everything = plainly(data)[:-1]
        assert is_in_order(kept, everything)
        assert followed.dropped_bytes == sum(int(line[1:].split()[0]) for line in told)
        num_kept_bytes = len(data) - followed.dropped_bytes
        assert sum(len(line.encode()) + 1 for line in kept) >= num_kept_bytes


class PatchedBacklog:
    """Skips early, so that small files tell of it."""

    def __init__(self, max_backlog: int) -> None:
        self._max_backlog = max_backlog

    def __enter__(self) -> None:
        from agent.logs import log_file  # noqa: PLC0415 - the module is what is changed

        self._module, self._before = log_file, log_file.MAX_BACKLOG_BYTES
        log_file.MAX_BACKLOG_BYTES = self._max_backlog

    def __exit__(self, *_: object) -> None:
        self._module.MAX_BACKLOG_BYTES = self._before


def is_in_order(some: list[str], everything: list[str]) -> bool:
    rest = iter(everything)
    return all(line in rest for line in some)


@settings(max_examples=60)
@given(PIECES, st.integers(1, 500))
def test_the_pieces_of_a_file_are_the_file(pieces: list[bytes], max_bytes: int) -> None:
    data = b"".join(pieces)
    with tempfile.TemporaryDirectory() as directory:
        path = log_tail.log_path(Path(directory, "0"), 3, LogStream.STDOUT)
        path.parent.mkdir()
        path.write_bytes(data)
        text, offset = "", 0
        while True:
            reply = read_log(Path(directory), ReadLog("j", 3, LogStream.STDOUT, offset, max_bytes=max(4, max_bytes)))
            assert isinstance(reply, LogChunk)
            assert reply.size_bytes == len(data)
            text += reply.text
            if reply.next_offset == offset:
                break
            offset = reply.next_offset
        assert offset == len(data)
        assert text == data.decode(errors="replace")


@given(
    st.lists(
        st.sampled_from(
            [
                "Traceback (most recent call last):",
                '  File "a.py", line 3, in f',
                "ValueError: x",
                "  | y",
                "  + Exception Group Traceback (most recent call last):",
                "  +-+---------------- 1 ----------------",
                '"""',
                "During handling of the above exception, another exception occurred:",
                "Fatal Python error: Aborted",
                "",
                "  what():  z",
                "Original Traceback (most recent call last):",
                "Exception ignored in: f",
                '  File "b.py", line 4',
                "[rank1]: Traceback (most recent call last):",
                "[rank1]: KeyError: 3",
                "    | TypeError: 2",
                "RuntimeError:",
                "Current thread 0x00007f (most recent call first):",
                "Thread 0x00007e (most recent call first):",
                '  File "/lib/torch/distributed/c10d.py", line 3 in all_reduce',
                '  File "/home/me/a.py", line 99999999999 in f',
                '  File "threading.py", line 4 in _bootstrap',
                "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
                "  | ExceptionGroup: eg (2 sub-exceptions)",
            ]
        )
        | st.text(max_size=30),
        max_size=30,
    ),
    st.sampled_from([None, 6, 9, 11]),
)
@example(["Traceback (most recent call last):", "RuntimeError:", "0\t0"], None)
@example(
    ["Fatal Python error: Aborted", "Thread 0x0 (most recent call first):", f'  File "{"a" * 5000}", line 4 in f'], 6
)
@example(
    ["Fatal Python error: Aborted", "Thread 0x0 (most recent call first):", f'  File "a", line 4 in {"f" * 999}'], 6
)
def test_any_text_is_read_without_harm(lines: list[str], signal: int | None) -> None:
    found = failure_in("\n".join(lines), signal)
    if found is not None:
        assert found.exception
        assert all(ord(character) >= 32 for character in found.exception + found.where)
        assert found.place is None or signal in (6, 11)
        end = ExitReport(place=found.place)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(end), type=ExitReport) == end


@given(
    st.lists(st.lists(st.integers(1, 10**9 - 1), max_size=5), min_size=1, max_size=6),
    st.integers(0, 5),
    st.sampled_from(["", "terminate called after throwing an instance of 'c10::DistBackendError'"]),
)
def test_of_the_threads_of_an_abort_the_current_one_counts_else_the_main_one(
    threads: list[list[int]], current: int, thrown: str
) -> None:
    lines = [thrown, "Fatal Python error: Aborted"]
    for index, numbers in enumerate(threads):
        lines += ["", f"{'Current thread' if index == current else 'Thread'} 0x{index:x} (most recent call first):"]
        lines += [f'  File "/home/me/train.py", line {number} in f' for number in numbers]
    found = failure_in("\n".join(lines), signal=6)
    assert found is not None
    counts = threads[current] if current < len(threads) else threads[-1]
    assert found.place == (Place("/home/me/train.py", counts[0], "f") if counts else None)
