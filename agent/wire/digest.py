"""The digest of a node's ranks: what a console compares between ranks, packed as records of one size.

A report of eight ranks decodes into a hundred objects, of which a console that watches thousands of ranks looks at few.
So an encoded report carries the figures of its workers once more, as bytes that become columns of arrays without an
object for each; the workers themselves are decoded when a user looks at them. A digest holds nothing that the workers
do not hold: from a frame without one it is made on arrival.
"""

from __future__ import annotations

import math
import struct
import zlib
from functools import cached_property
from typing import TYPE_CHECKING, Annotated

import msgspec

from agent.wire.reports import (
    MAX_NODE_REPORT_BYTES,
    NodeReport,
    PackedReport,
    ProcessState,
    WorkerReport,
    decode_node_report,
    decode_with,
    decode_workers,
    encode_workers,
    head_of,
    is_step_counted,
    loss_of,
    loss_step_of,
    step_of,
)
from ddpcore.wire import DECODE_ERRORS, Anomaly, Name, Phase, Rank, Word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.reports import LatenessReport
    from ddpcore.wire import GroupReport, RankReport

PHASES = tuple(Phase)
PROCESSES = tuple(ProcessState)
"""A phase's code in a record is its place here; a process state's is one more, so that 0 can be none."""
ANOMALIES = tuple(Anomaly)
"""Each is a bit in a record; the next one is a missing flight recorder."""
RECORDER_MISSING_BIT = 1 << len(ANOMALIES)
NO_JOB = 255
"""Code of a job that the report does not list."""

SECONDS = (
    *("process_s", "seen_s", "quiet_s", "report_age_s", "phase_s", "observed_s", "waited_s"),
    *("stood_s", "step_age_s", "step_limit_s"),
)
"""First of a record's times; then those worked, by phase."""
COUNTS = ("step", "rss_bytes", "pss_bytes", "pid", "report_seq", "num_compared", "num_last")
"""-1 is none; the pid is that of the rank's own report."""
LATENESS = ("spanned_s", "waited_s", "squared_s2", "num_pieces", "stepped_s", "beyond_s")
"""Fields of a `LatenessReport`; 0 where there is none."""
NO_LATENESS = (0.0,) * len(LATENESS)
RANK_FIELDS = (
    ("seconds", f"{len(SECONDS) + len(PHASES)}d"),
    ("lateness", f"{len(LATENESS)}d"),
    ("loss", "d"),
    ("cpu_cores", "d"),
    ("counts", f"{len(COUNTS)}q"),
    ("rank", "I"),
    ("flags", "I"),
    ("job", "B"),
    ("process", "B"),
    ("phase", "B"),
    ("anomalies", "B"),
    ("place", "I"),
)
"""A place is identified by its checksum; 0 is none."""
RANK_RECORD = struct.Struct("<" + "".join(code for _, code in RANK_FIELDS))
"""A multiple of eight bytes, so that numbers lie where processors read them at once."""

HAS_REPORT, IS_STRANGE, IS_ENDING, HAS_WORKED, HAS_LOSS, IS_STEP_COUNTED, IS_COMPARED, HAS_METRICS = (
    1 << place for place in range(8)
)
HAS_PEER_WAIT, HAS_PEER_CALLS, HAS_CHILD_WAIT, HAS_EXIT_WAIT = (1 << place for place in range(8, 12))
HAS_OPEN_TRANSFERS, HAS_RAISED = 1 << 12, 1 << 13
IS_GROWING, IS_STEP_PRINTED = 1 << 16, 1 << 17
"""Flags of a record. A strange report is of another rank or attempt than its worker; times worked may be missing; of a
growing rank the report has `memory.growths`; a printed step is only what its lines have."""

STANDING_FIELDS = (
    ("counts", "3q"),
    ("waiting_s", "d"),
    ("row", "I"),
    ("call", "I"),
    ("is_waiting", "?"),
    ("is_queued", "?"),
    ("is_behind_work", "?"),
)
STANDING_RECORD = struct.Struct("<" + "".join(code for _, code in STANDING_FIELDS) + "5x")
"""Where a rank stands in a group: seqs enqueued and completed, elements of the call's inputs; which rank's record and
which of the calls."""

NUM_PAST = 16
"""Last calls of a history."""
HISTORY_FIELDS = (
    ("counts", "2q"),
    ("row", "I"),
    ("call", "I"),
    ("reduce_op", "I"),
    ("ops", f"{NUM_PAST}I"),
    ("shapes", f"{NUM_PAST}I"),
    ("roots", f"{NUM_PAST}I"),
)
HISTORY_RECORD = struct.Struct("<" + "".join(code for _, code in HISTORY_FIELDS) + "4x")
"""What a rank has called last in a group: the seq of the latest call and its root (-1 is none); which rank's record
and which of the calls; then checksums, 0 where a thing is not known: of the latest call's reduction, of the last calls'
operations, and of their sizes with their element types, ascending up to the latest; and one more than the root of each,
0 where it is not known."""

NUM_AGES = 16
NO_AGE_MS = 2**16 - 1
PROGRESS_FIELDS = (("loss_step", "q"), ("row", "I"), ("stride", "I"), ("ages_ms", f"{NUM_AGES}H"))
PROGRESS_RECORD = struct.Struct("<" + "".join(code for _, code in PROGRESS_FIELDS))
"""How a rank has come to its step: the step of its loss (-1 is none), which rank's record, and how long ago its latest
steps ended, the latest first, which are one stride apart."""

SIZED_OPS = frozenset({"all_reduce", "broadcast", "reduce"})
"""Operations whose members must bring equally many elements of one type."""

MAX_ELEMENTS = 2**62
"""Element counts are compared, never allocated: a peer's absurd sizes are cut to what an int64 holds."""
MAX_DIMENSIONS = 16
MAX_TENSORS = 256
"""What lies beyond is not compared: it keeps the cost of a hostile report small."""


class GroupCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call that ranks of the node have made last in a group; see `GroupReport`."""

    group: Name
    op: Word = ""
    label: Name = ""
    ranks: list[Rank] = []


class Digest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Figures of all workers of a report, in its order."""

    ranks: Annotated[bytes, msgspec.Meta(max_length=MAX_NODE_REPORT_BYTES)] = b""
    """A `RANK_RECORD` for each."""
    calls: list[GroupCall] = []
    """Distinct ones."""
    standings: bytes = b""
    """A `STANDING_RECORD` for each group of each rank."""
    histories: bytes = b""
    """A `HISTORY_RECORD` for each of those whose last calls are known."""
    progress: bytes = b""
    """A `PROGRESS_RECORD` for each rank of which any of it is known."""


class NodeFrame(PackedReport, frozen=True, omit_defaults=True, dict=True, gc=True):
    """A `NodeReport` as a console holds it: the workers still packed, their digest beside."""

    digest: Digest | None = None
    """None of a sender that makes none; never after `decode_frame`."""

    @cached_property
    def workers(self) -> Sequence[WorkerReport]:
        """The workers, decoded at the first look; none where these bytes are no workers."""
        try:
            return decode_workers(self.packed_workers)
        except DECODE_ERRORS:
            return ()

    def worker(self, job_id: str, attempt: int, rank: int) -> WorkerReport | None:
        """Return the node's report of a rank, None if there is none."""
        key = (job_id, attempt, rank)
        found = [worker for worker in self.workers if (worker.job_id, worker.attempt, worker.rank) == key]
        return found[-1] if found else None


_encoder = msgspec.msgpack.Encoder()
_frame_decoder = msgspec.msgpack.Decoder(NodeFrame)


def frame_of(report: NodeReport) -> NodeFrame:
    """Return a report with its workers packed and digested."""
    return NodeFrame(**head_of(report), packed_workers=encode_workers(report.workers), digest=digest_of(report))


def encode_frame(report: NodeReport) -> bytes:
    """Return an encoded report, with a digest; `decode_node_report` takes it too."""
    return _encoder.encode(frame_of(report))


def decode_frame(frame: bytes) -> NodeFrame:
    """Return a frame of telemetry, with a digest.

    Raises:
        IncompatibleWireError: It is of another wire version.
        MalformedMessageError: The bytes are too many or not a NodeReport.
    """
    decoded = decode_with(_frame_decoder, frame)
    return decoded if decoded.digest is not None else frame_of(decode_node_report(frame))


def digest_of(report: NodeReport) -> Digest:
    """Return the digest of a report's workers."""
    place_of = {(status.job_id, status.attempt): place for place, status in enumerate(report.jobs[:NO_JOB])}
    ranks, standings, histories, progress = bytearray(), bytearray(), bytearray(), bytearray()
    calls: dict[tuple[object, ...], int] = {}
    found: list[GroupCall] = []
    for row, worker in enumerate(report.workers):
        ranks += _rank_record(worker, place_of.get((worker.job_id, worker.attempt), NO_JOB))
        progress += _progress_record(worker, row)
        for group in worker.report.groups if worker.report is not None else ():
            key = (group.group, group.op, group.label, *group.ranks)
            call = calls.setdefault(key, len(found))
            if call == len(found):
                found.append(GroupCall(group.group, group.op, group.label, group.ranks))
            standings += _standing_record(group, row, call)
            if group.past:
                histories += _history_record(group, row, call)
    return Digest(bytes(ranks), found, bytes(standings), bytes(histories), bytes(progress))


def _rank_record(worker: WorkerReport, job: int) -> bytes:
    report, lateness = worker.report, worker.lateness
    step, loss = step_of(worker), loss_of(worker)
    flags = HAS_METRICS * bool(worker.metrics) | HAS_LOSS * (loss is not None)
    flags |= IS_GROWING * (worker.memory is not None and bool(worker.memory.growths))
    flags |= IS_STEP_COUNTED * is_step_counted(worker) | IS_COMPARED * (lateness is not None)
    flags |= IS_STEP_PRINTED * (step is not None and (report is None or report.step is None))
    return RANK_RECORD.pack(
        worker.process_s,
        worker.seen_s,
        worker.quiet_s,
        worker.report_age_s,
        *_spent(report),
        *_lateness(lateness),
        math.nan if loss is None else loss,
        worker.cpu_cores,
        -1 if step is None else step,
        worker.rss_bytes,
        -1 if worker.pss_bytes is None else worker.pss_bytes,
        -1 if report is None else report.pid,
        -1 if report is None else report.report_seq,
        -1 if lateness is None else lateness.num_compared,
        -1 if lateness is None else lateness.num_last,
        worker.rank,
        flags if report is None else flags | _report_flags(worker, report),
        job,
        1 + PROCESSES.index(worker.process),
        0 if report is None else PHASES.index(report.phase),
        0 if report is None else _anomaly_bits(report),
        0 if report is None or report.place is None else zlib.crc32(_encoder.encode(report.place)),
    )


def _progress_record(worker: WorkerReport, row: int) -> bytes:
    """Return a rank's record, empty where nothing of it is known."""
    report, loss_step = worker.report, None if loss_of(worker) is None else loss_step_of(worker)
    ages_ms = report.step_ages_ms[:NUM_AGES] if report is not None and report.step is not None else []
    if loss_step is None and not ages_ms:
        return b""
    known = [min(age_ms, NO_AGE_MS - 1) for age_ms in ages_ms]
    unknown = [NO_AGE_MS] * (NUM_AGES - len(known))
    stride = 1 if report is None else report.step_stride
    return PROGRESS_RECORD.pack(-1 if loss_step is None else loss_step, row, stride, *known, *unknown)


def _spent(report: RankReport | None) -> Iterator[float]:
    """Yield how a rank has spent its time: zeros where that is not known."""
    if report is None:
        yield from (0.0,) * (6 + len(PHASES))
        return
    yield from (report.phase_s, report.observed_s, report.waited_s)
    yield from (report.stood_s, report.step_age_s, report.step_limit_s)
    yield from report.worked_s if len(report.worked_s) == len(PHASES) else (0.0,) * len(PHASES)


def _lateness(lateness: LatenessReport | None) -> tuple[float, ...]:
    return NO_LATENESS if lateness is None else tuple(float(getattr(lateness, name)) for name in LATENESS)


def _report_flags(worker: WorkerReport, report: RankReport) -> int:
    is_own = (report.rank, report.job_id, report.attempt) == (worker.rank, worker.job_id, worker.attempt)
    flags = HAS_REPORT | IS_STRANGE * (not is_own) | IS_ENDING * report.is_ending
    flags |= HAS_PEER_WAIT * (report.peer_wait is not None) | HAS_PEER_CALLS * bool(report.peer_calls)
    flags |= HAS_CHILD_WAIT * (report.child_wait is not None) | HAS_EXIT_WAIT * (report.exit_wait is not None)
    flags |= HAS_OPEN_TRANSFERS * report.has_open_transfers | HAS_RAISED * bool(report.raised)
    return flags | HAS_WORKED * (len(report.worked_s) == len(PHASES))


def _anomaly_bits(report: RankReport) -> int:
    bits = RECORDER_MISSING_BIT * report.recorder_missing
    for anomaly in report.anomalies:
        bits |= 1 << ANOMALIES.index(anomaly)
    return bits


def _standing_record(group: GroupReport, row: int, call: int) -> bytes:
    elements = count_elements(group.sizes)
    return STANDING_RECORD.pack(
        *(group.enqueued_seq, group.completed_seq, elements, group.waiting_s, row, call),
        *(group.is_waiting, group.is_queued, group.is_behind_work),
    )


def _history_record(group: GroupReport, row: int, call: int) -> bytes:
    latest_seq = group.past[-1].seq
    ops, shapes, roots = [0] * NUM_PAST, [0] * NUM_PAST, [0] * NUM_PAST
    for past in group.past:
        place = NUM_PAST - 1 - (latest_seq - past.seq)
        if 0 <= place < NUM_PAST:
            ops[place] = checksum(past.op)
            shapes[place] = shape_checksum(past.op, past.num_elements, past.dtype)
            roots[place] = past.root + 1
    root = -1 if group.root is None else group.root
    return HISTORY_RECORD.pack(latest_seq, root, row, call, checksum(group.reduce_op), *ops, *shapes, *roots)


def shape_checksum(op: str, num_elements: int, dtype: str) -> int:
    """Return the checksum of a call's sizes and types; 0 where members may differ in them, or they are not known."""
    return checksum(f"{num_elements} {dtype}") if op in SIZED_OPS and num_elements >= 0 else 0


def checksum(text: str) -> int:
    """Return a number for a text, and 0 for none."""
    return zlib.crc32(text.encode()) or 1 if text else 0


def count_elements(sizes: list[list[int]]) -> int:
    """Return how many elements tensors of these sizes hold together; -1 when none is given."""
    if not sizes:
        return -1
    if len(sizes) == 1 and len(sizes[0]) == 1:
        return max(-1, min(sizes[0][0], MAX_ELEMENTS))
    return max(-1, min(sum(math.prod(size[:MAX_DIMENSIONS]) for size in sizes[:MAX_TENSORS]), MAX_ELEMENTS))
