"""What an agent answers: one JSON line to each command."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from agent.wire.codec import decode_line
from agent.wire.fields import LongText, Port
from agent.wire.jobs import JobSpec
from agent.wire.logs import LogChunk, Logs
from agent.wire.reports import NodeReport
from agent.wire.stacks import Stacks
from ddpcore.wire import Count, FilePath, Name, Rank, Seconds


class RefusalReason(StrEnum):
    """Why a command was not carried out."""

    MALFORMED = "malformed"
    OLD_GENERATION = "old_generation"
    """Another console has claimed control since."""
    UNKNOWN_JOB = "unknown_job"
    UNKNOWN_RANK = "unknown_rank"
    JOB_EXISTS = "job_exists"
    WRONG_STATE = "wrong_state"
    PORT_TAKEN = "port_taken"
    NO_INTERPRETER = "no_interpreter"
    NO_WORKDIR = "no_workdir"
    NO_SCRIPT = "no_script"
    BAD_ADDRESS = "bad_address"
    """`master_addr` is not an address of the node that is to listen there."""
    UNREACHABLE = "unreachable"
    """This node cannot connect to where the first one listens."""
    TOO_FEW_GPUS = "too_few_gpus"
    NO_SPACE = "no_space"
    CANNOT_SPAWN = "cannot_spawn"
    NOT_PERMITTED = "not_permitted"
    NO_PROBE = "no_probe"
    """The rank has no probe to ask."""
    NO_LOG = "no_log"
    """There is no such log file, or not yet."""
    INTERNAL = "internal"
    """A defect of the agent; its standard error says more."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted", omit_defaults=True):
    """The command is carried out, or under way."""

    master_port: Port = 0
    """In the reply to `Prepare`: where the job's store will listen."""
    num_jobs_left: Count | None = None
    """In the reply to `Shutdown`: how many jobs go on without the agent."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The command is not carried out, and nothing has changed."""

    reason: RefusalReason
    message: LongText
    """What happened, to whom, and what to do."""


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """What a job is made of; what looks like a secret is masked."""

    spec: JobSpec
    """Of the current attempt."""
    directory: FilePath
    """Where its logs are on the node."""
    master_port: Port


class PastReport(msgspec.Struct, frozen=True):
    """A report of the past."""

    seq: Count
    """Counts from 1 within its tier, also over restarts of the agent."""
    age_s: Seconds
    report: NodeReport


class History(msgspec.Struct, frozen=True, tag="history"):
    """Reports of the past in order; numbers that are missing at the front are no longer kept."""

    reports: list[PastReport]


class PackedHistory(msgspec.Struct, frozen=True, tag="packed_history"):
    """Reports of the past in order, as `agent.wire.packed_reports` packs them."""

    seqs: list[Count]
    """Of each, as in `PastReport`."""
    ages_s: list[Seconds]
    sizes: list[Count]
    packed: bytes


class Leftover(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something of an earlier run that nobody watches over."""

    name: Name
    """`process:PID:START_TICKS` or `shm:FILE`: never another thing's later."""
    text: LongText
    """What it is, for people: the command, or the file."""
    is_ours: bool
    """Started by rankdeck."""
    age_s: Seconds
    size_bytes: Count
    """Resident memory, or the file's size."""
    job_id: Name = ""
    rank: Rank | None = None
    ports: list[Port] = []
    """On which it listens."""


class Leftovers(msgspec.Struct, frozen=True, tag="leftovers"):
    """What was found, or what has been cleaned."""

    items: list[Leftover]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The node, now."""

    report: NodeReport


Reply = Accepted | Refused | Shown | Logs | LogChunk | History | PackedHistory | Leftovers | Status | Stacks


_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_reply(reply: Reply) -> bytes:
    """Return one line, its newline included."""
    return _encoder.encode(reply) + b"\n"


def decode_reply(line: bytes) -> Reply:
    """Return the reply in a line.

    Raises:
        MalformedMessageError: The line is too long or not a reply.
    """
    return decode_line(_decoder, line, "a reply")
