"""Follows what ranks print, line by line, with the latest lines kept in memory.

The files are the truth and lose nothing. In memory (`LogTail`) there is a ring, bounded in lines and in characters,
from which a console pulls what is new to it. One look at all files is bounded too, in bytes and in lines, so that the
agent's loop never waits for what ranks print; what comes faster is skipped, counted and reported, and can be read from
the files.

`read_log` reads pieces of log files for consoles: what the ring of lines has lost, or what was never made into lines.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.files import open_regular
from agent.logs.line_metrics import LineMetrics
from agent.logs.log_file import LogFile
from agent.processes.shim_process import LAUNCHER_LOG
from agent.wire.codec import LOSS_METRIC
from agent.wire.commands import RefusalReason, Refused
from agent.wire.logs import LAUNCHER_RANK, LogChunk, LogLine, LogLoss, LogStream, ReadLog

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MAX_KEPT_LINES = 20_000
MAX_KEPT_CHARS = 8_000_000
MAX_PULLED_CHARS = 34_000
"""Characters in one reply, with `LINE_CHARS` a line, each at most 6 bytes of JSON; a report may wait for them."""
LINE_CHARS = 32
"""Characters counted for all of a line but its text: at most 192 bytes of JSON."""
POLL_BYTES = 524_288
POLL_LINES = 4_000
"""Lines of all files in one look, five a second: twice what a console pulls. `tests/bench/bench_logs.py`."""


METRICS_BUDGET_S = 0.02
"""Seconds of one look for finding figures in new lines; a look that takes longer passes over the rest of them."""


def log_path(job_dir: Path, rank: int, stream: LogStream) -> Path:
    """Return where a rank's output goes; the launcher has one file for all."""
    if rank == LAUNCHER_RANK:
        return job_dir / LAUNCHER_LOG
    return job_dir / (f"rank-{rank}.error.json" if stream is LogStream.ERROR else f"rank-{rank}.{stream}.log")


class Printed(NamedTuple):
    """What a rank has printed: the figures found in it, and whole lines."""

    metrics: dict[str, float]
    num_lines: int
    loss_step: float | None = None
    """Step in the line of the loss, by the patterns."""
    line_step: float | None = None
    """What looks like a step in that line."""


class LogTail:
    """The log lines of a node: numbered from 1 over all jobs and ranks, the latest kept."""

    def __init__(self) -> None:
        self._files: dict[str, list[LogFile]] = {}
        """Files of each job's latest attempt."""
        self._ending: list[LogFile] = []
        """Files that nobody writes any more, and that are not read to their ends yet."""
        self._printers: dict[LogFile, tuple[str, LineMetrics]] = {}
        """Whose output a file is, and what is looked for in it; not the launchers'."""
        self._printed: dict[tuple[str, int], Printed] = {}
        self._metrics_until_s = 0.0
        self._lines: deque[LogLine] = deque()
        self._read_at_s: deque[float] = deque()
        """When each kept line was read; what an earlier agent followed counts as read when this one came to it."""
        self._num_chars = 0
        self.log_seq = 0
        """Number of the latest line."""

    @property
    def first_seq(self) -> int:
        """Number of the oldest line kept; one more than `log_seq` when there is none."""
        return self.log_seq - len(self._lines) + 1

    @property
    def losses(self) -> list[LogLoss]:
        """What was skipped of the files of the jobs that are known."""
        return [
            LogLoss(job_id, file.rank, file.stream, file.dropped_bytes)
            for job_id, files in self._files.items()
            for file in files
            if file.dropped_bytes
        ]

    def follow(
        self, job_id: str, launcher_dir: Path, ranks_dir: Path, ranks: range, metrics: Sequence[str] = ()
    ) -> None:
        """Start to follow the files of a job's attempt; they need not exist yet.

        A launcher that starts its ranks once more goes on with its own file.

        Raises:
            MetricPatternError: One of `metrics`, patterns for figures in lines, is of no use.
        """
        line_metrics = LineMetrics(metrics)
        self._forget_printers(job_id)
        before = {file.path: file for file in self._files.pop(job_id, ())}
        sources = [(launcher_dir, LAUNCHER_RANK, LogStream.STDERR)]
        sources += [(ranks_dir, rank, stream) for rank in ranks for stream in (LogStream.STDOUT, LogStream.STDERR)]
        files = [
            LogFile(log_path(directory, rank, stream), rank, stream, job_id) for directory, rank, stream in sources
        ]
        self._files[job_id] = [before.pop(file.path, file) for file in files]
        self._printers |= {file: (job_id, line_metrics) for file in self._files[job_id] if file.rank != LAUNCHER_RANK}
        self._let_go(before.values())

    def poll(self) -> None:
        """Read what has been written: a bounded piece, shared fairly among the files."""
        self._metrics_until_s = time.monotonic() + METRICS_BUDGET_S
        self._finish_quiet()
        files = dict.fromkeys(itertools.chain(self._ending, *self._files.values()))
        pending = [(num_bytes, file) for file in files if (num_bytes := file.look())]
        # Those with little first: what they leave of their share is the others'.
        pending.sort(key=lambda item: item[0])
        bytes_left, lines_left = POLL_BYTES, POLL_LINES
        for num_before, (num_bytes, file) in enumerate(pending):
            num_files = len(pending) - num_before
            before = self.log_seq
            file_bytes = max(1, bytes_left // num_files)
            self._append(file, file.read(file_bytes, max(1, lines_left // num_files)))
            bytes_left -= min(file_bytes, num_bytes)
            lines_left -= self.log_seq - before

    def take_printed(self) -> dict[tuple[str, int], Printed]:
        """Return who has printed something since the last time, by job and rank."""
        printed, self._printed = self._printed, {}
        return printed

    def unfollow(self, job_id: str) -> None:
        """Read the rest of an ended job's files and let go of them; what is too much for now comes with later polls."""
        self._let_go(self._files.get(job_id, ()))

    def forget(self, job_id: str) -> None:
        """Let go of a job; its lines stay."""
        self.unfollow(job_id)
        self._forget_printers(job_id)
        self._files.pop(job_id, None)

    def close(self) -> None:
        """Let go of all files."""
        for file in itertools.chain(self._ending, *self._files.values()):
            file.close()
        self._files.clear()
        self._ending.clear()

    def since(self, seq: int, limit: int) -> list[LogLine]:
        """Return the oldest kept lines after `seq`: at most `limit`, and at most `MAX_PULLED_CHARS` characters."""
        num_newer = min(self.log_seq - seq, len(self._lines))
        if num_newer <= 0:
            return []
        newer = list(itertools.islice(zip(reversed(self._lines), reversed(self._read_at_s), strict=True), num_newer))
        budget, now_s = MAX_PULLED_CHARS, time.monotonic()
        taken = []
        for line, at_s in itertools.islice(reversed(newer), limit):
            budget -= len(line.text) + LINE_CHARS
            if budget < 0:
                break
            taken.append(msgspec.structs.replace(line, age_s=round(now_s - at_s, 1)))
        return taken

    def _let_go(self, files: Iterable[LogFile]) -> None:
        self._ending += [file for file in files if not file.is_finished]
        self.poll()
        self._finish_quiet()

    def _finish_quiet(self) -> None:
        """Give up the ending files that have been read to their ends."""
        # Looked at twice, since a file that was replaced is left only after a second look.
        quiet = [file for file in self._ending if not file.look() and not file.look()]
        for file in quiet:
            self._append(file, file.finish())
        self._ending = [file for file in self._ending if not file.is_finished]

    def _forget_printers(self, job_id: str) -> None:
        self._printers = {file: printer for file, printer in self._printers.items() if printer[0] != job_id}

    def _note_output(self, file: LogFile, lines: list[str]) -> None:
        """Remember that a rank has printed, and what figures are in it."""
        printer = self._printers.get(file)
        if printer is None or not (lines or file.unfinished):
            return
        job_id, line_metrics = printer
        found = line_metrics.read(lines, file.unfinished, lambda: time.monotonic() >= self._metrics_until_s)
        printed = self._printed.get((job_id, file.rank)) or Printed({}, 0)
        num_lines, of_loss = printed.num_lines + len(lines), printed[2:]
        if LOSS_METRIC in found:
            of_loss = line_metrics.loss_step, line_metrics.line_step
        self._printed[job_id, file.rank] = Printed(printed.metrics | found, num_lines, *of_loss)

    def _append(self, file: LogFile, lines: list[str]) -> None:
        self._note_output(file, lines)
        self._read_at_s.extend([time.monotonic()] * len(lines))
        for text in lines:
            self.log_seq += 1
            self._lines.append(LogLine(self.log_seq, file.rank, file.stream, text, file.job_id, file=file.checksum))
            self._num_chars += len(text)
        while len(self._lines) > MAX_KEPT_LINES or self._num_chars > MAX_KEPT_CHARS:
            self._num_chars -= len(self._lines.popleft().text)
            self._read_at_s.popleft()


_ATTEMPT = re.compile(r"\d{1,9}")


def read_log(job_root: Path, command: ReadLog) -> LogChunk | Refused:
    """Return a piece of a log file; blocks on the disk alone.

    No part of a path comes from the peer but the job's id, whose characters `ReadLog` restricts, and numbers.

    Args:
        job_root: The job's own directory, with one of each attempt.
        command: What is wanted.
    """
    attempt = _latest_attempt(job_root) if command.attempt is None else command.attempt
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


def _latest_attempt(job_root: Path) -> int:
    try:
        return max((int(name) for name in os.listdir(job_root) if _ATTEMPT.fullmatch(name)), default=0)  # noqa: PTH208
    except OSError:
        return 0
