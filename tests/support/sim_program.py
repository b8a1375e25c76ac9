"""The little training program that simulated ranks run, and the collectives in which they meet.

A program is a generator of actions. Time is virtual: an action that takes time says how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import tee

from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, FIRST_GROUP, Phase

PROGRAM_FILE = "/home/user/project/bytegpt.py"


@dataclass(frozen=True)
class Work:
    """Something that the rank does alone."""

    phase: Phase
    line: int
    function: str
    for_s: float
    is_standing: bool = False
    """The main thread does not move all the while: it sleeps, or waits for something."""
    is_computing: bool = False
    """It stands at its line and keeps a core busy."""
    child_pid: int = 0
    """A process that it waits for."""
    is_in_monitored_barrier: bool = False


@dataclass(frozen=True)
class Peer:
    """A send to another rank, or a receive from it; over when that rank has called its half."""

    op: str
    peer: int
    line: int
    function: str
    tag: int = 0
    phase: Phase = Phase.BARRIER

    group: str = DEFAULT_GROUP


@dataclass(frozen=True)
class Linger:
    """The program is done, and a thread of it keeps the process from ending."""

    thread: str
    line: int
    for_s: float


@dataclass(frozen=True)
class Call:
    """A collective; over when every member has made the same call."""

    op: str
    line: int
    function: str
    group: str = DEFAULT_GROUP
    label: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    phase: Phase = Phase.BARRIER
    dtype: str = "Float"
    root: int | None = None
    """Its source or destination, where it has one."""
    reduce_op: str = ""
    is_behind: bool = False
    """The rank works on, as behind DDP's reductions, and waits at the next `WaitBehind`."""


@dataclass(frozen=True)
class WaitBehind:
    """Until all calls are over that were left behind, as at the end of DDP's backward."""

    line: int
    function: str
    phase: Phase = Phase.BACKWARD


@dataclass(frozen=True)
class BeginStep:
    """The point at which faults strike."""

    step: int


@dataclass(frozen=True)
class EndStep:
    """What `report_step` tells."""

    step: int
    loss: float | None
    epoch: int


Action = Work | Peer | Linger | Call | WaitBehind | BeginStep | EndStep
Program = Callable[[int], Iterator[Action]]


class Actions:
    """The actions of one rank; a copy goes on where the other stands, which a generator's cannot."""

    def __init__(self, actions: Iterator[Action]) -> None:
        self._actions = actions

    def take(self) -> Action | None:
        """Return the next action; None at the end."""
        return next(self._actions, None)

    def __reduce__(self) -> tuple[Callable[[int], Actions], tuple[int]]:
        self._actions, kept = tee(self._actions)
        _COPIED.append(kept)
        return _copy, (len(_COPIED) - 1,)


_COPIED: list[Iterator[Action]] = []


def _copy(place: int) -> Actions:
    _COPIED[place], actions = tee(_COPIED[place])
    return Actions(actions)


@dataclass(frozen=True)
class Training:
    """A DDP training: each step ends in an all_reduce inside backward, each epoch in a named barrier.

    Call it with a rank to get that rank's actions.
    """

    num_steps: int | None = None
    epoch_steps: int = 100
    data_s: float = 0.003
    forward_s: float = 0.008
    backward_s: float = 0.016
    optimizer_s: float = 0.004
    eval_s: float = 0.4
    checkpoint_s: float = 0.3
    longer_checkpoints: Sequence[tuple[int, float]] = ()
    """(step, seconds) of checkpoints that take another time."""
    slow_input: Sequence[tuple[int, float]] = ()
    """(rank, seconds) of ranks whose batches take another time."""
    skipped_calls: Sequence[tuple[int, int]] = ()
    """(rank, step) pairs in which a rank leaves out the all_reduce."""
    extra_calls: Sequence[tuple[int, int, Call]] = ()
    """(rank, step, call): calls that a rank makes beside the others', before its forward."""

    def __call__(self, rank: int) -> Iterator[Action]:
        yield Call("broadcast", 88, "main", sizes=((120_000,),))
        step = 0
        while self.num_steps is None or step < self.num_steps:
            step += 1
            yield from self._step(rank, step)
            if step % self.epoch_steps == 0:
                yield from self._end_epoch(rank, step)
        yield Call("barrier", 101, "main", BARRIER_GROUP, "finish")

    def _step(self, rank: int, step: int) -> Iterator[Action]:
        yield BeginStep(step)
        yield Work(Phase.DATA, 120, "next_batch", dict(self.slow_input).get(rank, self.data_s))
        yield from (call for one, when, call in self.extra_calls if (one, when) == (rank, step))
        yield Work(Phase.FORWARD, 138, "train_step", self.forward_s)
        yield Work(Phase.BACKWARD, 142, "train_step", self.backward_s)
        if (rank, step) not in self.skipped_calls:
            yield Call("all_reduce", 142, "train_step", sizes=((120_000,),), phase=Phase.BACKWARD)
        yield Work(Phase.OPTIMIZER, 143, "train_step", self.optimizer_s)
        yield EndStep(step, 1.5 + 4.0 / (1 + step / 50), step // self.epoch_steps)

    def _end_epoch(self, rank: int, step: int) -> Iterator[Action]:
        yield Work(Phase.EVAL, 160, "evaluate", self.eval_s)
        yield Call("all_reduce", 161, "evaluate", sizes=((2,),))
        if rank == 0:
            yield Work(Phase.CHECKPOINT, 170, "save", dict(self.longer_checkpoints).get(step, self.checkpoint_s))
        yield Call("barrier", 175, "train", BARRIER_GROUP, "epoch")


@dataclass(frozen=True)
class FirstBlock:
    """A program whose ranks let the first one of each group prepare something, each time before a step of all.

    Args:
        groups: Members of each node's block; empty for one block of the whole job.
        prepare_s: What the first one takes, in each turn.
        late: (rank, seconds) by which a rank comes late to the first block.
    """

    groups: Sequence[tuple[int, ...]] = ()
    prepare_s: Sequence[float] = (30.0,)
    late: Sequence[tuple[int, float]] = ()

    def group_of(self, rank: int) -> tuple[str, int]:
        """Return the name of a rank's group, and who goes first there."""
        for members in self.groups:
            if rank in members:
                return f"{FIRST_GROUP}node {members[0]}/corpus", members[0]
        return f"{FIRST_GROUP}/corpus", 0

    def __call__(self, rank: int) -> Iterator[Action]:
        group, first = self.group_of(rank)
        yield Call("broadcast", 88, "main", sizes=((120_000,),))
        for latecomer, late_s in self.late:
            if latecomer == rank:
                yield Work(Phase.OTHER, 20, "wander", late_s)
        for step, prepare_s in enumerate(self.prepare_s, start=1):
            yield BeginStep(step)
            if rank == first:
                yield Work(Phase.DATA, 30, "tokenize", prepare_s)
            yield Call("barrier", 31, "prepare", group, "first: corpus")
            yield Work(Phase.DATA, 32, "read", 0.01)
            yield Call("all_reduce", 40, "train_step", sizes=((120_000,),), phase=Phase.BACKWARD)
            yield EndStep(step, 1.0, 0)
        yield Call("barrier", 101, "main", BARRIER_GROUP, "finish")


@dataclass
class Meeting:
    """One collective under way: who has come, with which call, when."""

    members: tuple[int, ...]
    calls: dict[int, Call] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    is_cut: bool = False
    is_of_peers: bool = False
    """It is a send and its receive, which need no more than to be there."""
    last_s: float = 0.0
    """When the last of those came that are there."""
    _meant: set[tuple[object, ...]] = field(default_factory=set)
    _is_first_block: bool = False

    def join(self, rank: int, now_s: float, call: Call | None = None) -> None:
        """Let a rank come, with its call unless it is of peers. All else is asked in each tick, by each rank."""
        self.last_s = max(self.last_s, now_s) if self.arrived_s else now_s
        self.arrived_s[rank] = now_s
        if call is not None:
            self.calls[rank] = call
            self._meant.add((call.op, call.label, call.sizes, call.dtype, call.root))
            self._is_first_block |= call.group.startswith(FIRST_GROUP)

    def is_agreed(self) -> bool:
        """Return whether all members have come and mean the same; in a first-block, whether its first one has."""
        if self.is_of_peers:
            return not self.is_cut and len(self.arrived_s) == len(self.members)
        if self._is_first_block:
            return self.members[0] in self.calls
        return not self.is_cut and len(self._meant) == 1 and len(self.calls) == len(self.members)
