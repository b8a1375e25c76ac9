"""What a node says, and the commands it takes: the vocabulary between an agent and its consoles.

Telemetry: a `NodeReport` is one msgpack frame, a whole snapshot, published a few times a second and never acknowledged.
Commands: one JSON line in, one JSON line out, on the agent's Unix command socket. Log lines do not fit in a snapshot: a
report carries the number of the newest (`log_seq`), and a console pulls what it lacks by `PullLogs`, what is older by
`ReadLog`. The words about logs are in `agent.log_wire`, and shown here.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from agent.log_wire import LAUNCHER_RANK as LAUNCHER_RANK
from agent.log_wire import LOST_PEER as LOST_PEER
from agent.log_wire import MAX_PULLED_LINES as MAX_PULLED_LINES
from agent.log_wire import LogChunk as LogChunk
from agent.log_wire import LogLine as LogLine
from agent.log_wire import LogLoss as LogLoss
from agent.log_wire import Logs as Logs
from agent.log_wire import LogStream as LogStream
from agent.log_wire import PullLogs as PullLogs
from agent.log_wire import ReadLog as ReadLog
from agent.log_wire import RootCause as RootCause
from agent.machine_wire import GpusReport, HostReport
from ddpcore.wire import DECODE_ERRORS, Count, Fault, FaultKind, FilePath, Name, Rank, RankReport, Seconds, Word

WIRE_VERSION = 1

MAX_NODE_REPORT_BYTES = 1_048_576
MAX_COMMAND_BYTES = 1_048_576
"""A longer line, either way, is refused before it is decoded."""

TELEMETRY_SOCKET = "telemetry.sock"
CONTROL_SOCKET = "control.sock"
INBOX_SOCKET = "inbox.sock"
"""Names of an agent's sockets in its 0700 directory."""

LongText = Annotated[str, msgspec.Meta(max_length=4096)]
JobId = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class JobState(StrEnum):
    """Where a job is on this node."""

    PREPARED = "prepared"
    """Checked and reserved; nothing runs."""
    RUNNING = "running"
    """The launcher runs."""
    RESTARTING = "restarting"
    """An attempt has failed, nothing runs, and the next one begins after a pause."""
    STOPPING = "stopping"
    """Told to end; its processes are on their way out."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """The last attempt failed."""
    STOPPED = "stopped"
    """Ended because it was told to."""
    LOST = "lost"
    """Nothing runs any more, and nobody knows how it ended: the node was rebooted, or everything was killed at once."""


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED, JobState.LOST})


class Tier(StrEnum):
    """How closely a node keeps the past."""

    RECENT = "recent"
    """Every regular report of the last ten minutes."""
    DAY = "day"
    """One in ten seconds of the last day."""


class ProcessState(StrEnum):
    """What the kernel says of a worker's process."""

    RUNNING = "running"
    """Running or sleeping."""
    FROZEN = "frozen"
    """Stopped by a signal or a debugger (T, t)."""
    BLOCKED = "blocked"
    """In uninterruptible sleep (D)."""
    EXITED = "exited"


class ExitReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a worker's process ended."""

    code: int | None = None
    """Exit code; None when a signal ended it or the status was lost."""
    signal: int | None = None
    """Number of the signal that ended it."""
    age_s: Seconds = 0.0
    """How long ago."""
    error: LongText = ""
    """The exception that its end followed from, if it left one: the first of a chain."""


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One worker of a job: its process as the node sees it, and its last rank report."""

    job_id: Name
    attempt: Count
    rank: Rank
    local_rank: Rank
    pid: Count
    process: ProcessState
    process_s: Seconds = 0.0
    """How long the process has been in this state."""
    rss_bytes: Count = 0
    pss_bytes: Count | None = None
    """Resident memory with shared pages split among their users; seconds old, for it is dear to ask."""
    cpu_s: Seconds = 0.0
    """CPU time of the process, user and system."""
    exit: ExitReport | None = None
    """Given exactly when `process` is `EXITED`."""
    report: RankReport | None = None
    """None until the rank has imported torch."""
    report_age_s: Seconds = 0.0
    """How long ago `report` arrived."""


class JobStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job on this node."""

    job_id: Name
    attempt: Count
    state: JobState
    state_s: Seconds
    """How long the job has been in this state."""
    world_size: Count
    num_nodes: Count
    node_rank: Rank
    first_rank: Rank
    """Global rank of this node's local rank 0."""
    local_world_size: Count
    exit_code: int | None = None
    """Of the launcher, once it has ended; negative is a signal."""
    num_restarts: Count = 0
    """How often the node has begun the job again by itself."""
    max_restarts: Count = 0
    detail: LongText = ""
    """A sentence for people, empty when all is well."""
    root_cause: RootCause | None = None
    """Once a rank of this node has failed, until the job begins again."""


class ControlReport(msgspec.Struct, frozen=True):
    """The console whose commands count."""

    generation: Count
    holder: Name
    held_s: Seconds
    """Since when, or since the agent began."""


class NodeReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one node, whole."""

    wire_version: int
    node: Name
    epoch: Word
    """Random per start of the agent: `report_seq` and `log_seq` restart with it."""
    report_seq: Count
    hostname: Name
    agent_pid: Count
    num_cpus: Count
    cpu_frac: float = 0.0
    """Busy share of all cores, 0..1."""
    memory_total_bytes: Count = 0
    memory_available_bytes: Count = 0
    agent_rss_bytes: Count = 0
    host: HostReport = HostReport()
    gpus: GpusReport = GpusReport()
    log_seq: Count = 0
    """Number of log lines read so far; the newest line has `seq == log_seq`."""
    log_losses: list[LogLoss] = []
    """Of the files of this node's jobs that were written faster than they are read."""
    malformed_reports: Count = 0
    """Datagrams that were refused."""
    control: ControlReport | None = None
    """None until a console has claimed control."""
    jobs: list[JobStatus] = []
    workers: list[WorkerReport] = []
    """Sorted by rank."""


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """This node's share of a job."""

    job_id: JobId
    attempt: Count
    python: FilePath
    """Interpreter that runs torchrun and the ranks."""
    command: Annotated[list[LongText], msgspec.Meta(min_length=1)]
    """`["train.py", ...]` or `["-m", "pkg.train", ...]`, passed byte for byte."""
    workdir: FilePath
    num_nodes: Annotated[int, msgspec.Meta(ge=1, le=65536)]
    node_rank: Rank
    local_world_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    first_rank: Rank
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    master_addr: Name
    master_port: Port = 0
    """0 on node 0: the agent binds a free one and says which in its reply to `Prepare`."""
    interface: Name = ""
    """Network interface for gloo and NCCL; empty leaves the choice to them."""
    env: dict[str, str] = {}
    """Added to the agent's own environment."""
    faults: list[Fault] = []
    save_s: Seconds = 120.0
    """How long an agreed stop may take for a step and a checkpoint before SIGTERM."""
    grace_s: Seconds = 10.0
    """Between SIGTERM and SIGKILL when the job is stopped."""
    max_restarts: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    """How often the node begins a failed job again by itself; over several nodes that is the console's to do."""


class Claim(msgspec.Struct, frozen=True, tag="claim", forbid_unknown_fields=True):
    """Take control: commands of an older generation are refused from now on."""

    generation: Annotated[int, msgspec.Meta(ge=1)]
    """Above that of every node's `control`; the same on all nodes of a cluster."""
    holder: Name
    """Who claims it, for people: `user@host, console 1234`."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True, omit_defaults=True):
    """Check and reserve; nothing runs yet. Asked twice for the same it changes nothing."""

    spec: JobSpec
    generation: Count = 0
    """Here and below: of the console's claim; 0 is a command by hand, which always counts."""


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True, omit_defaults=True):
    """Start a prepared job. Asked twice it changes nothing."""

    job_id: JobId
    generation: Count = 0


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True, omit_defaults=True):
    """Forget a prepared job."""

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
    """Do harm to one rank of this node, now."""

    job_id: JobId
    kind: FaultKind
    rank: Rank
    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 8.0
    generation: Count = 0


class PullHistory(msgspec.Struct, frozen=True, tag="history", forbid_unknown_fields=True):
    """Ask for reports of the past after `since_seq`, oldest first, as many as fit into a reply."""

    tier: Tier = Tier.RECENT
    since_seq: Count = 0


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
    | FindLeftovers
    | CleanLeftovers
    | Shutdown
)


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


Reply = Accepted | Refused | Shown | Logs | LogChunk | History | Leftovers | Status

_Message = TypeVar("_Message")

_msgpack_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()
_report_decoder = msgspec.msgpack.Decoder(NodeReport)
_command_decoder: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)


class MalformedMessageError(ValueError):
    """A peer sent bytes that are not a message of this vocabulary."""


class IncompatibleWireError(MalformedMessageError):
    """A peer speaks another version of this vocabulary."""


def encode_node_report(report: NodeReport) -> bytes:
    """Return one telemetry frame."""
    return _msgpack_encoder.encode(report)


def decode_node_report(frame: bytes) -> NodeReport:
    """Return the report in a telemetry frame.

    Raises:
        IncompatibleWireError: It is of another wire version.
        MalformedMessageError: The bytes are too many or not a NodeReport.
    """
    if len(frame) > MAX_NODE_REPORT_BYTES:
        raise MalformedMessageError(f"a report of {len(frame)} bytes, at most {MAX_NODE_REPORT_BYTES} are taken")
    try:
        report = _report_decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a node report: {error}") from error
    if report.wire_version != WIRE_VERSION:
        raise IncompatibleWireError(f"the agent speaks wire version {report.wire_version}, this console {WIRE_VERSION}")
    return report


def encode_command(command: Command) -> bytes:
    """Return one line, its newline included."""
    return _json_encoder.encode(command) + b"\n"


def decode_command(line: bytes) -> Command:
    """Return the command in a line.

    Raises:
        MalformedMessageError: The line is too long or not a command.
    """
    return _decode_line(_command_decoder, line, "a command")


def encode_reply(reply: Reply) -> bytes:
    """Return one line, its newline included."""
    return _json_encoder.encode(reply) + b"\n"


def decode_reply(line: bytes) -> Reply:
    """Return the reply in a line.

    Raises:
        MalformedMessageError: The line is too long or not a reply.
    """
    return _decode_line(_reply_decoder, line, "a reply")


def _decode_line(decoder: msgspec.json.Decoder[_Message], line: bytes, what: str) -> _Message:
    if len(line) > MAX_COMMAND_BYTES:
        raise MalformedMessageError(f"{what} of {len(line)} bytes, at most {MAX_COMMAND_BYTES} are taken")
    try:
        return decoder.decode(line)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not {what}: {error}") from error
