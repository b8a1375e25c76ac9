"""Looks into the files that a failed rank leaves for why it failed.

torchelastic's error file holds exactly the uncaught exception (the probe writes it, or the program's own `@record`),
and its time is when that was raised: better than when the process was found dead. Without one, the end of what the rank
wrote to standard error is read: for an exception, and where there is none for its last line.
"""

from __future__ import annotations

import os
import re
import time
from signal import SIGINT
from typing import TYPE_CHECKING

import msgspec

from agent.files import open_regular
from agent.logs.log_tail import log_path
from agent.logs.traceback_text import MAX_EXCEPTION_CHARS, FailureText, FoundFailure, cleaned, failure_in, last_line
from agent.wire.logs import INTERRUPTED, LAUNCHER_RANK, LogStream, exception_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

TAIL_BYTES = 131_072
"""Bytes of standard error: a traceback with a chain and a group is a few KiB, what other threads print comes on top."""
MAX_ERROR_FILE_BYTES = 1_048_576
_FAILED_RANK = re.compile(
    r"^ {2}rank +: (\d{1,6}) \(local_rank: \d{1,6}\)\n {2}exitcode +: (-?\d{1,3}) \(pid: \d+\)", re.MULTILINE
)
"""Lines of torchrun's report of a failure.

Source: `_FAILURE_FORMAT_TEMPLATE` of torch/distributed/elastic/multiprocessing/errors, torch 2.13."""


class _ExtraInfo(msgspec.Struct):
    """Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py."""

    py_callstack: str = ""


class _Message(msgspec.Struct):
    message: str = ""
    extra_info: _ExtraInfo = msgspec.field(name="extraInfo", default_factory=_ExtraInfo)


class _ErrorFile(msgspec.Struct):
    message: _Message | str = ""


def find_failure(job_dir: Path, rank: int, signal: int | None = None) -> FoundFailure | None:
    """Return the failure that a rank's files hold; None when they hold none. Blocks on the disk alone.

    `signal` is what ended the rank, None with an exit code; see `failure_in`.
    """
    in_error_file = _in_error_file(log_path(job_dir, rank, LogStream.ERROR), rank)
    return in_error_file or _in_output(log_path(job_dir, rank, LogStream.STDERR), rank, signal)


def last_failure(job_dir: Path, rank: int) -> FoundFailure | None:
    """Return the last line of a rank that ended with a code and left no exception; None when it wrote none."""
    text = _text_of(log_path(job_dir, rank, LogStream.STDERR))
    line = "" if text is None else last_line(text)
    return FoundFailure(FailureText(last_line=line), rank) if line else None


def first_failure(
    ranks_dir: Path, ranks: Iterable[int], job_dir: Path, codes: Mapping[int, int]
) -> FoundFailure | None:
    """Return the first failure in the files of some ranks, else in the launcher's; its own, if it got SIGINT.

    The launcher's are in `job_dir`. `codes` is what it reports; a rank that it does not list has not ended by itself.
    """
    ends = [(rank, codes.get(rank, -SIGINT)) for rank in ranks]
    found = [one for rank, code in ends if (one := find_failure(ranks_dir, rank, None if code > 0 else -code))]
    found.sort(key=lambda failure: float("inf") if failure.failed_s is None else failure.failed_s)
    own = [failure for failure in found if not failure.text.exception.startswith(INTERRUPTED)]
    in_launcher = None if own else _in_output(log_path(job_dir, LAUNCHER_RANK, LogStream.STDERR), LAUNCHER_RANK)
    return next(filter(None, [*own, in_launcher, *found]), None)


def reported_exit_codes(job_dir: Path) -> dict[int, int]:
    """Return the exit codes of the ranks that the launcher lists as failed, the first one's first.

    That of a signal is negative.
    """
    text = _text_of(log_path(job_dir, LAUNCHER_RANK, LogStream.STDERR)) or ""
    # It tells of the first one last.
    return {int(rank): int(code) for rank, code in reversed(_FAILED_RANK.findall(text))}


def _in_error_file(path: Path, rank: int) -> FoundFailure | None:
    content = _end_of(path, MAX_ERROR_FILE_BYTES)
    if content is None or content.is_cut:
        return None
    try:
        message = msgspec.json.decode(content.data, type=_ErrorFile).message
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # cut short by a full disk, or another program's
    if isinstance(message, str):
        message = _Message(message)
    text = failure_in(message.extra_info.py_callstack)
    if text is None:
        text = FailureText(exception=cleaned(exception_line(message.message))[:MAX_EXCEPTION_CHARS])
    return FoundFailure(text, rank, time.monotonic() - content.age_s)


def _in_output(path: Path, rank: int, signal: int | None = None) -> FoundFailure | None:
    text = _text_of(path)
    failure = None if text is None else failure_in(text, signal)
    return FoundFailure(failure, rank) if failure else None


def _text_of(path: Path) -> str | None:
    """Return the last lines of an output; None when it cannot be read."""
    content = _end_of(path, TAIL_BYTES)
    if content is None:
        return None
    # What is cut at its beginning is no line.
    start = content.data.find(b"\n") + 1 if content.is_cut else 0
    return content.data[start:].decode(errors="replace")


class _Content(msgspec.Struct):
    """The end of a file."""

    data: bytes
    is_cut: bool
    """Whether there is more before it."""
    age_s: float
    """Seconds since the file was written to."""


def _end_of(path: Path, max_bytes: int) -> _Content | None:
    try:
        fd = open_regular(path)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        start = max(0, status.st_size - max_bytes)
        age_s = time.time() - status.st_mtime  # noqa: TID251 - a file's time is wall time
        return _Content(os.pread(fd, max_bytes, start), start > 0, max(0.0, age_s))
    except OSError:
        return None
    finally:
        os.close(fd)
