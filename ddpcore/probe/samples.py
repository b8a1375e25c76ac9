"""What the probe sees at one tick: the input of `ddpcore.probe.rank_state`.

Pure and torch-free: plain values, made by the thin shells around the core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ddpcore.wire import (
    BARRIER_GROUP,
    Anomaly,
    ChildWait,
    ExitWait,
    GpuMemoryReport,
    PeerCall,
    PeerWait,
    Phase,
    Place,
    StoreMeeting,
    TrainingReport,
)

if TYPE_CHECKING:
    from typing import SupportsFloat

    from ddpcore.probe.stack import Reading


CounterKey = tuple[str, int]
"""Name of a flight recorder (`gloo`, `nccl`) and its process-local index of a process group."""

Counters = Mapping[CounterKey, tuple[int, int]]
"""(enqueued, completed) operations per group.

Send, receive and monitored_barrier count too, by amounts that depend on the rank, and completed is not monotone: good
for "something has moved" and "something is pending", never for a comparison between ranks.
"""


class RecorderEntry(msgspec.Struct, frozen=True, gc=False):
    """One operation in a flight recorder's ring."""

    key: CounterKey
    group: str
    """c10d's name of the process group, the same on all members."""
    seq: int
    """`collective_seq_id`: counts the collectives of a group equally on every member."""
    op: str
    """`gloo:all_reduce`."""
    sizes: tuple[tuple[int, ...], ...]
    is_p2p: bool
    is_retired: bool
    """True once the recorder knows that the operation is over."""
    called_us: int = 0
    """Time of the call: microseconds of the machine's wall clock, 0 if unknown."""
    dtypes: tuple[str, ...] = ()
    """Element types of its inputs: `Float`."""
    p2p_seq: int = 0
    """`p2p_seq_id`: counts this rank's sends and receives in the group, those of a batch as one."""
    root: int | None = None
    """Global rank of its source or destination, if `ddpcore.probe.program_calls` knows it."""
    has_begun: bool | None = None
    """Whether the GPU has come to it, if that is known."""
    on_gpu_us: int = -1
    """Microseconds that the GPU has spent in it; -1 while it is not over, or if that is not known."""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """Arguments of the collective that the main thread waits in, beside tensors."""

    op: str
    """Function of torch.distributed: `broadcast`."""
    root: int | None = None
    """Global rank of its source or destination, where that was passed."""
    group_root: int | None = None
    """Rank of the source or destination in the group."""
    reduce_op: str = ""
    """`SUM`."""


class StepEnd(NamedTuple):
    """End of a step."""

    step: int
    at_us: int
    """Time in microseconds of the wall clock that the recorder uses too."""


class RecorderDump(NamedTuple):
    """A full dump of the flight recorders."""

    entries: Sequence[RecorderEntry]
    counters: Counters
    """Counters of the same moment as the entries."""


class GroupMembers(msgspec.Struct, frozen=True):
    """Members of a process group of this rank."""

    ranks: tuple[int, ...]
    """Sorted global ranks."""
    is_mixed: bool = False
    """True when gloo and NCCL both serve the group, each with its own count of collectives."""
    description: str = ""
    """Name by the program: `group_desc`."""
    is_sorted: bool = True
    """Its members are numbered within it in the order of their global ranks."""


class Recorder(Protocol):
    """Source of collectives (`ddpcore.probe.flight_recorder`)."""

    @property
    def is_available(self) -> bool:
        """False when there is nothing to read."""

    def counters(self) -> Counters:
        """Return (enqueued, completed) per group."""

    def dump(self) -> RecorderDump:
        """Return the whole ring."""

    def members(self) -> Mapping[str, GroupMembers]:
        """Return the process groups of this rank."""

    def has_process_group(self) -> bool:
        """Return whether the default group exists."""

    def num_openings(self) -> int:
        """Return how many default groups there have been."""

    def num_worlds(self, size: int) -> int:
        """Return how many default groups of this many ranks there have been, the same number on each of them."""


class StepMark(NamedTuple):
    """Step of the program's last `report_step`, or the count of its optimizers' steps."""

    step: int
    loss: float | None
    epoch: int | None
    loss_first: float | None
    steps_done: int
    is_counted: bool = False
    """True if the program has reported no step: `step` counts what its optimizers do in this process."""
    loss_step: int | None = None
    """The step that `loss` was given with."""

    def followed_by(self, step: int, loss: float | None, epoch: int | None, loss_step: int | None = None) -> StepMark:
        """Return the mark of the next `report_step`; without a loss it keeps the one before."""
        first = loss if self.loss_first is None else self.loss_first
        if loss is None:
            loss, loss_step = self.loss, self.loss_step
        elif loss_step is None:
            loss_step = step
        return StepMark(step, loss, epoch, first, self.steps_done + 1, loss_step=loss_step)


class StepAges(NamedTuple):
    """When the latest steps ended."""

    stride: int = 1
    """Difference between these steps, and between the earliest of them and the one before it."""
    ages_ms: tuple[int, ...] = ()
    """Milliseconds since the end of each, the latest first."""


class BarrierMark(NamedTuple):
    """Last call of a named barrier."""

    label: str
    seq: int
    """Number of this rank's calls."""
    entered_s: float
    is_over: bool
    group: str = BARRIER_GROUP
    """Name of the group that stands for the barriers in reports."""
    ranks: tuple[int, ...] = ()
    """Members; empty means every rank."""


class TrainingMark(NamedTuple):
    """The engine's facts about its training."""

    last_step: int | None = None
    goodput_frac: float | None = None
    checkpoint_step: int | None = None
    checkpoint_taken_s: float | None = None
    """Monotonic time of this process."""

    def report(self, now_s: float) -> TrainingReport:
        """Return it as reports hold it."""
        taken_s = self.checkpoint_taken_s
        return TrainingReport(
            last_step=to_count(self.last_step),
            goodput_frac=self.goodput_frac,
            checkpoint_step=to_count(self.checkpoint_step),
            checkpoint_age_s=None if taken_s is None else max(0.0, now_s - taken_s),
        )


class Uncaught(NamedTuple):
    """The exception that ends the program."""

    text: str
    place: Place | None
    """The user's line that raised it."""
    phase: Phase = Phase.OTHER
    """Phase of the rank at that line."""


class MainLook(NamedTuple):
    """Where the main thread stands, and what it waits for there outside collectives, as far as that is known."""

    mark: int = 0
    """Digest of all its frames: it has moved when another is found. 0 where nobody has looked."""
    peer_wait: PeerWait | None = None
    child_wait: ChildWait | None = None
    exit_wait: ExitWait | None = None
    store_meeting: StoreMeeting | None = None


NOTHING = MainLook()
"""Value for a main thread that has not been sampled."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """Sample of one tick."""

    now_s: float
    counters: Counters
    reading: Reading
    """Phase and place by the main thread's stack."""
    has_process_group: bool
    step: StepMark | None = None
    phases: tuple[Phase, ...] = ()
    """The program's own `phase` marks, innermost last."""
    barrier: BarrierMark | None = None
    firsts: tuple[BarrierMark, ...] = ()
    """Last call of each of the latest first-blocks."""
    slow_factor: float = 1.0
    can_stop: bool = False
    training: TrainingMark | None = None
    gpu_memory: tuple[GpuMemoryReport, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    num_openings: int = 0
    """Number of default groups so far, read after the counters."""
    num_worlds: int = 0
    """Number of those of all ranks, the same on each."""
    is_at_work: bool = False
    """True if something is under way and the main thread runs or sleeps by itself: it does not wait for that."""
    tick: int = 0
    """Number of the slow tick, which is the same on all ranks of a machine."""
    main: MainLook = NOTHING
    peer_calls: tuple[PeerCall, ...] = ()
    """Last send or receive of each kind, the latest first."""
    num_peer_calls: int = 0
    """Number of sends and receives so far: it changes with each."""
    uncaught: Uncaught | None = None
    """The exception that ends the program, once there is one."""
    step_ages: StepAges = StepAges()

    @property
    def has_steps(self) -> bool:
        """True once a step of the training is over."""
        return self.step is not None and self.step.steps_done > 0

    @property
    def marks(self) -> tuple[BarrierMark, ...]:
        """The named barrier and the first-blocks that the main thread entered last."""
        return self.firsts if self.barrier is None else (self.barrier, *self.firsts)

    @property
    def open_mark(self) -> BarrierMark | None:
        """The named barrier that the main thread waits at; it is one at most."""
        return next((mark for mark in self.marks if not mark.is_over), None)


def is_gloo_pending(counters: Counters) -> bool:
    """Return whether operations are under way, all of them gloo's: a wait for a GPU may spin, and looks like work."""
    pending = [recorder for (recorder, _), (enqueued, completed) in counters.items() if completed < enqueued]
    return bool(pending) and set(pending) == {"gloo"}


MAX_COUNT = 2**63 - 1
"""Largest step, epoch or seq that a report holds."""


_NO_NUMBER = (TypeError, ValueError, RuntimeError, OverflowError)
"""Errors of turning a program's value into a number: infinity is no step, 10**400 no loss."""


def to_float(loss: SupportsFloat | None) -> float | None:
    """Return a program's loss, a number or a tensor with one element; None of what is no number."""
    try:
        # A tensor's item() takes no notice of gradients, its float() warns of them.
        item = getattr(loss, "item", None)
        return None if loss is None else float(item() if item else loss)
    except _NO_NUMBER:
        return None


def to_int(value: int | None) -> int | None:
    """Return a program's step or epoch; None of what is no number."""
    try:
        return None if value is None else int(value)
    except _NO_NUMBER:
        return None


def to_count(value: int | None) -> int | None:
    """Return the value if a report can hold it: a program may report anything as its step."""
    return value if value is not None and 0 <= value <= MAX_COUNT else None
