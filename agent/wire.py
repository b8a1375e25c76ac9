"""What a node says, and the commands it takes: the vocabulary between an agent and its consoles.

Telemetry: a `NodeReport` is one msgpack frame, a whole snapshot, published a few times a second and never acknowledged.
Commands: one JSON line in, one JSON line out, on the agent's Unix command socket. Log lines do not fit in a snapshot: a
report carries the number of the newest (`log_seq`), and a console pulls what it lacks by `PullLogs`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeVar

import msgspec

from ddpcore.wire import DECODE_ERRORS, Count, Fault, FaultKind, FilePath, Name, Rank, RankReport, Seconds, Word

WIRE_VERSION = 1

MAX_NODE_REPORT_BYTES = 1_048_576
MAX_COMMAND_BYTES = 1_048_576
"""A longer line, either way, is refused before it is decoded."""
MAX_PULLED_LINES = 2_000

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
    """The last exception line of its stderr, if there is one."""


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
    log_seq: Count = 0
    """Number of log lines read so far; the newest line has `seq == log_seq`."""
    malformed_reports: Count = 0
    """Datagrams that were refused."""
    jobs: list[JobStatus] = []
    workers: list[WorkerReport] = []
    """Sorted by rank."""


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line that a rank (or the launcher) printed."""

    seq: Count
    """Counts from 1 over all lines of this node."""
    rank: int
    """Global rank; -1 is the launcher."""
    stream: Word
    """`stdout` or `stderr`."""
    text: LongText
    """Without its line end; undecodable bytes as U+FFFD; longer lines are cut."""


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


class Prepare(msgspec.Struct, frozen=True, tag="prepare", forbid_unknown_fields=True):
    """Check and reserve; nothing runs yet."""

    spec: JobSpec


class Commit(msgspec.Struct, frozen=True, tag="commit", forbid_unknown_fields=True):
    """Start a prepared job."""

    job_id: JobId


class Abort(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    """Forget a prepared job."""

    job_id: JobId


class Stop(msgspec.Struct, frozen=True, tag="stop", forbid_unknown_fields=True, omit_defaults=True):
    """End a job in an orderly way. Asked twice it changes nothing.

    Ranks that can are asked to finish a step and write a checkpoint, and have the job's `save_s` for it. Then, or at
    once: SIGTERM, a grace period, SIGKILL for the whole tree.
    """

    job_id: JobId
    is_agreed: bool = True
    """False does not wait for an agreed step, also of a stop that is under way."""


class Kill(msgspec.Struct, frozen=True, tag="kill", forbid_unknown_fields=True):
    """SIGKILL for the whole tree."""

    job_id: JobId


class InjectFault(msgspec.Struct, frozen=True, tag="fault", forbid_unknown_fields=True):
    """Do harm to one rank of this node, now."""

    job_id: JobId
    kind: FaultKind
    rank: Rank
    factor: Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)] = 8.0


class PullLogs(msgspec.Struct, frozen=True, tag="logs", forbid_unknown_fields=True):
    """Ask for log lines after `since_seq`, oldest first, at most `MAX_PULLED_LINES`."""

    since_seq: Count = 0


class GetStatus(msgspec.Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Ask for a fresh NodeReport."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True, omit_defaults=True):
    """End the agent. Its jobs go on without it, until another agent in the same directory takes them up."""

    kill_jobs: bool = False
    """Kill them instead; a private agent always does."""


Command = Prepare | Commit | Abort | Stop | Kill | InjectFault | PullLogs | GetStatus | Shutdown


class RefusalReason(StrEnum):
    """Why a command was not carried out."""

    MALFORMED = "malformed"
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


class Logs(msgspec.Struct, frozen=True, tag="logs"):
    """Log lines in order."""

    epoch: Word
    first_seq: Count
    """The oldest line still kept: a gap between it and the asked one is lost to the console (the files have it)."""
    lines: list[LogLine]


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The node, now."""

    report: NodeReport


Reply = Accepted | Refused | Logs | Status

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
