"""What a node reports of its ranks' output: lines as they come, pieces of files, and why a job failed."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.codec import JobId
from ddpcore.wire import Count, Name, Seconds, Word

MAX_PULLED_LINES = 2_000
MAX_CHUNK_BYTES = 65_536
"""Bytes of a log file in one reply: a byte takes at most 6 bytes of JSON."""
MAX_TRACEBACK_BYTES = 16_384
"""Bytes of UTF-8: it is in every report, and a node may report 16 failed jobs."""

MAX_MESSAGE_CHARS = 4096
"""Characters of an exception's message in which its reason is looked for."""

LAUNCHER_RANK = -1

INTERRUPTED = "KeyboardInterrupt"
"""Exception of a rank that SIGINT has ended, as by Ctrl-C."""
LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was|lost)|broken pipe|socket (closed|timeout)|(closed|reset) by peer"
    r"|timed out (waiting|after \S+ seconds waiting|in (blocking wait|monitoredbarrier))|application timeout caused"
    r"|connectfullmesh|(wait|barrier) timeout( after)?|client socket has timed out|socket \S+ timed out"
    r"|before timing out|(failed to pass|reached) monitoredbarrier|remote (process|peer|worker)"
    r"|peers? (exited|failed|crash)|communicator (was )?abort|taking the entire process down"
    r"|watchdog(?! thread \w+ \w+ exception: CUDA error: (an illegal|misaligned|device-side))"
    r"|ncclremoteerror|diststoreerror|distnetworkerror(?!: the server socket has failed)"
    r"|\b(masterfailed|masterunreachable|rankfailed|ranksmissing|storelost|barriertimeout|barrierdeadlock)error\b",
    re.IGNORECASE,
)
"""Texts of gloo, NCCL, the store and ddpcore in a rank that has lost another, or fails because of it.

NCCL's watchdog also reports what the rank's own kernels did wrong.
"""

_OF_RANK = re.compile(r"ddpcore\.errors\.\w+: rank (\d+): ")
"""An error that all ranks raise since that one has it. Source: `ddpcore.agreement.common_problem`."""
_OF_OTHERS = re.compile(r"; ranks? [\d,\- and]+: ")
"""A problem of others behind it."""

_NCCL_ERROR = re.compile(
    r"(?P<type>[\w.:]+: )NCCL error(?: in)?: (?:\S+:\d+, )?"
    r"(?P<what>.+?)(?: \(run with .*?\)| - please .*?)?, NCCL version .*"
    r"(?:\n(?!nccl|Unknown NCCL)(?P<reason>.+)|\n.*\nLast error:\n(?P<last>.+))?"
)
"""A failed call of NCCL: what its code means, then why torch has given up, or NCCL's last error, which may be empty.

Source: torch 2.13, NCCLUtils.hpp and getNcclErrorDetailStr in NCCLUtils.cpp; ncclGetErrorString in NCCL's init.cc.
"""
_OUT_OF_MEMORY = re.compile(
    r"\b(?P<whose>\w+ out of memory)\. Tried to allocate (?P<wanted>[\d.]+ \w+)"
    r"(?:\. GPU (?P<gpu>\d+) has a total capac\w+ of (?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free"
    r"(?:.*? (?P<allowed>[\d.]+ \w+) allowed;)?)?"
)
"""Source: torch 2.1 to 2.13, c10/cuda/CUDACachingAllocator.cpp; torch 2.1 writes "capacty"."""


def rank_with_problem(exception: str) -> int | None:
    """Return the rank whose problem all ranks raise by this exception; None where it names none, or several."""
    found = None if _OF_OTHERS.search(exception) else _OF_RANK.match(exception)
    return int(found[1]) if found else None


def exception_line(text: str) -> str:
    """Return an exception in one line: the first of its message, but of NCCL and of GPU memory what matters."""
    if nccl := _NCCL_ERROR.match(text[:MAX_MESSAGE_CHARS]):
        why = nccl["last"] or nccl["reason"]
        return f"{nccl['type']}NCCL {nccl['what']}" + (f": {why.strip()}" if why else "")
    line = next(iter(text.splitlines()), "")
    memory = _OUT_OF_MEMORY.search(line[:MAX_MESSAGE_CHARS])
    if memory is None:
        return line
    if memory["gpu"] is None:
        return line[: memory.end()]
    allowed = f", {memory['allowed']} allowed" if memory["allowed"] else ""
    free = f"{memory['free']} of {memory['total']} free on GPU {memory['gpu']}{allowed}"
    return f"{line[: memory.start()]}{memory['whose']}: {memory['wanted']} wanted, {free}"


LineText = Annotated[str, msgspec.Meta(max_length=4096)]
ErrorText = Annotated[str, msgspec.Meta(max_length=1024)]


class LogStream(StrEnum):
    """File of a rank."""

    STDOUT = "stdout"
    STDERR = "stderr"
    """Standard error; also that of the launcher, which has one file."""
    ERROR = "error"
    """torchelastic's record of an uncaught exception: JSON, with the whole traceback."""


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line that a rank (or the launcher) printed."""

    seq: Count
    """Number over all lines of this node, from 1."""
    rank: int
    """Global rank; -1 is the launcher."""
    stream: Word
    """`stdout` or `stderr`."""
    text: LineText
    """The line without its end; undecodable bytes as U+FFFD; longer lines are cut."""
    job_id: Name = ""
    """Job of the line; empty for a line about the node, and from earlier agents and recordings."""
    age_s: Seconds | None = None
    """Seconds from when the agent read the line to the reply; None from agents and recordings that do not report it."""
    file: Count = 0
    """Checksum of its file's path: each attempt has files of its own. 0 from earlier agents and recordings."""


class LogLoss(msgspec.Struct, frozen=True):
    """Part of one file that was not made into lines, which came faster than they are read. The file has it."""

    job_id: Name
    rank: int
    stream: Word
    dropped_bytes: Count


class RootCause(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cause of a job's failure, as far as this node knows: the rank that failed first, and why."""

    rank: int
    """Global rank; -1 is the launcher."""
    end: ErrorText = ""
    """End of its process: `exited with code 1`, `was killed by SIGKILL`."""
    exception: ErrorText = ""
    """Exception that everything else followed from: the first of a chain, the first of a group. May be empty."""
    outer: ErrorText = ""
    """Exception that ended the rank, where it was another one."""
    where: ErrorText = ""
    """`file.py:line in function`: the innermost frame of the program's own files."""
    traceback: Annotated[str, msgspec.Meta(max_length=MAX_TRACEBACK_BYTES)] = ""
    """Traceback, whole or head and tail; only control characters are removed."""
    is_consequence: bool = False
    """True if it has lost another rank, or was stopped: the cause is elsewhere."""
    age_s: Seconds = 0.0
    """Seconds since it failed."""


class PullLogs(msgspec.Struct, frozen=True, tag="logs", forbid_unknown_fields=True):
    """Request log lines after `since_seq`, oldest first, at most `MAX_PULLED_LINES`."""

    since_seq: Count = 0


class ReadLog(msgspec.Struct, frozen=True, tag="read-log", forbid_unknown_fields=True, omit_defaults=True):
    """Ask for a piece of a log file, for what is too old to be pulled, or was never made into lines."""

    job_id: JobId
    rank: Annotated[int, msgspec.Meta(ge=LAUNCHER_RANK, le=2**31)]
    """-1 is the launcher."""
    stream: LogStream = LogStream.STDERR
    offset: Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)] = 0
    """Offset in bytes; a negative one counts from the end."""
    attempt: Count | None = None
    """None is the latest attempt."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHUNK_BYTES)] = MAX_CHUNK_BYTES


class Logs(msgspec.Struct, frozen=True, tag="logs"):
    """Log lines in order."""

    epoch: Word
    first_seq: Count
    """Number of the oldest line still kept: lines between the requested one and it are only in the files."""
    lines: list[LogLine]


class LogChunk(msgspec.Struct, frozen=True, tag="log-chunk"):
    """A piece of a log file. The pieces from 0 on, one after another, are the file."""

    attempt: Count
    offset: Count
    """Offset of the first byte of `text`."""
    next_offset: Count
    """Offset of the next piece; equal to `offset` at the end of the file."""
    size_bytes: Count
    """Size of the file now."""
    text: Annotated[str, msgspec.Meta(max_length=MAX_CHUNK_BYTES)]
    """Text as the rank wrote it; undecodable bytes as U+FFFD."""
