"""The commands that an agent takes and the replies it gives: one JSON line each.

`Command` is the union of all commands, `Reply` that of all replies.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from agent.wire.codec import JobId, LongText, Port, decode_line
from agent.wire.jobs import JobSpec, LocalWorldSize
from agent.wire.logs import LogChunk, Logs, PullLogs, ReadLog
from agent.wire.reports import NodeReport
from agent.wire.stacks import GetStacks, Stacks
from ddpcore.wire import (
    DEFAULT_HOLD_S,
    DEFAULT_SLOW_FACTOR,
    Count,
    Fault,
    FaultKind,
    FilePath,
    HoldSeconds,
    Name,
    Rank,
    Seconds,
    SlowFactor,
)


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Take control: commands of an older generation are refused from now on."""

    generation: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Above that of every node's `control`; the same on all nodes of a cluster."""
    holder: Name
    """Who claims it, for people: `user@host, console 1234`."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True, omit_defaults=True):
    """Check and reserve; nothing runs yet. Asked twice for the same it changes nothing."""

    spec: JobSpec
    generation: Count = 0
    """Here and below: of the console's claim; 0 is a command by hand, which always counts."""


class PrepareAgain(msgspec.Struct, frozen=True, tag="prepare_again", forbid_unknown_fields=True, omit_defaults=True):
    """Prepare the next attempt of a job that has ended, of what the node keeps of it: also what no console is shown.

    Its program, environment and limits stay; faults were for the attempt that they came with. Else as `Prepare`.
    """

    job_id: JobId
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Above that of the one that has ended; the same on all nodes."""
    first_rank: Rank
    """This and the next two as in `JobSpec`."""
    local_world_size: LocalWorldSize
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    master_port: Port | None = None
    """None is as the job was first asked for; so below."""
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """This and the next two when it goes on with other nodes than before."""
    node_rank: Rank | None = None
    master_addr: Name | None = None
    generation: Count = 0


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True, omit_defaults=True):
    """Start a prepared job. Asked twice it changes nothing."""

    job_id: JobId
    generation: Count = 0


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Forget a prepared job; of an attempt that follows another one, that one is what the node knows again."""

    job_id: JobId
    generation: Count = 0


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True, omit_defaults=True):
    """End a job in an orderly way. Asked twice it changes nothing.

    Ranks that can are asked to finish a step and write a checkpoint, and have the job's `save_s` for it. Then, or at
    once: SIGTERM, a grace period, SIGKILL for the whole tree.
    """

    job_id: JobId
    is_agreed: bool = True
    """False does not wait for an agreed step, also of a stop that is under way."""
    generation: Count = 0


class Kill(msgspec.Struct, frozen=True, tag="kill", forbid_unknown_fields=True, omit_defaults=True):
    """SIGKILL for the whole tree."""

    job_id: JobId
    generation: Count = 0


class InjectFault(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True, omit_defaults=True):
    """Do harm to one rank of this node: `ddpcore.wire.Fault` says what the fields are.

    Without a step signals act at once, and what only the rank's own main thread can do at its next step.
    """

    job_id: JobId
    kind: FaultKind
    rank: Rank
    factor: SlowFactor = DEFAULT_SLOW_FACTOR
    at_step: Count | None = None
    duration_s: HoldSeconds = DEFAULT_HOLD_S
    generation: Count = 0

    @property
    def fault(self) -> Fault:
        """What is to be done."""
        return Fault(self.kind, self.rank, self.at_step, self.factor, self.duration_s)


class Tier(StrEnum):
    """How closely a node keeps the past."""

    RECENT = "recent"
    """Every regular report of the last ten minutes."""
    DAY = "day"
    """One in ten seconds of the last day."""


class PullHistory(msgspec.Struct, frozen=True, tag="history", forbid_unknown_fields=True, omit_defaults=True):
    """Ask for reports of the past after `since_seq`, oldest first, as many as fit into a reply."""

    tier: Tier = Tier.RECENT
    since_seq: Count = 0
    max_age_s: Seconds | None = None
    """None is as old as there are."""
    period_s: Seconds = 0.0
    """Of each so many seconds by the node's clock only the first report; 0 is every one."""
    is_packed: bool = False
    """Wants a `PackedHistory`, of which a reply holds more."""


class GetStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Ask for a fresh NodeReport."""


class ShowJob(msgspec.Struct, frozen=True, tag="show", forbid_unknown_fields=True):
    """Ask what a job is made of."""

    job_id: JobId


class FindLeftovers(msgspec.Struct, frozen=True, tag="leftovers", forbid_unknown_fields=True):
    """Ask for what earlier runs of this user have left on the node."""


class CleanLeftovers(msgspec.Struct, frozen=True, tag="clean", forbid_unknown_fields=True, omit_defaults=True):
    """End leftover processes, remove leftover shared memory; the reply holds what was cleaned."""

    names: list[Name] = []
    """Of `Leftover`; none means all of rankdeck's own."""
    is_confirmed: bool = False
    """True to clean also what rankdeck has not started, as far as it is named."""
    generation: Count = 0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True, omit_defaults=True):
    """End the agent. Its jobs go on without it, until another agent in the same directory takes them up."""

    kill_jobs: bool = False
    """Kill them instead; a private agent always does."""
    generation: Count = 0


Command = (
    Claim
    | Prepare
    | PrepareAgain
    | Commit
    | Abort
    | Stop
    | Kill
    | InjectFault
    | PullLogs
    | ReadLog
    | PullHistory
    | GetStatus
    | ShowJob
    | GetStacks
    | FindLeftovers
    | CleanLeftovers
    | Shutdown
)


_encoder = msgspec.json.Encoder()
_command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)


def encode_command(command: Command) -> bytes:
    """Return one line, its newline included."""
    return _encoder.encode(command) + b"\n"


def decode_command(line: bytes) -> Command:
    """Return the command in a line.

    Raises:
        MalformedMessageError: The line is too long or not a command.
    """
    return decode_line(_command_decoder, line, "a command")


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
    """Reports of the past in order, as `agent.wire.relay` packs them."""

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


_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


def encode_reply(reply: Reply) -> bytes:
    """Return one line, its newline included."""
    return _encoder.encode(reply) + b"\n"


def decode_reply(line: bytes) -> Reply:
    """Return the reply in a line.

    Raises:
        MalformedMessageError: The line is too long or not a reply.
    """
    return decode_line(_reply_decoder, line, "a reply")
