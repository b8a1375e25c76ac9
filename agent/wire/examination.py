"""What a node finds before a job comes: rows for people, and facts for whoever compares nodes.

All of it is JSON, one line each, of the verbs `doctor`, `listen` and `reach`; no agent needs to serve for them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from agent.wire.codec import LongText, Port, decode_line
from agent.wire.machine import MAX_GPUS, Sentence
from ddpcore.wire import Count, FilePath, Name, Seconds, Word

MAX_ROWS = 128
MAX_INTERFACES = 64
MAX_FILES = 2000
"""Files of a program's directory that are listed one by one."""
MAX_TARGETS = 64
"""Targets that one node connects to in one call."""

WallTime = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]


class Health(StrEnum):
    """Judgement on one row."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    """A job would fail because of it, or hang."""


class Row(msgspec.Struct, frozen=True):
    """Result of one look."""

    name: Name
    status: Health
    detail: LongText
    todo: LongText = ""
    """Advice; empty when it is well."""


class Interface(msgspec.Struct, frozen=True):
    """An address of a node, and what it is on."""

    name: Word
    address: Word
    mtu: Count


class FileDigest(msgspec.Struct, frozen=True):
    """A file of source code."""

    path: FilePath
    digest: Word


class Code(msgspec.Struct, frozen=True, omit_defaults=True):
    """Source code that a job would run."""

    workdir: FilePath
    commit: Word = ""
    """Commit by git; empty where there is none, or git fails."""
    num_changed: Count = 0
    """Files that differ from that commit."""
    digest: Word = ""
    """Digest of all source files; empty where they are too many."""
    files: Annotated[list[FileDigest], msgspec.Meta(max_length=MAX_FILES)] = []
    """Each file; empty where they are too many."""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that must be alike on all nodes of a job, or fit together. Empty is unknown, or not there."""

    hostname: Name
    rankdeck: Word
    python: Word = ""
    """The version of the jobs' interpreter; and so `torch`, `cuda`, `nccl`."""
    torch: Word = ""
    cuda: Word = ""
    """CUDA version that torch is built for; or `hip` and a version."""
    nccl: Word = ""
    driver: Word = ""
    gpus: Annotated[list[Name], msgspec.Meta(max_length=MAX_GPUS)] = []
    """Models of the GPUs, by NVML."""
    address: Word = ""
    """Address at which other nodes should reach this one."""
    interfaces: Annotated[list[Interface], msgspec.Meta(max_length=MAX_INTERFACES)] = []
    """Addresses at which others could reach the node."""
    code: Code | None = None


class Examination(msgspec.Struct, frozen=True):
    """Result of all looks."""

    schema: Literal[1]
    rows: Annotated[list[Row], msgspec.Meta(max_length=MAX_ROWS)]
    facts: Facts


class Listening(msgspec.Struct, frozen=True, omit_defaults=True):
    """First line of `listen`."""

    schema: Literal[1]
    address: Word = ""
    port: Port = 0
    token: Word = ""
    """Token for those that connect: no other listener sends the same."""
    error: Sentence = ""
    """Reason why nothing listens."""


class Clock(msgspec.Struct, frozen=True):
    """Answer of `listen` to each line."""

    wall_time_s: WallTime


class Reached(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result of one connection."""

    target: Word
    """Target as it was given."""
    token: Word = ""
    """Token by the listener; empty without one."""
    connect_s: Seconds = 0.0
    interface: Word = ""
    """Interface of this node on the route there."""
    error: Sentence = ""


class ReachReport(msgspec.Struct, frozen=True):
    """Output of `reach`."""

    schema: Literal[1]
    reached: Annotated[list[Reached], msgspec.Meta(max_length=MAX_TARGETS)]


_examinations = msgspec.json.Decoder(Examination)
_listening = msgspec.json.Decoder(Listening)
_clocks = msgspec.json.Decoder(Clock)
_reach_reports = msgspec.json.Decoder(ReachReport)


def decode_examination(line: bytes) -> Examination:
    """Return what `doctor` found.

    Raises:
        MalformedMessageError: It is something else; and so for those below.
    """
    return decode_line(_examinations, line, "an examination")


def decode_listening(line: bytes) -> Listening:
    """Return what `listen` prints first."""
    return decode_line(_listening, line, "the address of a listener")


def decode_clock(line: bytes) -> Clock:
    """Return what `listen` answers."""
    return decode_line(_clocks, line, "a time of day")


def decode_reach_report(line: bytes) -> ReachReport:
    """Return what `reach` found."""
    return decode_line(_reach_reports, line, "what was reached")
