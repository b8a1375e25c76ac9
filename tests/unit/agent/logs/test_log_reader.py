from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent.logs.log_tail import read_log
from agent.wire.codec import MalformedMessageError
from agent.wire.commands import RefusalReason, Refused, decode_command, encode_command, encode_reply
from agent.wire.logs import LogChunk, LogStream, ReadLog

if TYPE_CHECKING:
    from pathlib import Path


def write(job_root: Path, attempt: int, name: str, data: bytes) -> Path:
    path = job_root / str(attempt) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def piece(job_root: Path, command: ReadLog) -> tuple[int, int, int, str]:
    reply = read_log(job_root, command)
    assert isinstance(reply, LogChunk)
    return (reply.offset, reply.next_offset, reply.size_bytes, reply.text)


def test_a_piece_of_a_file_says_where_the_next_one_begins(tmp_path: Path) -> None:
    write(tmp_path, 0, "rank-3.stdout.log", b"one\ntwo\n")
    command = ReadLog("train", 3, LogStream.STDOUT, max_bytes=4)
    assert piece(tmp_path, command) == (0, 4, 8, "one\n")
    assert piece(tmp_path, ReadLog("train", 3, LogStream.STDOUT, 4)) == (4, 8, 8, "two\n")
    assert piece(tmp_path, ReadLog("train", 3, LogStream.STDOUT, 8)) == (8, 8, 8, "")
    assert piece(tmp_path, ReadLog("train", 3, LogStream.STDOUT, 10**15)) == (8, 8, 8, "")


def test_a_negative_offset_counts_from_the_end(tmp_path: Path) -> None:
    write(tmp_path, 0, "rank-3.stderr.log", b"one\ntwo\n")
    assert piece(tmp_path, ReadLog("train", 3, offset=-4)) == (4, 8, 8, "two\n")
    assert piece(tmp_path, ReadLog("train", 3, offset=-400)) == (0, 8, 8, "one\ntwo\n")


def test_a_character_is_not_cut_in_two(tmp_path: Path) -> None:
    write(tmp_path, 0, "rank-0.stdout.log", "a\u20acb".encode())
    assert piece(tmp_path, ReadLog("train", 0, LogStream.STDOUT, 0, max_bytes=3)) == (0, 1, 5, "a")
    assert piece(tmp_path, ReadLog("train", 0, LogStream.STDOUT, 1, max_bytes=3)) == (1, 4, 5, "\u20ac")
    assert piece(tmp_path, ReadLog("train", 0, LogStream.STDOUT, 1, max_bytes=2)) == (1, 3, 5, "\ufffd")


def test_the_newest_attempt_is_read_unless_another_is_named(tmp_path: Path) -> None:
    for attempt in (0, 9, 10):
        write(tmp_path, attempt, "launcher.log", b"attempt %d" % attempt)
    (tmp_path / "job.json").write_text("{}")
    assert piece(tmp_path, ReadLog("train", -1))[3] == "attempt 10"
    assert piece(tmp_path, ReadLog("train", -1, attempt=9))[3] == "attempt 9"


def test_the_error_file_is_read_by_its_own_name(tmp_path: Path) -> None:
    write(tmp_path, 0, "rank-0.error.json", b"{}")
    assert piece(tmp_path, ReadLog("train", 0, LogStream.ERROR))[3] == "{}"


def test_a_reply_fits_whatever_is_in_the_file(tmp_path: Path) -> None:
    for data in (b"\x00" * 200_000, b"\xff" * 200_000, b'"' * 200_000, "\U0001f600".encode() * 50_000):
        write(tmp_path, 0, "rank-0.stderr.log", data)
        reply = read_log(tmp_path, ReadLog("train", 0))
        assert isinstance(reply, LogChunk)
        assert len(encode_reply(reply)) < 2**20
        assert reply.next_offset >= 65_536 - 3


@pytest.mark.parametrize("kind", ["nothing", "link", "directory"])
def test_what_is_no_log_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, 0, "rank-0.stderr.log", b"x")
    path.unlink()
    match kind:
        case "link":
            path.symlink_to("/etc/passwd")
        case "directory":
            path.mkdir()
    reply = read_log(tmp_path, ReadLog("train", 0))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusalReason.NO_LOG
    assert "rank-0.stderr.log" in reply.message
    assert isinstance(read_log(tmp_path / "no-such-job", ReadLog("train", 0)), Refused)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"read-log","job_id":"../../etc","rank":0}',
        b'{"type":"read-log","job_id":"train","rank":"../passwd"}',
        b'{"type":"read-log","job_id":"train","rank":-2}',
        b'{"type":"read-log","job_id":"train","rank":0,"stream":"../../x"}',
        b'{"type":"read-log","job_id":"train","rank":0,"attempt":-1}',
        b'{"type":"read-log","job_id":"train","rank":0,"max_bytes":65537}',
        b'{"type":"read-log","job_id":"train","rank":0,"offset":1e300}',
        b'{"type":"read-log","job_id":"train","rank":0,"path":"/etc/passwd"}',
    ],
)
def test_no_path_comes_from_a_peer(line: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode_command(line)


def test_the_command_survives_the_wire() -> None:
    command = ReadLog("train", -1, LogStream.STDERR, -100, 3, 4096)
    assert decode_command(encode_command(command)) == command
