"""Reads pieces of log files for consoles: what the ring of lines has lost, or what was never made into lines."""

from __future__ import annotations

import codecs
import os
import re
from typing import TYPE_CHECKING

from agent.logs.log_tail import log_path
from agent.regular_file import open_regular
from agent.wire.logs import LogChunk, ReadLog
from agent.wire.replies import RefusalReason, Refused

if TYPE_CHECKING:
    from pathlib import Path

_ATTEMPT = re.compile(r"\d{1,9}")


def read_log(job_root: Path, command: ReadLog) -> LogChunk | Refused:
    """Return a piece of a log file; blocks on the disk alone.

    No part of a path comes from the peer but the job's id, whose characters `ReadLog` restricts, and numbers.

    Args:
        job_root: The job's own directory, with one of each attempt.
        command: What is wanted.
    """
    attempt = _newest_attempt(job_root) if command.attempt is None else command.attempt
    path = log_path(job_root / str(attempt), command.rank, command.stream)
    try:
        fd = open_regular(path)
    except OSError as error:
        return Refused(
            RefusalReason.NO_LOG, f"no log of job {command.job_id}, attempt {attempt}: {path.name}: {error.strerror}"
        )
    try:
        return _chunk(fd, os.fstat(fd).st_size, attempt, command)
    except OSError as error:
        return Refused(RefusalReason.NO_LOG, f"{path.name} of job {command.job_id} cannot be read: {error.strerror}")
    finally:
        os.close(fd)


def _chunk(fd: int, size_bytes: int, attempt: int, command: ReadLog) -> LogChunk:
    wanted = command.offset if command.offset >= 0 else max(0, size_bytes + command.offset)
    data = os.pread(fd, command.max_bytes, min(wanted, size_bytes))
    offset = min(wanted, size_bytes)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(data)
    num_held = len(decoder.getstate()[0])
    if num_held == len(data):
        # A character that is never completed: it must not be asked for again and again.
        text, num_held = data.decode(errors="replace"), 0
    return LogChunk(
        attempt=attempt, offset=offset, next_offset=offset + len(data) - num_held, size_bytes=size_bytes, text=text
    )


def _newest_attempt(job_root: Path) -> int:
    try:
        return max((int(name) for name in os.listdir(job_root) if _ATTEMPT.fullmatch(name)), default=0)  # noqa: PTH208
    except OSError:
        return 0
