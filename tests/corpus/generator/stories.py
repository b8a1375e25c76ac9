"""Stories: a program, a cluster, and what goes wrong there, drawn by rule from a seed or by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from hypothesis import strategies

from tests.corpus.generator.choices import Drawn, Seeded, one_in
from tests.corpus.generator.program import Evaluation, Groups, Pipes, Semantics, Shape

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from tests.corpus.generator.choices import Choices

FOR_EVER_S = 1e9


class Kind(StrEnum):
    """What a fault is."""

    NONE = "none"
    # A call that does not fit, at one place of one rank.
    LEFT_OUT = "call left out"
    DOUBLED = "call doubled"
    MOVED = "call moved behind the next"
    OTHER_SIZE = "another size"
    OTHER_DTYPE = "another dtype"
    OTHER_ROOT = "another src"
    OTHER_OP = "another operation"
    OTHER_GROUP = "another group"
    SWALLOWED = "exception swallowed, rest of the step left out"
    EVALUATES_WRAPPED = "one rank evaluates through DDP"
    SEND_LEFT_OUT = "send left out"
    RECEIVE_LEFT_OUT = "receive left out"
    # A rank that goes no further.
    SLEEP = "sleep"
    LOCK = "lock"
    CHILD = "waits for a child process"
    LOADER = "waits for a DataLoader worker"
    FILE = "file that does not answer"
    GIL = "GIL held"
    STOP = "SIGSTOP"
    # A rank that ends.
    EXIT = "exit 0"
    RAISE = "exception"
    KILL = "SIGKILL"
    TERMINATE = "SIGTERM from outside"
    OOM = "out of memory"
    # More than one rank.
    HOST = "host lost"
    AGENT = "agent lost"
    LINK = "link between the hosts lost"
    ABSENT = "never joins"
    ALL_STAND = "all ranks stand still"
    # Time.
    SLOW = "slow"
    SLOW_NODE = "slow node"
    SLOW_IN_TURNS = "two slow in turns"
    SLOW_BACKWARD = "slow buckets"
    SLOW_INPUT = "slow input of a rank"
    # What looks odd and is fine.
    HICCUP = "hiccup"
    LONG_SAVE = "long checkpoint"
    LATE_IMPORT = "slow import"
    UNEVEN = "uneven work"
    RANK_0_EVALUATES = "rank 0 evaluates model.module"
    AGENT_ANEW = "agent restarts"
    LOSSY = "lossy telemetry"
    ENDS_WELL = "job ends well"


CALL_FAULTS = frozenset(
    {
        Kind.LEFT_OUT,
        Kind.DOUBLED,
        Kind.MOVED,
        Kind.OTHER_SIZE,
        Kind.OTHER_DTYPE,
        Kind.OTHER_ROOT,
        Kind.OTHER_OP,
        Kind.OTHER_GROUP,
        Kind.SWALLOWED,
        Kind.EVALUATES_WRAPPED,
        Kind.SEND_LEFT_OUT,
        Kind.RECEIVE_LEFT_OUT,
    }
)
STANDS = frozenset({Kind.SLEEP, Kind.LOCK, Kind.CHILD, Kind.LOADER, Kind.FILE, Kind.GIL, Kind.STOP})
ENDS = frozenset({Kind.EXIT, Kind.RAISE, Kind.KILL, Kind.TERMINATE, Kind.OOM})
SLOWNESS = frozenset({Kind.SLOW, Kind.SLOW_NODE, Kind.SLOW_IN_TURNS, Kind.SLOW_BACKWARD, Kind.SLOW_INPUT})
HEALTHY = frozenset(
    {
        Kind.NONE,
        Kind.HICCUP,
        Kind.LONG_SAVE,
        Kind.LATE_IMPORT,
        Kind.UNEVEN,
        Kind.RANK_0_EVALUATES,
        Kind.AGENT_ANEW,
        Kind.LOSSY,
        Kind.ENDS_WELL,
    }
)
KINDS = tuple(Kind)
PAIRS = tuple(sorted(STANDS | ENDS))
"""Of which two may strike one job together."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: What.
        rank: Where; of a host, an agent or a slow node, any rank on it.
        step: When: the step of that rank.
        place: At which call (of a call fault) or event of the step, counted round.
        value: A slow rank's factor, or the seconds of a stand; 0 where the kind has none.
    """

    kind: Kind
    rank: int = 0
    step: int = 1
    place: int = 0
    value: float = 0.0


PLAIN = Shape()


@dataclass(frozen=True)
class Story:
    """A program, a cluster, what goes wrong, and the seed of all that is random in it."""

    shape: Shape = PLAIN
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    mismatch_hangs: bool = True
    """NCCL only, see `exchange`."""
    root_runs_ahead: bool = False
    """NCCL only, see `exchange`."""

    @property
    def kind(self) -> str:
        """The class in which it is counted."""
        if len(self.faults) > 1:
            return "two at once"
        return str(self.faults[0].kind) if self.faults else str(Kind.NONE)


def story_of(seed: int) -> Story:
    """Return the story of a seed."""
    choices = Seeded(seed)
    return draw_story(choices, choices.pick(KINDS), choices.pick(tuple(Semantics)))


def stories(kind: Kind | None = None, semantics: Semantics | None = None) -> SearchStrategy[Story]:
    """Return hypothesis' strategy of the same stories, of one kind and one semantics where that is given."""

    @strategies.composite
    def drawn(draw: DrawFn) -> Story:
        choices = Drawn(draw)
        return draw_story(choices, kind or choices.pick(KINDS), semantics or choices.pick(tuple(Semantics)))

    return drawn()


def draw_story(choices: Choices, kind: Kind, semantics: Semantics) -> Story:
    """Draw a story of a kind."""
    shape = _fitted(_draw_shape(choices, semantics), kind)
    faults = [_draw_fault(choices, shape, kind)]
    if kind in PAIRS and one_in(choices, 6):
        # Both strike in one step: neither can be a consequence of the other.
        other = _draw_fault(choices, shape, choices.pick([Kind(name) for name in PAIRS]))
        faults.append(
            Fault(other.kind, (faults[0].rank + 1) % shape.world_size, faults[0].step, other.place, other.value)
        )
    if kind is Kind.NONE:
        faults = []
    return Story(
        shape,
        tuple(faults),
        seed=choices.between(0, 999),
        mismatch_hangs=choices.pick((True, False)),
        root_runs_ahead=choices.pick((False, True)),
    )


def _draw_shape(choices: Choices, semantics: Semantics) -> Shape:
    num_nodes, ranks_per_node = choices.pick(SIZES)
    size = num_nodes * ranks_per_node
    groups = choices.pick(tuple(Groups)) if size > 2 else Groups.NONE
    evaluation = choices.pick(tuple(Evaluation))
    saves = choices.pick((0, 0, 20, 45))
    return Shape(
        semantics=semantics,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        step_s=choices.pick((0.2, 0.1, 0.4, 0.05, 0.8)),
        buckets=choices.pick((1, 2, 3, 6, 12)),
        sizes_differ=choices.pick((False, True)),
        has_buffers=choices.pick((False, True)),
        accumulation=choices.pick((1, 1, 2, 4)),
        loss_every=choices.pick((1, 1, 10)),
        groups=groups,
        metrics_every=0 if groups is Groups.NONE else choices.pick((1, 5)),
        shares=choices.pick((False, False, True)),
        pipes=choices.pick((Pipes.NONE, Pipes.NONE, Pipes.RING, Pipes.PIPELINE)),
        evaluation=evaluation,
        evaluate_every=0 if evaluation is Evaluation.NOBODY else choices.pick((15, 30)),
        save_every=saves,
        timeout_s=choices.pick((0.0, 0.0, 20.0, 30.0)),
        noise=choices.pick((0.1, 0.0, 0.3)),
        uneven=choices.pick((0.0, 0.0, 0.04)),
        late_s=choices.pick((0.0, 0.0, 4.0)),
        drop=choices.pick((0.0, 0.0, 0.0, 0.1)),
        reports_steps=choices.pick((True, False)),
    )


SIZES = (
    *((1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (1, 2), (1, 3), (2, 2), (2, 3), (4, 1), (1, 4), (2, 2)),
    *((2, 4), (1, 8), (3, 2), (4, 2), (1, 4), (2, 2), (1, 2), (1, 4), (2, 4), (3, 2)),
    *((4, 4), (8, 2), (16, 1)),
    (8, 8),
)
"""(nodes, ranks on each): most stories are small."""


def _fitted(shape: Shape, kind: Kind) -> Shape:
    """Return the shape with what a kind needs to happen, and without what would hide it."""
    if shape.world_size > 16:
        shape = replace(shape, step_s=max(shape.step_s, 0.4), buckets=min(shape.buckets, 3))
    if kind in SLOWNESS:
        shape = replace(shape, uneven=0.0, save_every=0, evaluate_every=0, noise=min(shape.noise, 0.1))
    shape = replace(shape, **_needed(shape, kind))  # type: ignore[arg-type]
    # A time-out ends what it is too short for.
    is_too_short = 0 < shape.timeout_s < max(shape.save_s, shape.evaluate_s) + 10
    return replace(shape, timeout_s=0.0) if is_too_short else shape


def _needed(shape: Shape, kind: Kind) -> dict[str, object]:
    if kind in (Kind.SEND_LEFT_OUT, Kind.RECEIVE_LEFT_OUT) and shape.pipes is Pipes.NONE:
        return {"pipes": Pipes.PIPELINE}
    if kind is Kind.OTHER_GROUP and shape.groups is Groups.NONE and shape.world_size > 2:
        return {"groups": Groups.HALVES, "metrics_every": 1}
    if kind in (Kind.LINK, Kind.HOST, Kind.AGENT, Kind.SLOW_NODE) and shape.num_nodes == 1:
        return {"num_nodes": 2}
    if kind is Kind.RANK_0_EVALUATES:
        return {"evaluation": Evaluation.RANK_0, "evaluate_every": int(15 / shape.step_s), "evaluate_s": 3.0}
    if kind is Kind.ENDS_WELL:
        return {"num_steps": max(10, int(8 / shape.step_s))}
    return NEEDED.get(kind, {})


NEEDED: dict[Kind, dict[str, object]] = {
    Kind.OTHER_ROOT: {"shares": True},
    Kind.EVALUATES_WRAPPED: {"has_buffers": True, "evaluation": Evaluation.RANK_0, "evaluate_every": 15},
    Kind.LONG_SAVE: {"save_every": 20, "save_s": 15.0},
    Kind.LATE_IMPORT: {"late_s": 25.0},
    Kind.UNEVEN: {"uneven": 0.05, "noise": 0.3},
    Kind.LOSSY: {"drop": 0.2, "noise": 0.5},
}


def _draw_fault(choices: Choices, shape: Shape, kind: Kind) -> Fault:
    # Strikes between two and twelve seconds after the first step.
    earliest, latest = max(2, int(2 / shape.step_s)), max(6, int(10 / shape.step_s))
    step = choices.between(earliest, latest)
    if kind is Kind.EVALUATES_WRAPPED:
        step = shape.evaluate_every
    rank = 0 if kind is Kind.EVALUATES_WRAPPED else choices.between(0, shape.world_size - 1)
    return Fault(kind, rank, step, choices.between(0, 19), _draw_value(choices, kind))


def _draw_value(choices: Choices, kind: Kind) -> float:
    if kind in SLOWNESS:
        return choices.pick((2.0, 1.5, 1.3, 3.0, 5.0))
    if kind is Kind.HICCUP:
        return choices.pick((1.0, 3.0, 6.0))
    return FOR_EVER_S if kind in STANDS or kind is Kind.ALL_STAND else 0.0
