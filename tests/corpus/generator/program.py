"""Programs by rule: what each rank does in each step, as a list of events with the lines of a source file.

The times are those of a rank that nobody disturbs. A program knows nothing of faults (`mutations` changes its lists)
and nothing of gloo or NCCL (`exchange` and `rank` decide when a call is over).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, FIRST_GROUP, MONITORED_BARRIER, NEW_GROUP, Phase
from tests.support.sim_program import BeginStep, EndStep, Work

BUFFER_ELEMENTS = 2_048
BUCKET_ELEMENTS = 250_000
PIPE_ELEMENTS = 65_536
GATE = "gate"
FLOAT = 4
"""Bytes of an element unless an event names others."""


class Semantics(StrEnum):
    """Whose rules decide when a call is over."""

    GLOO = "gloo"
    NCCL = "nccl"


class Groups(StrEnum):
    """Process groups beside the one of all ranks."""

    NONE = "none"
    HALVES = "halves"
    PAIRS = "pairs"
    NODES = "nodes"


class Pipes(StrEnum):
    """What the ranks send to each other in a step."""

    NONE = "none"
    RING = "ring"
    """batch_isend_irecv: to the next, from the one before."""
    PIPELINE = "pipeline"
    """recv from the one before, work, send to the next."""


class Evaluation(StrEnum):
    """Who evaluates."""

    NOBODY = "nobody"
    ALL = "all"
    RANK_0 = "rank 0"
    """Through `model.module`, while the others wait in a barrier."""


@dataclass(frozen=True)
class Shape:
    """A program and the cluster it runs on.

    Attributes:
        step_s: Time of one step on an undisturbed rank.
        buckets: all_reduce calls of one backward.
        sizes_differ: Whether the buckets are of different sizes, as they are in most models.
        has_buffers: Whether DDP broadcasts buffers before each forward.
        accumulation: Forwards and backwards in one step; only the last is synchronized.
        loss_every: Steps between two `.item()` of the loss, which is what synchronizes a CUDA program.
        metrics_every: Steps between two collectives of the sub-groups; 0 where there are none.
        shares: Whether the program broadcasts something from rank 0 in each step.
        evaluate_every: Steps.
        save_every: Steps between two checkpoints by rank 0, each followed by a barrier; 0 without.
        num_steps: After which the program ends; 0 for one that goes on.
        timeout_s: Of the process groups; 0 for none.
        noise: By which fraction each piece of work is longer or shorter at random.
        uneven: By which fraction rank r is slower than rank 0, at r = world size - 1.
        late_s: By which the last rank's import is longer than the others'.
        drop: Share of telemetry that is lost.
        reports_steps: Whether the program reports its steps (its optimizer is counted else).
        gates_every: Steps between two named barriers of `ddpcore`; 0 without.
        averages: Whether the program reduces its loss itself in each step.
        first_s: How long rank 0 prepares something before the others, in a first-block; 0 without.
        monitored_every: Steps between two calls of `monitored_barrier`, which only gloo has; 0 without.
        makes_group: Whether the program makes a gloo group of all ranks, for whatever it does later.
        gathers: Whether rank 0 gathers something in each step.
        spread_s: By up to how much the ranks' imports differ.
        launch_late_s: By which the last node's launcher starts later.
        late_probes_s: By up to how much a probe's look comes late.
        is_timed: Whether NCCL's recorder shows when calls begin on the GPU, and how long each takes there.
    """

    semantics: Semantics = Semantics.GLOO
    num_nodes: int = 1
    ranks_per_node: int = 2
    step_s: float = 0.2
    buckets: int = 1
    sizes_differ: bool = False
    has_buffers: bool = False
    accumulation: int = 1
    loss_every: int = 1
    groups: Groups = Groups.NONE
    metrics_every: int = 0
    shares: bool = False
    pipes: Pipes = Pipes.NONE
    evaluation: Evaluation = Evaluation.NOBODY
    evaluate_every: int = 0
    evaluate_s: float = 0.5
    save_every: int = 0
    save_s: float = 0.5
    num_steps: int = 0
    timeout_s: float = 0.0
    noise: float = 0.1
    uneven: float = 0.0
    late_s: float = 0.0
    drop: float = 0.0
    reports_steps: bool = True
    gates_every: int = 0
    averages: bool = False
    first_s: float = 0.0
    monitored_every: int = 0
    makes_group: bool = False
    gathers: bool = False
    launch_late_s: float = 0.0
    spread_s: float = 0.0
    late_probes_s: float = 0.0
    is_timed: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.ranks_per_node

    def members(self) -> dict[str, tuple[int, ...]]:
        """Return the sub-groups: c10d's names, and who belongs to each."""
        size, per_node = self.world_size, self.ranks_per_node
        width = {
            Groups.NONE: 0,
            Groups.HALVES: (size + 1) // 2,
            Groups.PAIRS: 2,
            Groups.NODES: per_node,
        }[self.groups]
        if width == 0:
            return {}
        starts = range(0, size, width)
        return {str(index + 1): tuple(range(at, min(at + width, size))) for index, at in enumerate(starts)}

    def group_of(self, rank: int) -> str:
        """Return the sub-group of a rank, that of all where it has none."""
        return next((name for name, members in self.members().items() if rank in members), DEFAULT_GROUP)


@dataclass(frozen=True)
class Collective:
    """A call of a collective by one rank."""

    op: str
    line: int
    function: str
    elements: int = 1
    group: str = DEFAULT_GROUP
    root: int = -1
    """`src` or `dst` as a global rank; -1 where the operation has none."""
    element_bytes: int = FLOAT
    phase: Phase = Phase.BARRIER
    """BARRIER: called by the program. FORWARD, BACKWARD: by DDP."""
    waits: bool = True
    """False: async_op=True, or one of DDP's buckets; `Settle` waits for it."""
    reduce_op: str = "SUM"


@dataclass(frozen=True)
class Transfer:
    """A send or a receive by one rank."""

    is_send: bool
    peer: int
    line: int
    function: str
    elements: int = PIPE_ELEMENTS
    waits: bool = True

    @property
    def op(self) -> str:
        """Its name in torch."""
        return "send" if self.is_send else "recv"


@dataclass(frozen=True)
class Meet:
    """A place where all ranks wait for each other, or for the first one, and which no recorder holds.

    Attributes:
        op: `MONITORED_BARRIER` and `NEW_GROUP` of torch, `GATE` of ddpcore.
        group: Under which a gate is counted.
        label: Of a gate.
    """

    op: str
    line: int
    function: str
    group: str = ""
    label: str = ""


@dataclass(frozen=True)
class Settle:
    """The wait for all calls made without waiting."""

    line: int
    function: str
    phase: Phase = Phase.OTHER


@dataclass(frozen=True)
class ReadLoss:
    """`.item()`: a CUDA program waits here for all that its GPU has to do; a CPU program does not wait."""

    line: int
    function: str


@dataclass(frozen=True)
class Harm:
    """What a fault does to the rank that comes here; put in by `mutations`."""

    kind: str
    value: float = 0.0
    is_odd: bool = False
    """It is none, and only looks so."""


Event = Work | Collective | Transfer | Meet | Settle | ReadLoss | Harm | BeginStep | EndStep


def bucket_elements(shape: Shape, index: int) -> int:
    """Return the elements of a bucket: the first of DDP's is smaller than the others, the last what is left."""
    if not shape.sizes_differ:
        return BUCKET_ELEMENTS
    return BUCKET_ELEMENTS // 4 if index == 0 else BUCKET_ELEMENTS + 1_000 * index


def opening(shape: Shape, rank: int = 0) -> list[Event]:
    """Return what a program does before its first step.

    DDP's constructor calls two collectives: the shapes of all parameters, then the parameters of rank 0.
    """
    first: list[Event] = []
    if shape.first_s:
        own = [Work(Phase.DATA, 30, "tokenize", shape.first_s)] if rank == 0 else []
        first += [*own, Meet(GATE, 31, "prepare", f"{FIRST_GROUP}/corpus", "first: corpus")]
    if shape.makes_group:
        first.append(Meet(NEW_GROUP, 35, "main"))
    built = Work(Phase.OTHER, 84, "main", 0.3)
    shapes = Collective("all_gather", 88, "main", elements=2)
    weights = Collective("broadcast", 88, "main", elements=BUCKET_ELEMENTS, root=0)
    return [*first, built, shapes, weights]


def ending() -> list[Event]:
    """Return what a program does last."""
    return [Collective("barrier", 101, "main")]


def step_of(shape: Shape, rank: int, step: int) -> list[Event]:
    """Return what a rank does in a step."""
    events: list[Event] = [BeginStep(step)]
    for part in range(shape.accumulation):
        events += _forward_and_backward(shape, part)
    if shape.metrics_every and step % shape.metrics_every == 0 and shape.group_of(rank) != DEFAULT_GROUP:
        events.append(Collective("all_reduce", 150, "sync_metrics", elements=16, group=shape.group_of(rank)))
    events += _own_calls(shape)
    events += _transfers(shape, rank)
    events.append(Work(Phase.OPTIMIZER, 143, "train_step", 0.12 * shape.step_s))
    if step % shape.loss_every == 0:
        events.append(ReadLoss(145, "train_step"))
    events.append(EndStep(step, 1.5 + 4.0 / (1 + step / 50), 0))
    if shape.evaluate_every and step % shape.evaluate_every == 0:
        events += _evaluate(shape, rank)
    if shape.save_every and step % shape.save_every == 0:
        if rank == 0:
            events.append(Work(Phase.CHECKPOINT, 170, "save", shape.save_s))
        events.append(Collective("barrier", 175, "train"))
    return [*events, *_meetings(shape, step)]


def _own_calls(shape: Shape) -> list[Event]:
    """Return what the program itself calls in each step."""
    events: list[Event] = []
    if shape.averages:
        events.append(Collective("all_reduce", 147, "average_loss"))
    if shape.shares:
        events.append(Collective("broadcast", 148, "share_seed", elements=1_024, root=0))
    if shape.gathers:
        events.append(Collective("gather", 149, "gather_losses", root=0))
    return events


def _forward_and_backward(shape: Shape, part: int) -> list[Event]:
    share = shape.step_s / shape.accumulation
    is_synchronized = part == shape.accumulation - 1
    events: list[Event] = [Work(Phase.DATA, 120, "next_batch", 0.08 * share)]
    if shape.has_buffers and is_synchronized:
        events.append(buffers_of(138, "train_step"))
    events.append(Work(Phase.FORWARD, 138, "train_step", 0.3 * share))
    if not is_synchronized:
        return [*events, Work(Phase.BACKWARD, 142, "train_step", 0.5 * share)]
    for bucket in range(shape.buckets):
        events.append(Work(Phase.BACKWARD, 142, "train_step", 0.5 * share / shape.buckets))
        elements = bucket_elements(shape, bucket)
        events.append(
            Collective("all_reduce", 142, "train_step", elements, phase=Phase.BACKWARD, waits=False),
        )
    return [*events, Settle(142, "train_step", Phase.BACKWARD)]


def buffers_of(line: int, function: str) -> Collective:
    """Return the broadcast by which a forward through DDP begins."""
    return Collective("broadcast", line, function, elements=BUFFER_ELEMENTS, root=0, phase=Phase.FORWARD)


def _transfers(shape: Shape, rank: int) -> list[Event]:
    size = shape.world_size
    if shape.pipes is Pipes.RING:
        after, before = (rank + 1) % size, (rank - 1) % size
        return [
            Transfer(True, after, 155, "exchange", waits=False),
            Transfer(False, before, 155, "exchange", waits=False),
            Settle(156, "exchange"),
        ]
    if shape.pipes is Pipes.PIPELINE:
        received = [Transfer(False, rank - 1, 153, "stage")] if rank > 0 else []
        sent = [Transfer(True, rank + 1, 155, "stage")] if rank < size - 1 else []
        return [*received, Work(Phase.FORWARD, 154, "stage", 0.02 * shape.step_s), *sent]
    return []


def _meetings(shape: Shape, step: int) -> list[Event]:
    events: list[Event] = []
    if shape.gates_every and step % shape.gates_every == 0:
        events.append(Meet(GATE, 177, "train", BARRIER_GROUP, "part done"))
    if shape.monitored_every and step % shape.monitored_every == 0:
        events.append(Meet(MONITORED_BARRIER, 178, "train"))
    return events


def _evaluate(shape: Shape, rank: int) -> list[Event]:
    if shape.evaluation is Evaluation.ALL:
        return [Work(Phase.EVAL, 160, "evaluate", shape.evaluate_s), Collective("all_reduce", 161, "evaluate", 2)]
    if shape.evaluation is Evaluation.RANK_0:
        own = [Work(Phase.EVAL, 160, "evaluate", shape.evaluate_s)] if rank == 0 else []
        return [*own, Collective("barrier", 163, "evaluate")]
    return []
