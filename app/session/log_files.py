"""The lines of a job that its agents do not keep, read from the log files on its nodes.

An agent keeps the latest lines of those that it has read itself. What is older, or was printed by a job that had ended
before the agent began, is in the files alone: `LogFiles` reads them in bounded pieces. Files have no times, so their
lines come before all others: attempt after attempt, and rank after rank.

`lines_of` and `num_older` are pure.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.commands import RefusalReason
from agent.wire.logs import LAUNCHER_RANK, MAX_CHUNK_BYTES, LogChunk, LogLine, LogStream, ReadLog
from app.errors import AgentRefusedError, AppError
from app.session.log_pulls import is_gap
from app.text import attempt_text, bytes_text, clean_name, nodes_text, seconds_text

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from agent.wire.jobs import JobStatus
    from app.fleet.fleet import Fleet
    from app.session.log_pulls import DatedLine

MAX_NODE_BYTES = 64 * 2**20
"""Bytes that are read of one node's files, shared equally: a thousand requests, a minute on a slow link."""
MAX_BYTES = 256 * 2**20
"""The same of all nodes: this process holds their lines."""
MIN_FILE_BYTES = 4 * MAX_CHUNK_BYTES
MAX_LINE_CHARS = 4096
"""Characters of a line that an agent keeps. Source: `agent.wire.logs.LogLine`."""
MAX_ATTEMPTS = 16
"""Attempts whose files are looked for, the latest ones."""
MAX_COMPARED = 256
"""Lines by which it is found out where in a file an agent's lines begin."""
NOTES = ("bytes are not shown here", "(the file was cut from", "(this log can no longer be read")
"""Beginnings and parts of an agent's own lines about a file. Source: `agent.logs.log_file`."""


class FilesWish(NamedTuple):
    """What is wanted of the files.

    Attributes:
        takes: Whether the lines of a rank are wanted.
        pattern: Found in the lines that are wanted; None is in all.
        num_last: Number of lines of each file, the last ones; None is all.
        max_age_s: Age in seconds from which on no line is wanted; None is any.
    """

    takes: Callable[[int], bool]
    pattern: re.Pattern[str] | None = None
    num_last: int | None = None
    max_age_s: float | None = None


class _File(NamedTuple):
    """A file of a job on a node; files are read and printed in this order."""

    attempt: int
    is_launcher: bool
    rank: int
    place: int
    """Place of its stream."""
    node: str
    stream: LogStream
    size_bytes: int

    @property
    def source(self) -> tuple[int, str]:
        return self.rank, str(self.stream)


class LogFiles:
    """Reads the lines of one job that its agents do not keep.

    Attributes:
        failures: Why files could not be read, by node.
        cut_bytes: Bytes of each file that are read at most, where a file is larger; 0 where none is.
        attempts: Attempts of which lines have been found.
    """

    def __init__(self, fleet: Fleet, job_id: str, wish: FilesWish) -> None:
        self.failures: dict[str, AppError] = {}
        self.cut_bytes = 0
        self.attempts: list[int] = []
        self._unread: tuple[str, int, int] | None = None
        """A node, the last attempt that is not read there, and a rank: of an earlier start, or one too many."""
        self._num_bytes = 0
        self._fleet = fleet
        self._job_id = job_id
        self._wish = wish
        self._found: dict[_File, list[str]] = {}
        self._replaced: dict[str, LogLine] = {}
        """Lines in place of what agents have dropped, by node, where that has been read."""
        self._ended_s = math.inf
        """Seconds since a node's part of the job ended, where that is longer ago than lines are wanted of."""
        self._reaches_back_s: dict[str, float] = {}
        """Ages in seconds of the first lines that nodes keep, where older ones are wanted too."""

    async def read(self, jobs: Iterable[Mapping[str, JobStatus]], there: Iterable[DatedLine]) -> None:
        """Read from all nodes of the job at once.

        Args:
            jobs: Status of each job on each of its nodes.
            there: Lines that the agents keep, also of other jobs, and those in place of what they have dropped.
        """
        statuses = {node: status for job in jobs for node, status in job.items() if status.job_id == self._job_id}
        known: dict[str, list[LogLine]] = {node: [] for node in statuses}
        for _, node, line in there:
            if node in known and (line.job_id == self._job_id or is_gap(line)):
                known[node].append(line)
        wanted = [node for node, status in statuses.items() if self._needs_files(node, status, known[node])]
        node_bytes = min(MAX_NODE_BYTES, MAX_BYTES // max(1, len(wanted)))
        await asyncio.gather(*(self._read_node(node, statuses[node], known[node], node_bytes) for node in wanted))
        self.attempts = sorted({file.attempt for file in self._found})

    def beside(self, lines: Iterable[DatedLine]) -> list[DatedLine]:
        """Return lines that agents keep without those in place of what has been read."""
        return [(at_s, node, line) for at_s, node, line in lines if line != self._replaced.get(node)]

    def _needs_files(self, node: str, status: JobStatus, known: Sequence[LogLine]) -> bool:
        """Return whether an agent may not keep all lines of the job that are wanted.

        By age, files are of use only where the job had ended before the agent began, and not too long ago.
        """
        gap, max_age_s = next(filter(is_gap, known), None), self._wish.max_age_s
        if status.is_adopted:
            return False
        if max_age_s is None:
            return status.is_past or status.num_restarts > 0 or gap is not None
        if gap is not None and (gap.age_s or 0.0) < max_age_s:
            self._reaches_back_s[node] = gap.age_s or 0.0
        if status.is_past and status.state_s > max_age_s:
            self._ended_s = min(self._ended_s, status.state_s)
        return status.is_past and status.state_s <= max_age_s

    def dated(self, *, marks_attempts: bool) -> list[DatedLine]:
        """Return the lines that are wanted, as of before all others; with a line in front of each restart."""
        dated: list[DatedLine] = []
        before = 0
        for file, texts in sorted(self._found.items()):
            if marks_attempts and file.attempt > before:
                mark = LogLine(0, LAUNCHER_RANK, "stdout", f"--- {attempt_text(file.attempt)}", self._job_id)
                dated.append((-math.inf, file.node, mark))
            before = file.attempt
            lines = (LogLine(0, file.rank, str(file.stream), text, self._job_id) for text in texts)
            dated += [(-math.inf, file.node, line) for line in lines]
        return dated

    @property
    def wants_some(self) -> bool:
        """Whether any line is wanted of the files."""
        return self._wish.num_last != 0

    @property
    def progress_text(self) -> str:
        """How much has come so far."""
        return f"reading log files, {bytes_text(self._num_bytes)} so far"

    def notices(self) -> list[str]:
        """Return sentences about what has been read, and what could not be."""
        found = []
        if self._found:
            of_nodes = nodes_text(sorted({clean_name(file.node) for file in self._found}))
            num_last, max_age_s = self._wish.num_last, self._wish.max_age_s
            last = "" if num_last is None else f", the last {num_last} of each file"
            since = "" if max_age_s is None else "; --since leaves out none of them"
            how = f"rank after rank, since files have no times{last}{since}"
            found.append(f"lines that agents no longer keep come first, from the log files on {of_nodes}: {how}")
        if self.cut_bytes:
            rest = "on the host python -P -m agent logs reads the rest"
            found.append(f"of each file only the last {bytes_text(self.cut_bytes)} are read: {rest}")
        if self._unread is not None:
            node, attempt, rank = self._unread
            how = f"python -P -m agent logs --job {clean_name(self._job_id)} --attempt {attempt} --rank {rank}"
            before = f"no line from before {attempt_text(attempt + 1)} is read"
            found.append(f"{before}; files that are left are read in pieces, as by this on {clean_name(node)}: {how}")
        if self._ended_s < math.inf:
            found.append(
                f"job {clean_name(self._job_id)} ended {seconds_text(self._ended_s)} ago: no line of it is younger"
            )
        if self._reaches_back_s:
            keeps = f"{nodes_text(sorted(map(clean_name, self._reaches_back_s)))} kept only the lines of the last"
            since = seconds_text(min(self._reaches_back_s.values()))
            found.append(f"{keeps} {since}; older ones are in files, which have no times: leave out --since for them")
        failures = self.failures.items()
        return found + [
            f"log files on {clean_name(node)} are not read: {error.text_for(node)}" for node, error in failures
        ]

    async def _read_node(self, node: str, status: JobStatus, known: Sequence[LogLine], node_bytes: int) -> None:
        remembered = _by_file(known)
        try:
            files = await self._files(node, status, max(map(len, remembered.values()), default=1))
            wanted = list(_lacking(files, remembered, has_gap=any(map(is_gap, known))))
            max_bytes = max(MIN_FILE_BYTES, node_bytes // max(1, len(wanted)))
            are_found = [await self._read_file(file, kept, max_bytes) for file, kept in wanted]
            if known and is_gap(known[0]) and all(are_found):
                self._replaced[node] = known[0]
        except AppError as error:
            self.failures[node] = error

    async def _files(self, node: str, status: JobStatus, num_attempts: int) -> list[_File]:
        """Return the files of a job that hold something: of its latest start, and of the attempts whose lines came."""
        first = max(0, status.attempt - min(max(status.num_restarts, num_attempts - 1), MAX_ATTEMPTS - 1))
        if first and (self._unread is None or first > self._unread[1]):
            self._unread = node, first - 1, min(status.own_ranks, default=LAUNCHER_RANK)
        ranks = [*status.own_ranks, LAUNCHER_RANK]
        files = []
        for attempt in range(first, status.attempt + 1):
            for rank in filter(self._wish.takes, ranks):
                is_launcher = rank == LAUNCHER_RANK
                streams = (LogStream.STDERR,) if is_launcher else (LogStream.STDOUT, LogStream.STDERR)
                for place, stream in enumerate(streams):
                    chunk = await self._piece(node, ReadLog(self._job_id, rank, stream, 0, attempt, 4))
                    if chunk is not None and chunk.size_bytes:
                        files.append(_File(attempt, is_launcher, rank, place, node, stream, chunk.size_bytes))
        return files

    async def _read_file(self, file: _File, kept: Sequence[str] | None, max_bytes: int) -> bool:
        """Read a file up to the lines that its agent keeps of it; return whether these are found there."""
        if self._wish.num_last is not None and self._wish.pattern is None and kept is None:
            max_bytes = min(max_bytes, max(MAX_CHUNK_BYTES, self._wish.num_last * MAX_LINE_CHARS))
        elif file.size_bytes > max_bytes:
            self.cut_bytes = max(self.cut_bytes, max_bytes)
        start = offset = max(0, file.size_bytes - max_bytes)
        parts = []
        while offset < file.size_bytes:
            chunk = await self._piece(file.node, ReadLog(self._job_id, file.rank, file.stream, offset, file.attempt))
            if chunk is None or chunk.next_offset <= offset:
                break
            parts.append(chunk.text)
            self._num_bytes += chunk.next_offset - offset
            offset = chunk.next_offset
        text = "".join(parts)
        lines = lines_of(text.partition("\n")[2] if start else text)
        num = len(lines) if kept is None else num_older(lines, kept)
        pattern, num_last = self._wish.pattern, self._wish.num_last
        texts = [line for line in lines[: num or 0] if pattern is None or pattern.search(line)]
        if texts:
            self._found[file] = texts if num_last is None else texts[max(0, len(texts) - num_last) :]
        return num is not None

    async def _piece(self, node: str, request: ReadLog) -> LogChunk | None:
        """Return a piece of a file; None where the node has no such file."""
        try:
            reply = await self._fleet.ask(node, request)
        except AgentRefusedError as error:
            if error.reason == RefusalReason.NO_LOG:
                return None
            raise
        return reply if isinstance(reply, LogChunk) else None


def lines_of(text: str) -> list[str]:
    """Return a file's lines as its agent makes them: of a line that returns to its start only the last state is kept.

    Source: `agent.logs.line_splitter`.
    """
    pieces = text.split("\n")
    if not pieces[-1]:
        del pieces[-1]
    shown = (piece.lstrip("\0").rstrip("\r") for piece in pieces)
    return [piece[piece.rfind("\r") + 1 :][:MAX_LINE_CHARS] for piece in shown]


def num_older(lines: Sequence[str], kept: Sequence[str]) -> int | None:
    """Return how many lines of a file come before those that its agent keeps; None where these are not found in it.

    Args:
        lines: Lines of the file; some may have been written since.
        kept: Lines that its agent keeps, in order, with the agent's notes about what it has passed over.
    """
    notes = [place for place, text in enumerate(kept) if text.startswith("(") and any(note in text for note in NOTES)]
    head = list(kept[: notes[0]] if notes else kept)[:MAX_COMPARED]
    if not head:
        return None
    for place in range(len(lines) - len(kept) + len(notes), -1, -1):
        if lines[place] == head[0] and lines[place : place + len(head)] == head:
            return place
    return None


def _by_file(known: Iterable[LogLine]) -> dict[tuple[int, str], list[list[str]]]:
    """Return the texts of the lines of each file, by rank and stream: the files in the order of their attempts.

    Of a file of which an agent has dropped some lines while they were pulled, those before these.
    """
    found: defaultdict[tuple[int, str], dict[int, list[str]]] = defaultdict(dict)
    is_cut: set[tuple[tuple[int, str], int]] = set()
    for line in known:
        source = (line.rank, line.stream)
        if is_gap(line):
            is_cut = {(one, file) for one, files in found.items() for file in files}
        elif (source, line.file) not in is_cut:
            found[source].setdefault(line.file, []).append(line.text)
    return {source: list(texts.values()) for source, texts in found.items()}


def _lacking(
    files: Iterable[_File], remembered: Mapping[tuple[int, str], list[list[str]]], *, has_gap: bool
) -> Iterator[tuple[_File, Sequence[str] | None]]:
    """Yield the files of which lines are not kept, with those that are; None where none is.

    The lines that are kept are those of the latest files; of the first of these some may have been dropped.
    """
    by_source: defaultdict[tuple[int, str], list[_File]] = defaultdict(list)
    for file in files:
        by_source[file.source].append(file)
    for source, of_source in by_source.items():
        kept = remembered.get(source, [])
        num_unkept = len(of_source) - len(kept)
        yield from ((file, None) for file in of_source[: max(0, num_unkept)])
        if has_gap and kept and num_unkept >= 0:
            yield of_source[num_unkept], kept[0]
