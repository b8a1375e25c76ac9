"""What a rank reports, and what it takes: the vocabulary between a rank's probe and its node's agent.

A `RankReport` travels up, one msgpack datagram a report, a whole snapshot: losing one costs freshness, not truth. A
`ProbeRequest` travels down to the probe's own datagram socket; the next snapshot answers it (`answered_request_id`).

Durations and cumulative counters cross this border, timestamps do not: two machines' clocks never meet.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

WIRE_VERSION = 1
MAX_REPORT_BYTES = 65_536
"""A larger datagram is refused before it is decoded."""

ENV_INBOX = "RANKDECK_INBOX"
"""Path of the agent's datagram socket; a rank without it is not probed."""
ENV_JOB_ID = "RANKDECK_JOB_ID"
ENV_ATTEMPT = "RANKDECK_ATTEMPT"
ENV_REQUEST_DIR = "RANKDECK_REQUEST_DIR"
"""Directory in which the probe of rank N binds `rank-N.sock`."""
ENV_LOG_DIR = "RANKDECK_LOG_DIR"
"""Directory in which torchrun writes `rank-N.stdout.log` and `rank-N.stderr.log`."""
ENV_FAULTS = "RANKDECK_FAULTS"
"""JSON list of `Fault` to inject at a step."""
ENV_LAUNCHER_PID = "RANKDECK_LAUNCHER_PID"
"""Pid of torchrun, set per worker: a rank that does not descend from it has been orphaned."""
ENV_LAUNCHER_NAMESPACE = "RANKDECK_LAUNCHER_NAMESPACE"
"""Torchrun's pid namespace: in another one (a container around the rank) its pid means nothing."""
ENV_STORE_FD = "RANKDECK_STORE_FD"
"""Listening socket, already bound, that torchrun's store takes over instead of binding every interface."""
ENV_ROUND = "RANKDECK_ROUND"
"""Set within torchrun of an elastic job: which gathering of the nodes its ranks belong to, from 1."""
ROUND_FILE = "round.json"
"""File in the launcher's `ENV_LOG_DIR`: number, first_rank, world_size, node_rank, num_nodes of the latest round."""
ENV_PROBED_PID = "RANKDECK_PROBED_PID"
"""Set by the first process of a rank that loads the probe; its children see it and stay unprobed."""
ENV_UNPROBED = "RANKDECK_UNPROBED"
"""Set for a job whose ranks are to have no probe: then the launcher takes the plug-in off their PYTHONPATH."""
LOGS_SPECS_NAME = "rankdeck"
"""torchrun's `--logs-specs` value that selects our plug-in."""
ELASTIC_BACKEND = "rankdeck-c10d"
"""torchrun's `--rdzv-backend` value for its c10d rendezvous with rounds that are counted."""
DEFAULT_GROUP = "0"
"""c10d's name of the process group of all ranks."""
BARRIER_GROUP = "rankdeck.barrier"
"""The pretended group of named barriers (`ddpcore.barriers`), whose seq is the count of this rank's calls."""
FIRST_GROUP = "rankdeck.first/"
"""The pretended group of a first-block begins so, its label with the next: all wait for its lowest member alone."""
FIRST_LABEL = "first: "
ONE_WAY_OPS = frozenset({"broadcast", "gather", "scatter", "reduce"})
"""Collectives that are over for one member before every member has called them."""
MONITORED_BARRIER, NEW_GROUP, NEW_COMMUNICATOR = "monitored_barrier", "new_group", "ncclCommInitRank"
"""Operations of a `PeerCall` that are no call of two ranks: all of the group take part, and no recorder holds it."""
Rank = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e10)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Word = Annotated[str, msgspec.Meta(max_length=64)]
FilePath = Annotated[str, msgspec.Meta(max_length=4096)]
ErrorText = Annotated[str, msgspec.Meta(max_length=1024)]
SlowFactor = Annotated[float, msgspec.Meta(ge=1.0, le=1000.0)]
HoldSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=3600.0)]
DEFAULT_SLOW_FACTOR = 8.0
DEFAULT_HOLD_S = 30.0
"""Longer than a stall, and over while people still look."""


class Phase(StrEnum):
    """What a rank's main thread is about."""

    STARTING = "starting"
    """No process group yet, and not on the way to it."""
    JOINING = "joining"
    """The rank is in `init_process_group` and waits for the others to come."""
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    BARRIER = "barrier"
    """The rank is in a collective that the program calls itself."""
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    OTHER = "other"


class Anomaly(StrEnum):
    """What about a rank's surroundings changes how much of it can be seen, or how fast it trains."""

    RECORDER_OFF = "recorder_off"
    """The program's environment has switched torch's flight recorder off (TORCH_FR_BUFFER_SIZE=0)."""
    DEBUG_DETAIL = "debug_detail"
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: torch compares each collective first, unseen, records it without its group."""
    GROUPLESS = "groupless"
    """The rank makes steps, has brothers, and no process group."""
    OWN_RANKS = "own_ranks"
    """The rank has started ranks of its own (torchrun, torch.multiprocessing.spawn), which nobody sees."""


class FaultKind(StrEnum):
    """What can be provoked in a rank."""

    FREEZE = "freeze"
    """SIGSTOP."""
    THAW = "thaw"
    """SIGCONT."""
    KILL = "kill"
    """SIGKILL."""
    SLOW = "slow"
    """Every step takes `factor` times as long; a factor of 1 heals."""
    GIL = "gil"
    """The main thread keeps the interpreter's lock for `duration_s`, as a C extension may: no other thread runs."""
    SKIP_BARRIER = "skip-barrier"
    """The main thread leaves out the next barrier or collective that it comes to."""
    MISMATCH = "mismatch"
    """The rank calls a collective that the others do not call."""
    OOM = "oom"
    """An allocation of torch fails for want of memory."""
    LEAVE = "leave"
    """The program ends with exit code 0, before the others."""


class Place(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A line of source in which a thread stands."""

    file: FilePath
    """Absolute path as the interpreter knows it."""
    line: Count
    function: Name


class PastCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A collective that a rank has called in a group, as far as the other members' have to be like it."""

    seq: Count
    op: Word = ""
    """Torch's name of the operation, without the backend's prefix: `all_reduce`."""
    num_elements: Annotated[int, msgspec.Meta(ge=-1, le=2**62)] = -1
    """Elements of all its inputs; -1 where it has none."""
    dtype: Word = ""
    """Torch's name of its inputs' element type: `Float`."""
    root: Annotated[int, msgspec.Meta(ge=-1, le=2**31)] = -1
    """Global rank of its source or destination; -1 where it has none, or it is not known."""


class StepCalls(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many collectives of a group a rank had called when it finished a step."""

    step: Count
    seq: Count


class GroupReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a rank stands in one process group.

    The key across ranks is (`group`, seq): c10d counts the collectives of a group equally on every member.
    """

    group: Name
    """c10d's name (`5#2` is group 5 under a second default group), `BARRIER_GROUP`, or one begun by `FIRST_GROUP`."""
    enqueued_seq: Count = 0
    """Seq of the last collective this rank has called; 0 before the first."""
    completed_seq: Count = 0
    """Seq of the last collective known to be over for this rank."""
    op: Word = ""
    """Torch's name of the last called operation, without the backend's prefix: `all_reduce`, `barrier`."""
    label: Name = ""
    """The name given to a named barrier."""
    sizes: list[list[int]] = []
    """Input sizes of the last called operation."""
    waiting_s: Seconds = 0.0
    """How long `enqueued_seq` has been called and not completed; 0 when it is completed."""
    is_waiting: bool = False
    """Two samples in a row have seen the wait."""
    is_queued: bool = False
    """The call that is waited for is behind another one on the GPU, of another group or to one peer."""
    is_behind_work: bool = False
    """The GPU has not come to the call: work of the rank itself before it is not over."""
    ranks: list[Rank] = []
    """Sorted global ranks of the members; empty means every rank of the job."""
    dtypes: Annotated[list[Word], msgspec.Meta(max_length=8)] = []
    """Element types of the inputs of the last called operation, one for each of `sizes`: `Float`."""
    root: Rank | None = None
    """Global rank that a waiting call names as its source or destination; None where it names none, or is not known."""
    reduce_op: Word = ""
    """Reduction of a waiting call: `SUM`; empty where it has none, or is not known."""
    past: Annotated[list[PastCall], msgspec.Meta(max_length=16)] = []
    """Last calls, ascending up to `enqueued_seq`; only while that is known to be the last one."""
    steps: Annotated[list[StepCalls], msgspec.Meta(max_length=32)] = []
    """Calls made by the end of some steps, ascending: the latest steps, and older ones that all ranks pick alike."""


class PeerCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A send or receive between two ranks, by its place in the order of such calls."""

    op: Word
    """`send` or `recv`, also for `isend`, `irecv` and those of a batch; or one that all of the group make."""
    peer: Rank | None
    """Global rank; None of a receive from any rank."""
    group: Name = DEFAULT_GROUP
    tag: Count = 0
    number: Count = 0
    """Number of the last such call with this peer, group and tag, from 1 (0: not counted); equal numbers are a pair."""
    num_bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=4)] = ()
    """Bytes of the tensors of the last such calls, that of `number` last; empty where it is not known."""


class PeerWait(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A wait of the main thread for a send or a receive."""

    calls: Annotated[list[PeerCall], msgspec.Meta(max_length=16)]
    """The call it waits for; of `Work.wait()`, all calls that are not known to be over."""
    waiting_s: Seconds = 0.0
    is_on_gpu: bool = False
    """NCCL's: the GPU waits, and other calls are behind these; the main thread may be elsewhere."""


class ChildWait(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A wait of the main thread for a process that it has started."""

    pid: Count
    what: Word = ""
    """`subprocess`, `process` (of multiprocessing) or `loader worker`."""
    waiting_s: Seconds = 0.0


class ExitWait(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What keeps a process whose program is done from ending."""

    what: Word
    """`thread`, `process` (both are joined), `queue` (of multiprocessing, whose items nobody takes), `atexit` (an exit
    handler runs) or empty where it is not known."""
    name: Name = ""
    """Name of the thread."""
    place: Place | None = None
    """The user's line that the thread or the exit handler stands at."""
    pid: Count = 0
    """Pid of the process that is joined."""
    waiting_s: Seconds = 0.0


class StoreMeeting(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Where a rank meets the others in `init_process_group`, and as whom: what it has passed, or its environment."""

    address: Name
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]
    rank: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
    world_size: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class ArrivalsReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """When a rank called the latest collectives of a group, by its machine's clock: its agent compares the ranks."""

    group: Name
    seqs: Annotated[list[Count], msgspec.Meta(max_length=64)]
    called_us: Annotated[list[Count], msgspec.Meta(max_length=64)]
    """One for each of `seqs`, which ascend, in microseconds."""
    one_way_seqs: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    """Those of `seqs` whose calls are of `ONE_WAY_OPS`."""
    on_gpu_us: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    """Microseconds of the GPU in each of `seqs`, -1 where that is not known; empty where none is."""


class GpuMemoryReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What torch's allocator holds on one GPU: allocated in tensors, reserved with its cache; no contexts, no NCCL."""

    uuid: Name
    """NVML's name of it: `GPU-...` or `MIG-...`."""
    allocated_bytes: Count = 0
    reserved_bytes: Count = 0
    peak_allocated_bytes: Count = 0
    peak_reserved_bytes: Count = 0
    """The highest value since the program began, or reset it."""


class TrainingReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What the engine knows of its training; a program without the engine sends none."""

    last_step: Count | None = None
    """The step that training ends after, where that is known."""
    goodput_frac: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    """Time in steps that count, over the time since the first attempt began."""
    checkpoint_step: Count | None = None
    """The latest step that a checkpoint holds; None while there is no checkpoint."""
    checkpoint_age_s: Seconds | None = None
    """How long ago it was taken; None also for one of an earlier attempt."""


class RankReport(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The state of one rank, whole, as its probe sees it now."""

    wire_version: int
    rank: Rank
    local_rank: Rank
    world_size: Count
    pid: Count
    job_id: Name
    attempt: Count
    report_seq: Count
    """Grows by one per report of this process."""
    phase: Phase
    phase_s: Seconds = 0.0
    """How long the rank has been in this phase without a break."""
    place: Place | None = None
    """The innermost line of the user's own program on the main thread's stack."""
    step: Count | None = None
    """The last step given to `report_step`; else, from the second on, the count of what the optimizers do."""
    epoch: Count | None = None
    loss: float | None = None
    """The last loss given to `report_step`; may be NaN or infinite."""
    loss_step: Count | None = None
    """The step that `loss` was given with; None where it is not known."""
    loss_first: float | None = None
    """The first loss given to `report_step` in this process."""
    steps_done: Count = 0
    """Calls of `report_step` in this process, or counted steps."""
    is_step_counted: bool = False
    """True when the program reports no steps: `step` counts those of its optimizers, from the start of this process."""
    step_ages_ms: Annotated[list[Count], msgspec.Meta(max_length=16)] = []
    """How long ago `step` and the steps before it ended, the latest first; only those of the last seconds."""
    step_stride: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1
    """Difference between these steps, and between the earliest of them and the one before it."""
    groups: list[GroupReport] = []
    observed_s: Seconds = 0.0
    """How long the probe has been sampling, summed over samples."""
    waited_s: Seconds = 0.0
    """The part of `observed_s` in which a collective was called and not completed: waits least, arrives last."""
    worked_s: Annotated[list[Seconds], msgspec.Meta(max_length=16)] = []
    """The rest of `observed_s`, in which the rank waited for nobody: by phase, in the order of `Phase`."""
    overlapped_s: Seconds = 0.0
    """The part of `worked_s` in which a collective was under way behind the work, as DDP's are during backward."""
    probe_cpu_s: Seconds = 0.0
    """CPU time that the probe's thread has taken."""
    gc_pause_s: Seconds | None = None
    gil_held_s: Seconds | None = None
    """Seconds of garbage collection; by samples, those with the interpreter's lock held for 10 ms. Not for consoles."""
    is_adopted: bool = False
    """True of a rank that no agent has launched."""
    slow_factor: Annotated[float, msgspec.Meta(ge=1.0, le=1e6)] = 1.0
    """The injected slowness; 1 is none."""
    answered_request_id: Count = 0
    """The highest request id that the probe has carried out."""
    recorder_missing: bool = False
    """True when this torch has no usable flight recorder: groups stay empty and only places are known."""
    anomalies: Annotated[list[Anomaly], msgspec.Meta(max_length=16)] = msgspec.field(default=[], name="oddities")
    stood_s: Seconds = 0.0
    """How long no frame of the main thread's stack has moved; 0 while the rank makes steps."""
    step_age_s: Seconds = 0.0
    """Time since the last step, or the last collective of a program without steps; 0 before there were a few."""
    step_limit_s: Seconds = 0.0
    """Ten usual steps, or twice the longest so far, whichever is longer: later than that a step is overdue."""
    peer_calls: Annotated[list[PeerCall], msgspec.Meta(max_length=64)] = []
    """The last call of each kind, peer, group and tag, the latest first."""
    peer_wait: PeerWait | None = None
    has_open_transfers: bool = False
    """A send or a receive that is in the recorder, as NCCL's are, was called and not over at the last full dump."""
    child_wait: ChildWait | None = None
    exit_wait: ExitWait | None = None
    store_meeting: StoreMeeting | None = None
    """None while it does not stand in torch's store of `init_process_group`."""
    is_ending: bool = False
    """True of the last report: the interpreter ends, which may take a while."""
    raised: ErrorText = ""
    """The exception that ends the program, the first of its chain; `place` is then where it was raised."""
    can_stop: bool = False
    """True when the program takes part in an agreed stop (the engine is in use)."""
    training: TrainingReport | None = None
    gpu_memory: Annotated[list[GpuMemoryReport], msgspec.Meta(max_length=64)] = []
    """GPUs on which torch has reserved memory, as of a recent `report_step`."""
    tick: Count = msgspec.field(default=0, name="beat")
    """Number of the machine's slow tick at which `arrivals` were read."""
    arrivals: Annotated[list[ArrivalsReport], msgspec.Meta(max_length=32)] = []
    step_ends_us: Annotated[list[Count], msgspec.Meta(max_length=64)] = []
    """When the latest steps ended, ascending, by the clock of `arrivals` and sent with them."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A fault to inject into one rank."""

    kind: FaultKind
    rank: Rank
    at_step: Count | None = None
    """Step after which it strikes; None is at once, or at the next step."""
    factor: SlowFactor = DEFAULT_SLOW_FACTOR
    """Factor of `SLOW`."""
    duration_s: HoldSeconds = DEFAULT_HOLD_S
    """Seconds of `GIL`."""

    @property
    def is_healing(self) -> bool:
        """True when it undoes harm."""
        return self.kind is FaultKind.THAW or (self.kind is FaultKind.SLOW and self.factor == 1.0)


class SlowDown(msgspec.Struct, frozen=True, tag="slow_down", forbid_unknown_fields=True):
    """Ask a probe to stretch every step of its rank by `factor` (1 heals)."""

    request_id: Count
    factor: SlowFactor


class StrikeAt(msgspec.Struct, frozen=True, tag="strike_at", forbid_unknown_fields=True):
    """Ask a probe to let a fault strike its rank's main thread, at a step or at the next one."""

    request_id: Count
    fault: Fault


class StopTraining(msgspec.Struct, frozen=True, tag="stop_training", forbid_unknown_fields=True):
    """Ask one rank whose report has `can_stop` to end training at the next step boundary that all ranks agree on."""

    request_id: Count


class DumpStacks(msgspec.Struct, frozen=True, tag="dump_stacks", forbid_unknown_fields=True):
    """Ask a probe to write the stacks of its rank's threads into a file (`ddpcore.wire_stacks`)."""

    request_id: Count


class ReportNow(msgspec.Struct, frozen=True, tag="report_now", forbid_unknown_fields=True):
    """Ask a probe to report at once, with the recorder's full dump: a rank has died, torchrun will end all."""

    request_id: Count


ProbeRequest = SlowDown | StrikeAt | StopTraining | DumpStacks | ReportNow
"""The closed union of what a probe takes."""

_report_encoder = msgspec.msgpack.Encoder()
_report_decoder = msgspec.msgpack.Decoder(RankReport)
_request_decoder: msgspec.msgpack.Decoder[ProbeRequest] = msgspec.msgpack.Decoder(ProbeRequest)
_faults_decoder = msgspec.json.Decoder(list[Fault])

DECODE_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError)
"""All that decoding hostile bytes raises (`msgspec.ValidationError` is a `DecodeError`)."""


class MalformedReportError(ValueError):
    """A peer sent bytes that are not a message of this vocabulary."""


def encode_report(report: RankReport) -> bytes:
    """Return one datagram."""
    return _report_encoder.encode(report)


def decode_report(datagram: bytes) -> RankReport:
    """Return the report in a datagram.

    Raises:
        MalformedReportError: The bytes are too many, not a RankReport, or of another wire version.
    """
    if len(datagram) > MAX_REPORT_BYTES:
        raise MalformedReportError(f"a report of {len(datagram)} bytes, at most {MAX_REPORT_BYTES} are taken")
    try:
        report = _report_decoder.decode(datagram)
    except DECODE_ERRORS as error:
        raise MalformedReportError(f"not a rank report: {error}") from error
    if report.wire_version != WIRE_VERSION:
        raise MalformedReportError(f"a rank speaks wire version {report.wire_version}, this agent {WIRE_VERSION}")
    return report


def encode_request(request: ProbeRequest) -> bytes:
    """Return one datagram for a probe."""
    return _report_encoder.encode(request)


def decode_request(datagram: bytes) -> ProbeRequest:
    """Return the request in a datagram.

    Raises:
        MalformedReportError: The bytes are not a request.
    """
    try:
        return _request_decoder.decode(datagram)
    except DECODE_ERRORS as error:
        raise MalformedReportError(f"not a probe request: {error}") from error


def encode_faults(faults: list[Fault]) -> str:
    """Return the value of `ENV_FAULTS`."""
    return msgspec.json.encode(faults).decode()


def decode_faults(text: str) -> list[Fault]:
    """Return the faults in a value of `ENV_FAULTS`.

    Raises:
        MalformedReportError: The text is not a list of faults.
    """
    try:
        return _faults_decoder.decode(text)
    except DECODE_ERRORS as error:
        raise MalformedReportError(f"not a list of faults: {error}") from error
