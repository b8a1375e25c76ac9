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
    """Generation of the claim, above that of every node's `control`; the same on all nodes of a cluster."""
    holder: Name
    """Name of the claimant, for users: `user@host, console 1234`."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True, omit_defaults=True):
    """Check and reserve; nothing runs yet. A repeated command changes nothing."""

    spec: JobSpec
    generation: Count = 0
    """Generation of the console's claim, here and below; 0 is a command by hand, which always counts."""


class PrepareAgain(msgspec.Struct, frozen=True, tag="prepare_again", forbid_unknown_fields=True, omit_defaults=True):
    """Prepare the next attempt of a job that has ended, of what the node keeps of it: also what no console is shown.

    Its program, environment and limits stay; faults were for the attempt that they came with. Else as `Prepare`.
    """

    job_id: JobId
    attempt: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    """Number above that of the attempt that has ended; the same on all nodes."""
    first_rank: Rank
    """This and the next two as in `JobSpec`."""
    local_world_size: LocalWorldSize
    world_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    master_port: Port | None = None
    """None is the value of the job's first preparation; so below."""
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)] | None = None
    """This and the next two when it goes on with other nodes than before."""
    node_rank: Rank | None = None
    master_addr: Name | None = None
    generation: Count = 0


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True, omit_defaults=True):
    """Start a prepared job. A repeated command changes nothing."""

    job_id: JobId
    generation: Count = 0
    within_s: Seconds | None = None
    """Seconds of the node's clock since `Prepare` after which it is refused: whoever sent it has given it up by then,
    and a node that was frozen must not start alone. None is by hand, which waits for ever."""


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Forget a prepared job; the node then knows the attempt before it again, if there was one."""

    job_id: JobId
    generation: Count = 0


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True, omit_defaults=True):
    """Stop a job in order. A repeated command changes nothing."""

    job_id: JobId
    is_agreed: bool = True
    """False does not wait for an agreed step, also for a stop that is under way."""
    generation: Count = 0


class Kill(msgspec.Struct, frozen=True, tag="kill", forbid_unknown_fields=True, omit_defaults=True):
    """Kill the whole tree by SIGKILL."""

    job_id: JobId
    generation: Count = 0


class InjectFault(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True, omit_defaults=True):
    """Inject a fault into one rank of this node: `ddpcore.wire.Fault` describes the fields."""

    job_id: JobId
    kind: FaultKind
    rank: Rank
    factor: SlowFactor = DEFAULT_SLOW_FACTOR
    at_step: Count | None = None
    duration_s: HoldSeconds = DEFAULT_HOLD_S
    generation: Count = 0

    @property
    def fault(self) -> Fault:
        """The same, as a probe takes it."""
        return Fault(self.kind, self.rank, self.at_step, self.factor, self.duration_s)


class Tier(StrEnum):
    """Detail of the past that a node keeps."""

    RECENT = "recent"
    """Every regular report of the last ten minutes."""
    DAY = "day"
    """One report in ten seconds of the last day."""


class PullHistory(msgspec.Struct, frozen=True, tag="history", forbid_unknown_fields=True, omit_defaults=True):
    """Request past reports after `since_seq`, oldest first, as many as fit into a reply."""

    tier: Tier = Tier.RECENT
    since_seq: Count = 0
    max_age_s: Seconds | None = None
    """Greatest age in seconds; None is any."""
    period_s: Seconds = 0.0
    """Seconds of the node's clock of which only the first report is sent, and an agent's last; 0 sends every one."""
    is_packed: bool = False
    """True for a `PackedHistory`, of which a reply holds more."""


class GetStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Request a fresh NodeReport."""


class ShowJob(msgspec.Struct, frozen=True, tag="show", forbid_unknown_fields=True):
    """Request the spec of a job."""

    job_id: JobId


class FindLeftovers(msgspec.Struct, frozen=True, tag="leftovers", forbid_unknown_fields=True):
    """Request a list of what earlier runs of this user have left on the node."""


class CleanLeftovers(msgspec.Struct, frozen=True, tag="clean", forbid_unknown_fields=True, omit_defaults=True):
    """Kill leftover processes, remove leftover shared memory; the reply holds what was cleaned."""

    names: list[Name] = []
    """Names of `Leftover`; none means all of rankdeck's own."""
    is_confirmed: bool = False
    """True to clean also what rankdeck has not started, if it is named."""
    generation: Count = 0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True, omit_defaults=True):
    """End the agent. Its jobs continue without it, until another agent in the same directory adopts them."""

    kill_jobs: bool = False
    """True kills the jobs; a private agent always does."""
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
    """Reason why a command was not carried out."""

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
    """This node cannot connect to the address on which the first one listens."""
    TOO_FEW_GPUS = "too_few_gpus"
    NO_SPACE = "no_space"
    TOO_LATE = "too_late"
    """The start was given up elsewhere by now."""
    CANNOT_SPAWN = "cannot_spawn"
    NOT_PERMITTED = "not_permitted"
    NO_PROBE = "no_probe"
    """The rank has no probe that takes requests."""
    NO_LOG = "no_log"
    """No such log file, or not yet."""
    INTERNAL = "internal"
    """A defect of the agent; its standard error has the trace."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted", omit_defaults=True):
    """The command is carried out, or under way."""

    master_port: Port = 0
    """Port of the job's store, in the reply to `Prepare`."""
    num_jobs_left: Count | None = None
    """Number of jobs that continue without the agent, in the reply to `Shutdown`."""
    num_jobs_ended: Count | None = None
    """Number of jobs that are killed with it, in the same reply, where it was asked to."""


class Refused(msgspec.Struct, frozen=True, tag="refused", omit_defaults=True):
    """The command is not carried out, and nothing has changed."""

    reason: RefusalReason
    message: LongText
    """Message: what happened, to which job or rank, and what to do."""
    next_attempt: Count | None = None
    """Attempt that is free, where a job has ended that this node does not know any more, and its logs are kept."""


class Shown(msgspec.Struct, frozen=True, tag="shown"):
    """Spec of a job; what looks like a secret is masked."""

    spec: JobSpec
    """Spec of the current attempt."""
    directory: FilePath
    """Directory of its logs on the node."""
    master_port: Port


class PastReport(msgspec.Struct, frozen=True):
    """A report of the past."""

    seq: Count
    """Number within its tier, from 1, also over restarts of the agent."""
    age_s: Seconds
    report: NodeReport


class History(msgspec.Struct, frozen=True, tag="history"):
    """Reports of the past in order; numbers that are missing at the front are no longer kept."""

    reports: list[PastReport]


class PackedHistory(msgspec.Struct, frozen=True, tag="packed_history"):
    """Reports of the past in order, as `agent.wire.relay` packs them."""

    seqs: list[Count]
    """Number of each report, as in `PastReport`."""
    ages_s: list[Seconds]
    sizes: list[Count]
    packed: bytes


class Leftover(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process or file of an earlier run that nobody watches."""

    name: Name
    """Name, `process:PID:START_TICKS` or `shm:FILE`: it never means another thing later."""
    text: LongText
    """Description for users: the command, or the file."""
    is_ours: bool
    """True if rankdeck has started it."""
    age_s: Seconds
    size_bytes: Count
    """Bytes of resident memory, or of the file."""
    job_id: Name = ""
    rank: Rank | None = None
    ports: list[Port] = []
    """Ports on which it listens."""


class Leftovers(msgspec.Struct, frozen=True, tag="leftovers"):
    """Leftovers that were found, or have been cleaned."""

    items: list[Leftover]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The node's report as it is now."""

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
