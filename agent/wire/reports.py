"""Telemetry: a `NodeReport` is one msgpack frame, a whole snapshot, at least once a second, never acknowledged.

What is decoded from bytes holds no cycles, so nothing here is shown to the collector of garbage (`gc=False`): it would
look through the reports of a whole fleet for nothing.

`loss_of`, `loss_step_of`, `step_of` and `epoch_of` return how far a rank has come: what it reports, a count of its
optimizers too, goes before what it prints. `place_of` returns where it stands, or has ended.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, TypeVar

import msgspec

from agent.wire.codec import (
    EPOCH_METRIC,
    LOSS_METRIC,
    STEP_METRIC,
    IncompatibleWireError,
    LongText,
    MalformedMessageError,
)
from agent.wire.ends import EndFacts
from agent.wire.jobs import JobStatus
from agent.wire.logs import LogLoss
from agent.wire.machine import GpusReport, HostReport, MemoryReport
from agent.wire.signals import Readings, Unmeasured
from ddpcore.wire import DECODE_ERRORS, Count, Name, Place, Rank, RankReport, Seconds, Word

WIRE_VERSION = 6
"""Version of reports, commands and their sockets. In 1 no console asked for reports; 2 has shorter digests; 4
has no commands to listen over TCP; in 6 the workers of a frame are one binary field."""
READABLE_VERSIONS = frozenset({5, WIRE_VERSION})
"""Versions whose reports, commands and sockets are understood; in recordings and in agents' history too."""


MAX_NODE_REPORT_BYTES = 1_048_576


class ProcessState(StrEnum):
    """State of a worker's process by the kernel."""

    RUNNING = "running"
    """Running or sleeping."""
    FROZEN = "frozen"
    """Stopped by a signal or a debugger (T, t)."""
    BLOCKED = "blocked"
    """Uninterruptible sleep (D)."""
    EXITED = "exited"


class ExitReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How a worker's process ended."""

    code: int | None = None
    """Exit code; None when a signal ended it or the status was lost."""
    signal: int | None = None
    """Number of the signal that ended it."""
    age_s: Seconds = 0.0
    """Seconds since the end."""
    error: LongText = ""
    """The exception that its end followed from, if it left one: the first of a chain."""
    last_line: LongText = ""
    """What it wrote last to standard error, if it left no exception and ended with a code."""
    oom_kills: Count = 0
    """How many processes the kernel killed for want of memory in the seconds before a bad end: of the rank's cgroup
    where the kernel counts these, else of the node."""
    facts: EndFacts = EndFacts()
    place: Place | None = None
    """Line of the program at which a fatal signal ended it, by faulthandler; None where that is not known."""

    @property
    def error_text(self) -> str:
        """Text that it left of its end, one way or the other."""
        return self.error or self.last_line


class LatenessReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How a rank comes to collectives beside the other ranks of its node; counts grow with its attempt.

    A sample: some seconds' last collectives that at least two ranks of the node have called.
    """

    num_compared: Count = 0
    """Collectives."""
    num_last: Count = 0
    """Compared collectives to which it came last."""
    spanned_s: Seconds = 0.0
    """Time between the calls that have been compared: exact, by the machine's clock."""
    waited_s: Seconds = 0.0
    """The part of `spanned_s` in which it waited for later ranks of its node."""
    squared_s2: Annotated[float, msgspec.Meta(ge=0.0, le=1e20)] = 0.0
    """Sum of the squares of `waited_s` over its pieces, in square seconds: what chance may do."""
    num_pieces: Count = 0
    """Pieces of `spanned_s`: a step each, or several short ones."""
    stepped_s: Seconds = 0.0
    """Length of the steps whose end is known."""
    beyond_s: Seconds = 0.0
    """The part of `stepped_s` between the node's last call and the step's end: it grows by waiting for other nodes."""


class OutsideLook(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a process stands that cannot report it itself, as py-spy has seen it."""

    pid: Count
    """The rank's own, or that of a child that the rank waits for."""
    place: Place | None = None
    """The innermost line that is the user's; None where it was seen and has none."""
    age_s: Seconds = 0.0
    """How long ago it was seen."""


class WorkerReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One worker of a job: its process as the node sees it, and its last rank report."""

    job_id: Name
    attempt: Count
    rank: Rank
    local_rank: Rank
    pid: Count
    """0 of one that ended before it was seen."""
    process: ProcessState
    process_s: Seconds = 0.0
    """How long the process has been in this state."""
    rss_bytes: Count = 0
    pss_bytes: Count | None = None
    """Resident memory with shared pages split among their users; seconds old, for it is dear to ask."""
    cpu_s: Seconds = 0.0
    """CPU time of the process, user and system."""
    cpu_cores: float = 0.0
    """Cores that it has kept busy over the last second or two; over 1 with several threads."""
    seen_s: Seconds = 0.0
    """How long its process has been known."""
    quiet_s: Seconds = 0.0
    """How long it has printed nothing, at most `seen_s`."""
    metrics: Annotated[dict[Name, float | None], msgspec.Meta(max_length=64)] = {}
    """The latest values that the job's patterns have found in its lines; in JSON, NaN and infinities are null."""
    loss_step: Count | None = None
    """Step in the line that the loss of `metrics` is from; None where it has none."""
    exit: ExitReport | None = None
    """Given exactly when `process` is `EXITED`."""
    report: RankReport | None = None
    """None until the rank has imported torch. Without `arrivals`, which stay on the node."""
    report_age_s: Seconds = 0.0
    """How long ago `report` arrived."""
    lateness: LatenessReport | None = None
    """None while it has not been compared with another rank of its node."""
    outside: OutsideLook | None = None
    """None unless the rank does not report, or waits for a child."""
    store_port_owner: LongText = msgspec.field(default="", name="store_listener")
    """The process of its node that listens where the rank waits for the others in `init_process_group`; empty where it
    has not been looked for, nobody is seen to listen, or it is another node."""
    memory: MemoryReport | None = None
    """None of a node that does not look at it; of a rank that has ended, how it grew last."""
    signals: Readings = {}
    """Signals of its process and of its GPU."""
    unmeasured: Unmeasured = 0
    """Places in `RATES_OF_RANK`."""


class ControlReport(msgspec.Struct, frozen=True, gc=False):
    """The console whose commands count."""

    generation: Count
    holder: Name
    held_s: Seconds
    """Seconds since the claim, or since the agent began."""


class NodeHead(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The state of one node, but for its workers."""

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
    signals: Readings | None = None
    """Signals of the host; None of an agent that takes none, of ranks either."""
    unmeasured: Unmeasured = 0
    """Places in `RATES_OF_HOST`."""
    nic: Name = ""
    """Network interface that carries most bytes; empty where none is known."""
    log_seq: Count = 0
    """Number of log lines read so far; the latest line has `seq == log_seq`."""
    log_losses: list[LogLoss] = []
    """Losses of this node's log files that were written faster than they are read."""
    malformed_reports: Count = 0
    """Datagrams that were refused."""
    control: ControlReport | None = None
    """None until a console has claimed control."""
    jobs: list[JobStatus] = []
    is_last: bool = False
    """Whether the agent ends with it, as it was asked to: nobody watches what goes on there."""


class NodeReport(NodeHead, frozen=True, omit_defaults=True, gc=False):
    """The state of one node, whole."""

    workers: list[WorkerReport] = []
    """Sorted by rank."""


class PackedReport(NodeHead, frozen=True, omit_defaults=True, gc=False):
    """A `NodeReport` with its workers packed."""

    packed_workers: msgspec.Raw = msgspec.field(name="workers", default=msgspec.Raw(b"\x90"))
    """See `decode_workers`."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PackedReport)
_field_decoder = msgspec.msgpack.Decoder(bytes | list[WorkerReport])
_workers_decoder = msgspec.msgpack.Decoder(list[WorkerReport])


def encode_node_report(report: NodeReport) -> bytes:
    """Return a frame without a digest."""
    return _encoder.encode(report)


def encode_workers(workers: list[WorkerReport]) -> msgspec.Raw:
    """Return workers as one binary field, so that who receives it need not read through it."""
    return msgspec.Raw(_encoder.encode(_encoder.encode(workers)))


def decode_workers(packed: msgspec.Raw) -> list[WorkerReport]:
    """Return the workers of such a field, or of a list: that is how `encode_node_report` packs them.

    Raises:
        One of `DECODE_ERRORS`: These bytes are no workers.
    """
    found = _field_decoder.decode(packed)
    return _workers_decoder.decode(found) if isinstance(found, bytes) else found


def decode_node_report(frame: bytes) -> NodeReport:
    """Return the report in a frame, with a digest or without.

    Raises:
        IncompatibleWireError: It is of another wire version.
        MalformedMessageError: The bytes are too many or not a NodeReport.
    """
    packed = decode_with(_decoder, frame)
    try:
        workers = decode_workers(packed.packed_workers)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a node report: {error}") from error
    return NodeReport(**head_of(packed), workers=workers)


def head_of(report: NodeHead) -> dict[str, Any]:
    """Return the fields that all kinds of reports have, by name."""
    return {name: getattr(report, name) for name in NodeHead.__struct_fields__}


Head = TypeVar("Head", bound=NodeHead)


def decode_with(decoder: msgspec.msgpack.Decoder[Head], frame: bytes) -> Head:
    """Return what a decoder of reports makes of a frame; raises as `decode_node_report` does."""
    if len(frame) > MAX_NODE_REPORT_BYTES:
        raise MalformedMessageError(f"a report of {len(frame)} bytes, at most {MAX_NODE_REPORT_BYTES} are taken")
    try:
        report = decoder.decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedMessageError(f"not a node report: {error}") from error
    if report.wire_version not in READABLE_VERSIONS:
        raise IncompatibleWireError(f"the agent speaks wire version {report.wire_version}, this console {WIRE_VERSION}")
    return report


MAX_STEP = 2**53


def loss_of(worker: WorkerReport) -> float | None:
    """Return a rank's loss: what it reports, else what its lines have."""
    report = worker.report
    return worker.metrics.get(LOSS_METRIC) if report is None or report.loss is None else report.loss


def step_of(worker: WorkerReport) -> int | None:
    """Return a rank's step: what it reports or its optimizers count, else what its lines have."""
    report = worker.report
    return whole_number(worker.metrics.get(STEP_METRIC)) if report is None or report.step is None else report.step


def loss_step_of(worker: WorkerReport) -> int | None:
    """Return the step of a rank's loss: what it reports, else what the loss's line has; None where it is not known."""
    report = worker.report
    is_reported = report is not None and report.loss is not None
    return report.loss_step if report is not None and is_reported else worker.loss_step


def epoch_of(worker: WorkerReport) -> int | None:
    """Return a rank's epoch: what it reports, else what its lines have."""
    report = worker.report
    return whole_number(worker.metrics.get(EPOCH_METRIC)) if report is None or report.epoch is None else report.epoch


def is_step_counted(worker: WorkerReport) -> bool:
    """Return whether a rank's step is only the count of its optimizers' steps."""
    return worker.report is not None and worker.report.step is not None and worker.report.is_step_counted


def place_of(worker: WorkerReport | None) -> Place | None:
    """Return the line at which a fatal signal ended a rank, or where it was last seen: from outside, or by itself."""
    if worker is None or worker.report is None:
        return None if worker is None or worker.exit is None else worker.exit.place
    if worker.exit is not None and worker.exit.place is not None:
        return worker.exit.place
    return outside_place_of(worker) or worker.report.place


def outside_place_of(worker: WorkerReport) -> Place | None:
    """Return where a rank that does not report has been seen from outside; None where it has not."""
    if worker.report is None or worker.outside is None or worker.outside.pid != worker.report.pid:
        return None
    return worker.outside.place


def whole_number(value: float | None) -> int | None:
    """Return a printed step or epoch; None where it is no such number."""
    return int(value) if value is not None and math.isfinite(value) and 0 <= value < MAX_STEP else None
