"""Follows one process group through counters and full dumps. Pure; a part of `ddpcore.probe.rank_state`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpcore.probe.progress import CallsAtSteps
from ddpcore.probe.stack import sendable
from ddpcore.wire import DEFAULT_GROUP, GroupReport, PastCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpcore.probe.samples import RecorderEntry, StepEnd

WAIT_SAMPLES = 2
"""Samples that must see the same unfinished operation: retirement trails completion by up to 2.4 ms."""

MAX_SIZES = 8
MAX_DIMS = 8
"""Shapes in a report, and dimensions of each: coalesced operations have hundreds."""

MAX_PAST = 16
"""Last calls in a report: gloo's ranks get one or two calls past the first that differs, NCCL's a backward."""

MAX_LATER = 2
"""Calls among these behind the one that the rank waits in."""

_MAX_OP_CHARS = 64
_MAX_NAME_CHARS = 256
_MAX_ELEMENTS = 2**62


class GroupTrack:
    """Position of this rank in one process group.

    `group` is c10d's name; empty before a full dump. `quiet_samples` are samples in a row with unchanged counters,
    `changed_s` is the time of the last change. With `is_dumped` the last full dump shows the present position; with
    `is_pending` the counters show that the last operation is not over. With `has_arguments` the main thread's arguments
    of the last operation have been looked for.
    """

    __slots__ = (
        "_completed",
        "_completed_seq",
        "_dtypes",
        "_dumped_enqueued",
        "_enqueued",
        "_enqueued_seq",
        "_has_unfinished",
        "_is_behind_work",
        "_is_in_order",
        "_is_left_behind",
        "_is_queued",
        "_op",
        "_past",
        "_pending_samples",
        "_pending_since_s",
        "_reduce_op",
        "_root",
        "_sizes",
        "_steps",
        "changed_s",
        "group",
        "has_arguments",
        "is_dumped",
        "is_pending",
        "quiet_samples",
    )

    def __init__(self, *, is_in_order: bool = False) -> None:
        """`is_in_order`: operations end in the order of the calls, and the counters show the last one that did."""
        self._is_in_order = is_in_order
        self._is_queued = self._is_behind_work = False
        self.group = ""
        self.quiet_samples = 0
        self.changed_s = 0.0
        self.is_dumped = False
        self.is_pending = False
        self.has_arguments = False
        self._enqueued = -1
        self._completed = -1
        self._pending_samples = 0
        self._pending_since_s = 0.0
        self._is_left_behind = False
        """True if an operation is not over though a later one is: gloo runs two at once, and counts the last one that
        ended."""
        self._dumped_enqueued = -1
        self._has_unfinished = False
        self._enqueued_seq = 0
        self._completed_seq = 0
        self._op = ""
        self._sizes: list[list[int]] = []
        self._dtypes: list[str] = []
        self._root: int | None = None
        self._reduce_op = ""
        self._past: list[PastCall] = []
        self._steps = CallsAtSteps()

    @property
    def op(self) -> str:
        """The last called operation, as of the last full dump."""
        return self._op

    @property
    def is_waiting(self) -> bool:
        """True when samples and a full dump agree that the last called collective is not over."""
        return self._pending_samples >= WAIT_SAMPLES and self._is_unfinished

    @property
    def is_in_call(self) -> bool:
        """True when the rank waits in the collective itself: it may also wait for work of its GPU before that."""
        return self.is_waiting and not self._is_behind_work

    @property
    def is_held_up(self) -> bool:
        """True while the rank waits for others.

        A GPU's calls are pending nearly always, and known to be over up to 0.1 s late: only one that stands counts.
        """
        return self.is_in_call if self._is_in_order else self.is_pending

    @property
    def _is_unfinished(self) -> bool:
        return self._has_unfinished and self._dumped_enqueued == self._enqueued

    @property
    def counters(self) -> tuple[int, int]:
        """(enqueued, completed) of the last sample."""
        return self._enqueued, self._completed

    def observe(self, enqueued: int, completed: int, now_s: float) -> None:
        """Take the counters of one sample."""
        has_moved = enqueued != self._enqueued
        has_ended = completed != self._completed
        if has_moved or has_ended:
            self.quiet_samples = 1
            self.changed_s = now_s
            self.is_dumped = self._is_left_behind = False
            self._forget_arguments()
        else:
            self.quiet_samples += 1
        # NCCL's are the numbers of the last call and of the last that is over; sends and receives have their own.
        is_behind = completed != enqueued if self._is_in_order else completed < enqueued
        self.is_pending = is_behind or self._is_left_behind
        if not self.is_pending:
            self._pending_samples = 0
            self._completed_seq = self._enqueued_seq
            self._has_unfinished = False
        elif has_moved or self._pending_samples == 0 or (has_ended and self._is_in_order):
            self._pending_samples = 1
            self._pending_since_s = now_s
            # What the rank waits in now only the next dump can tell.
            self._has_unfinished = self._has_unfinished and not self._is_in_order
        else:
            self._pending_samples += 1
            if completed > self._completed:
                # A GPU goes through calls long after the main thread has made them: it waits in the next one since now.
                self._pending_since_s = now_s
        self._enqueued, self._completed = enqueued, completed

    def learn(
        self,
        entries: Sequence[RecorderEntry],
        counters: tuple[int, int] | None,
        ends: Sequence[StepEnd] = (),
        first: RecorderEntry | None = None,
    ) -> None:
        """Take this group's part of a full dump: its collectives in the ring.

        `counters` are as the dump shows them: when they differ from the last sample's, the rank has moved in between,
        and the entries show how far it has come but not what it waits in. `ends` are the program's latest steps.
        `first` is, of all groups' calls that follow each other on the GPU, the first that is not over.
        """
        is_current = counters == (self._enqueued, self._completed)
        self.is_dumped = is_current
        if not entries:
            return
        latest = max(entries, key=_seq)
        unfinished = [entry.seq for entry in entries if not entry.is_retired]
        # Retirement trails completion by some milliseconds: what is not retired after two quiet samples hangs.
        if is_current and unfinished and not self.is_pending:
            if self.quiet_samples >= WAIT_SAMPLES:
                self.is_pending = self._is_left_behind = True
                self._pending_samples, self._pending_since_s = WAIT_SAMPLES, self.changed_s
            else:
                self.is_dumped = False
        self._has_unfinished = is_current and self.is_pending and bool(unfinished)
        self._dumped_enqueued = self._enqueued if is_current else -1
        self.group = latest.group
        self._enqueued_seq = latest.seq
        self._completed_seq = min(unfinished) - 1 if self._has_unfinished else latest.seq
        # With NCCL, and behind DDP's backward, many calls may follow the one that holds the rank up.
        held = min((entry for entry in entries if not entry.is_retired), key=_seq) if self._has_unfinished else latest
        first = first if self._has_unfinished and self._is_in_order else None
        self._is_behind_work = first is not None and first.has_begun is False
        self._is_queued = first is not None and held is not first and not self._is_behind_work
        self._op = operation(held)
        self._sizes = [list(shape[:MAX_DIMS]) for shape in held.sizes[:MAX_SIZES]]
        self._dtypes = [sendable(dtype, _MAX_OP_CHARS) for dtype in held.dtypes[:MAX_SIZES]]
        until = min(latest.seq, held.seq + MAX_LATER)
        last = {entry.seq: entry for entry in entries if until - MAX_PAST < entry.seq <= until}
        self._past = [_past_call(last[seq]) for seq in sorted(last)]
        self._steps.learn(entries, ends)

    def learn_arguments(self, root: int | None, reduce_op: str) -> None:
        """Take the arguments of the operation that the main thread waits in."""
        self.has_arguments = True
        self._root, self._reduce_op = root, sendable(reduce_op, _MAX_OP_CHARS)

    def _forget_arguments(self) -> None:
        self.has_arguments = False
        self._root, self._reduce_op = None, ""

    def report(self, name: str, ranks: list[int], now_s: float) -> GroupReport:
        """Return the group as a report shows it, by its name among all ranks; empty `ranks` are all of the job."""
        return GroupReport(
            group=name,
            enqueued_seq=self._enqueued_seq,
            completed_seq=self._completed_seq,
            op=self._op,
            sizes=self._sizes,
            waiting_s=max(0.0, now_s - self._pending_since_s) if self._is_unfinished else 0.0,
            is_waiting=self.is_waiting,
            is_queued=self._is_queued and self.is_waiting,
            is_behind_work=self._is_behind_work and self.is_waiting,
            ranks=ranks,
            dtypes=self._dtypes,
            root=self._root,
            reduce_op=self._reduce_op,
            past=self._past if self.is_dumped else [],
            steps=self._steps.report(),
        )

    def validate(self) -> None:
        """Assert what holds after every step."""
        assert 0 <= self._completed_seq <= self._enqueued_seq
        assert not self._has_unfinished or self.is_pending
        assert not self.is_waiting or self._completed_seq < self._enqueued_seq
        assert self.is_pending == (self._pending_samples > 0)


def name_in_reports(group: str, number: int, *, is_apart: bool) -> str:
    """Return a group's name that is the same on every member, and no other group's of this process.

    c10d uses its names again under each default group, for other members and counts; the `number` of that group
    distinguishes them. `is_apart`: NCCL counts by itself in a group that gloo serves too.
    """
    name = f"{group}@nccl" if is_apart else group
    return sendable(name if number < 2 or name == DEFAULT_GROUP else f"{name}#{number}", _MAX_NAME_CHARS)


def _seq(entry: RecorderEntry) -> int:
    return entry.seq


def operation(entry: RecorderEntry) -> str:
    """Return an operation without its backend's name."""
    return sendable(entry.op.partition(":")[2] or entry.op, _MAX_OP_CHARS)


def _past_call(entry: RecorderEntry) -> PastCall:
    num_elements = min(sum(math.prod(shape) for shape in entry.sizes), _MAX_ELEMENTS) if entry.sizes else -1
    dtypes = dict.fromkeys(entry.dtypes)
    root = -1 if entry.root is None else entry.root
    return PastCall(entry.seq, operation(entry), max(-1, num_elements), sendable("+".join(dtypes), _MAX_OP_CHARS), root)
