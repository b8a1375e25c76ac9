"""What a node finds before a job comes: rows for people, and facts for whoever compares nodes.

These words are JSON, one line each, of the verbs `doctor`, `listen` and `reach`; no agent needs to serve for them.
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
"""Of a program's directory that are told one by one."""
MAX_TARGETS = 64
"""That one node tries to reach at once."""

WallTime = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]


class Health(StrEnum):
    """How something is."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    """A job would fail of it, or hang."""


class Row(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    name: Name
    status: Health
    detail: LongText
    todo: LongText = ""
    """What to do about it; empty when it is well."""


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
    """What a job would run."""

    workdir: FilePath
    commit: Word = ""
    """Of git; empty where there is none, or git says nothing."""
    num_changed: Count = 0
    """Files that are not as in that commit."""
    digest: Word = ""
    """Of all source files; empty where they are too many."""
    files: Annotated[list[FileDigest], msgspec.Meta(max_length=MAX_FILES)] = []
    """One by one; empty where they are too many for that."""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What must be alike on all nodes of a job, or fit together. Empty is unknown, or not there."""

    hostname: Name
    rankdeck: Word
    python: Word = ""
    """The version of the jobs' interpreter; and so `torch`, `cuda`, `nccl`."""
    torch: Word = ""
    cuda: Word = ""
    """What torch is built for; or `hip` and a version."""
    nccl: Word = ""
    driver: Word = ""
    gpus: Annotated[list[Name], msgspec.Meta(max_length=MAX_GPUS)] = []
    """Their models, as NVML sees them."""
    address: Word = ""
    """At which other nodes should reach this one."""
    interfaces: Annotated[list[Interface], msgspec.Meta(max_length=MAX_INTERFACES)] = []
    """Addresses at which others could reach the node."""
    code: Code | None = None


class Examination(msgspec.Struct, frozen=True):
    """All that was found."""

    schema: Literal[1]
    rows: Annotated[list[Row], msgspec.Meta(max_length=MAX_ROWS)]
    facts: Facts


class Listening(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `listen` says first."""

    schema: Literal[1]
    address: Word = ""
    port: Port = 0
    token: Word = ""
    """What whoever connects is told: no other listener says the same."""
    error: Sentence = ""
    """Why nobody listens."""


class Clock(msgspec.Struct, frozen=True):
    """What `listen` answers to each line."""

    wall_time_s: WallTime


class Reached(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one connection went."""

    target: Word
    """As it was asked for."""
    token: Word = ""
    """What the listener said; empty when nobody did."""
    connect_s: Seconds = 0.0
    interface: Word = ""
    """Of this node, on the way there."""
    error: Sentence = ""


class ReachReport(msgspec.Struct, frozen=True):
    """What `reach` says."""

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
    """Return what `listen` says first."""
    return decode_line(_listening, line, "the address of a listener")


def decode_clock(line: bytes) -> Clock:
    """Return what `listen` answers."""
    return decode_line(_clocks, line, "a time of day")


def decode_reach_report(line: bytes) -> ReachReport:
    """Return what `reach` found."""
    return decode_line(_reach_reports, line, "what was reached")
