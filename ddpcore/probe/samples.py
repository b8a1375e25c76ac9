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
)

if TYPE_CHECKING:
    from ddpcore.probe.stack import Reading


CounterKey = tuple[str, int]
"""A flight recorder's name (`gloo`, `nccl`) and its process-local index of a process group.

The index differs between ranks: it never leaves this process.
"""

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
    """When this rank called it: microseconds of the machine's wall clock, 0 where that is not told."""
    dtypes: tuple[str, ...] = ()
    """Element types of its inputs: `Float`."""
    p2p_seq: int = 0
    """`p2p_seq_id`: counts this rank's sends and receives in the group, those of a batch as one."""
    root: int | None = None
    """Global rank of its source or destination, where `ddpcore.probe.program_calls` knows it."""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """What the main thread has passed to the collective that it waits in, beside tensors."""

    op: str
    """The function of torch.distributed: `broadcast`."""
    root: int | None = None
    """Global rank of its source or destination, where that was passed."""
    group_root: int | None = None
    """The same as a rank of the group."""
    reduce_op: str = ""
    """`SUM`."""


class StepEnd(NamedTuple):
    """When a step was finished."""

    step: int
    at_us: int
    """Microseconds of the wall clock that the recorder uses too."""


class RecorderDump(NamedTuple):
    """A full dump of the flight recorders."""

    entries: Sequence[RecorderEntry]
    counters: Counters
    """Taken together with the entries."""


class GroupMembers(msgspec.Struct, frozen=True):
    """Who belongs to a process group of this rank."""

    ranks: tuple[int, ...]
    """Sorted global ranks."""
    is_mixed: bool = False
    """True when gloo and NCCL both serve the group, each with its own count of collectives."""
    description: str = ""
    """What the program calls it: `group_desc`."""
    is_sorted: bool = True
    """Its members are numbered within it in the order of their global ranks."""


class Recorder(Protocol):
    """Where the probe reads collectives (`ddpcore.probe.flight_recorder`)."""

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
        """Say whether the default group exists."""

    def num_openings(self) -> int:
        """Return how many default groups there have been."""


class StepMark(NamedTuple):
    """What the program said at its last call of `report_step`, or what its optimizers were counted to."""

    step: int
    loss: float | None
    epoch: int | None
    loss_first: float | None
    steps_done: int
    is_counted: bool = False
    """The program has said nothing: `step` counts what its optimizers do in this process."""


class BarrierMark(NamedTuple):
    """The last call of a named gate."""

    label: str
    seq: int
    """This rank's count of calls."""
    entered_s: float
    is_over: bool
    group: str = BARRIER_GROUP
    """The pretended group that it counts in."""
    ranks: tuple[int, ...] = ()
    """Its members; empty means every rank."""


class TrainingMark(NamedTuple):
    """What the engine has said of its training."""

    last_step: int | None = None
    goodput_frac: float | None = None
    checkpoint_step: int | None = None
    checkpoint_taken_s: float | None = None
    """Monotonic time of this process."""


class Uncaught(NamedTuple):
    """The exception that ends the program."""

    text: str
    place: Place | None
    """The user's line that raised it."""
    phase: Phase = Phase.OTHER
    """What the rank did there."""


class MainLook(NamedTuple):
    """Where the main thread stands, and what it waits for there outside collectives, as far as that is known."""

    mark: int = 0
    """Of all its frames: it has moved when another is found. 0 where nobody has looked."""
    peer_wait: PeerWait | None = None
    child_wait: ChildWait | None = None
    exit_wait: ExitWait | None = None
    store_meeting: StoreMeeting | None = None


NOTHING = MainLook()
"""Of a main thread that nobody has looked at."""


class Sample(msgspec.Struct, frozen=True, gc=False):
    """One tick."""

    now_s: float
    counters: Counters
    reading: Reading
    """What the main thread's stack says."""
    has_process_group: bool
    step: StepMark | None = None
    phases: tuple[Phase, ...] = ()
    """The program's own `phase` marks, innermost last."""
    barrier: BarrierMark | None = None
    firsts: tuple[BarrierMark, ...] = ()
    """The last call of each of the latest first-blocks."""
    slow_factor: float = 1.0
    can_stop: bool = False
    training: TrainingMark | None = None
    gpu_memory: tuple[GpuMemoryReport, ...] = ()
    anomalies: tuple[Anomaly, ...] = ()
    num_openings: int = 0
    """How many default groups there have been, asked after the counters."""
    is_at_work: bool = False
    """Something is under way and the main thread runs or sleeps by itself: it does not wait for that."""
    tick: int = 0
    """Number of the slow beat, which all ranks of a machine count alike."""
    main: MainLook = NOTHING
    peer_calls: tuple[PeerCall, ...] = ()
    """The last send or receive of each kind, the latest first."""
    num_peer_calls: int = 0
    """How many there have been: another number with each."""
    uncaught: Uncaught | None = None
    """From then on the program is over, and the interpreter ends."""
