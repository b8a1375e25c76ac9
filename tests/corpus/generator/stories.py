"""Stories: a program, a cluster, and what goes wrong there, drawn by rule from a seed or by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from hypothesis import strategies

from tests.corpus.generator.choices import Drawn, Seeded, one_in
from tests.corpus.generator.kinds import (
    EARLIER_KINDS,
    ENDS,
    ENDS_SLOWLY,
    GLOO_ONLY,
    HEALTHY,
    KEPT,
    LATER_KINDS,
    LATEST_KINDS,
    LEAKS,
    NCCL_ONLY,
    ODD,
    PAIRS,
    SLOWNESS,
    STANDS,
    STANDS_AT_A_CALL,
    Kind,
)
from tests.corpus.generator.program import Evaluation, Groups, Pipes, Semantics, Shape

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from tests.corpus.generator.choices import Choices

FOR_EVER_S = 1e9
NEVER_S = 600.0


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: What.
        rank: Where; of a host, an agent or a slow node, any rank on it.
        step: When: the step of that rank.
        place: At which call (of a call fault) or event of the step, counted round.
        value: A slow rank's factor, the seconds of a stand, or those until memory runs out; 0 where the kind has none.
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
        faults = [fault for fault in self.faults if fault.kind not in HEALTHY] or list(self.faults)
        if self.faults and self.faults[0].kind is Kind.FAILS_AGAIN:
            return str(Kind.FAILS_AGAIN)
        if len(faults) > 1:
            return "two at once" if len(faults) == 2 else "three at once"
        if len(self.faults) > 1:
            return "fault behind something odd"
        return str(faults[0].kind) if faults else str(Kind.NONE)


LATER_SHARE = 0.4
"""Of the seeds: their stories are drawn by the later rule. The others mean what they meant before there was one."""
LATEST_SHARE = 0.04
"""Of the seeds: the same of the latest rule."""


def story_of(seed: int) -> Story:
    """Return the story of a seed."""
    choices = Seeded(seed)
    if Random(f"latest rule of {seed}").random() < LATEST_SHARE:
        kind = choices.pick(LATEST_KINDS)
        return draw_story(choices, kind, _semantics_of(choices, kind), is_rich=True)
    if Random(f"rule of {seed}").random() >= LATER_SHARE:
        return draw_story(choices, choices.pick(EARLIER_KINDS), choices.pick(tuple(Semantics)))
    kind = choices.pick((*LATER_KINDS * 3, *EARLIER_KINDS))
    return draw_story(choices, kind, _semantics_of(choices, kind), is_rich=True)


def _semantics_of(choices: Choices, kind: Kind) -> Semantics:
    if kind in GLOO_ONLY:
        return Semantics.GLOO
    return Semantics.NCCL if kind in NCCL_ONLY else choices.pick(tuple(Semantics))


def stories(kind: Kind | None = None, semantics: Semantics | None = None) -> SearchStrategy[Story]:
    """Return hypothesis' strategy of the same stories, of one kind and one semantics where that is given."""

    @strategies.composite
    def drawn(draw: DrawFn) -> Story:
        choices = Drawn(draw)
        chosen = kind or choices.pick((*EARLIER_KINDS, *LATER_KINDS, *LATEST_KINDS))
        is_rich = chosen in LATER_KINDS + LATEST_KINDS or choices.pick((False, True))
        return draw_story(choices, chosen, semantics or _semantics_of(choices, chosen), is_rich=is_rich)

    return drawn()


def draw_story(choices: Choices, kind: Kind, semantics: Semantics, *, is_rich: bool = False) -> Story:
    """Draw a story of a kind; a rich one by the later rule."""
    drawn = _draw_shape(choices, semantics)
    shape = _fitted(_enriched(choices, drawn) if is_rich else drawn, kind)
    faults = [_draw_fault(choices, shape, kind)]
    if kind in PAIRS and one_in(choices, 6):
        for number in range(1, 1 + (choices.pick((1, 2)) if is_rich and shape.world_size > 2 else 1)):
            # All strike in one step: none can be a consequence of another.
            other = _draw_fault(choices, shape, choices.pick([Kind(name) for name in PAIRS]))
            faults.append(replace(other, rank=(faults[0].rank + number) % shape.world_size, step=faults[0].step))
    elif is_rich and kind in STANDS | ENDS and one_in(choices, 3):
        odd = choices.pick(ODD)
        value = choices.pick((1.0, 3.0)) if odd is Kind.HICCUP else 0.0
        earlier = max(1, faults[0].step - choices.between(1, 10))
        faults.insert(0, Fault(odd, choices.between(0, shape.world_size - 1), earlier, choices.between(0, 19), value))
    elif kind is Kind.FAILS_AGAIN:
        faults.append(_draw_fault(choices, shape, choices.pick((Kind.SLEEP, Kind.STOP, Kind.LOCK))))
    if kind is Kind.NONE:
        faults = []
    story = Story(
        shape,
        tuple(faults),
        seed=choices.between(0, 999),
        mismatch_hangs=choices.pick((True, False)),
        root_runs_ahead=choices.pick((False, True)),
    )
    is_timed = shape.semantics is Semantics.NCCL and choices.pick((True, True, False))
    return replace(story, shape=replace(shape, is_timed=is_timed))


def _enriched(choices: Choices, shape: Shape) -> Shape:
    """Return a shape with what the programs and clusters of the later rule may have beside the others'."""
    return replace(
        shape,
        gates_every=choices.pick((0, 0, 5, 15)),
        averages=choices.pick((False, False, True)),
        first_s=choices.pick((0.0, 0.0, 1.0, 4.0)),
        monitored_every=choices.pick((0, 0, 10)) if shape.semantics is Semantics.GLOO else 0,
        makes_group=choices.pick((False, False, True)),
        spread_s=choices.pick((0.0, 0.0, 3.0, 8.0)),
        late_probes_s=choices.pick((0.0, 0.0, 0.0, 0.3)),
        gathers=choices.pick((False, False, False, True)),
        launch_late_s=choices.pick((0.0, 0.0, 0.0, 5.0)),
        timeout_s=choices.pick((0.0, shape.timeout_s, 5.0)),
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
    if kind in LEAKS | KEPT or kind is Kind.OTHER_JOB:
        shape = replace(shape, **_small(shape))  # type: ignore[arg-type]
    shape = replace(shape, **_needed(shape, kind))  # type: ignore[arg-type]
    # A time-out ends what it is too short for.
    is_too_short = 0 < shape.timeout_s < max(shape.save_s, shape.evaluate_s) + 10
    return replace(shape, timeout_s=0.0) if is_too_short else shape


def _small(shape: Shape) -> dict[str, object]:
    """Return what keeps a story cheap that takes its time, or has two jobs."""
    if shape.world_size <= 8:
        return {}
    return {"num_nodes": min(shape.num_nodes, 4), "ranks_per_node": min(shape.ranks_per_node, 2)}


def _needed(shape: Shape, kind: Kind) -> dict[str, object]:
    if kind in (Kind.SEND_LEFT_OUT, Kind.RECEIVE_LEFT_OUT) and shape.pipes is Pipes.NONE:
        return {"pipes": Pipes.PIPELINE}
    if kind is Kind.GROUP_ORDER or (kind is Kind.OTHER_GROUP and shape.groups is Groups.NONE and shape.world_size > 2):
        return {"groups": Groups.HALVES if shape.world_size > 2 else Groups.NONE, "metrics_every": 1}
    if kind in OF_NODES and shape.num_nodes == 1:
        return {"num_nodes": 2, **NEEDED.get(kind, {})}
    if kind is Kind.RANK_0_EVALUATES:
        return {"evaluation": Evaluation.RANK_0, "evaluate_every": int(15 / shape.step_s), "evaluate_s": 3.0}
    if kind in KEPT or kind in (Kind.ENDS_WELL, Kind.SLOW_END):
        return {"num_steps": max(10, int(8 / shape.step_s))}
    return NEEDED.get(kind, {})


OF_NODES = frozenset({Kind.LINK, Kind.HOST, Kind.AGENT, Kind.SLOW_NODE, Kind.LATE_LAUNCH, Kind.NEVER_LAUNCHED})
"""They need more than one."""
NEEDED: dict[Kind, dict[str, object]] = {
    Kind.OTHER_ROOT: {"shares": True},
    Kind.EVALUATES_WRAPPED: {"has_buffers": True, "evaluation": Evaluation.RANK_0, "evaluate_every": 15},
    Kind.LONG_SAVE: {"save_every": 20, "save_s": 15.0},
    Kind.LATE_IMPORT: {"late_s": 25.0},
    Kind.UNEVEN: {"uneven": 0.05, "noise": 0.3},
    Kind.LOSSY: {"drop": 0.2, "noise": 0.5},
    Kind.OTHER_REDUCE_OP: {"averages": True},
    Kind.OTHER_DST: {"gathers": True},
    Kind.LATE_LAUNCH: {"launch_late_s": 25.0},
    Kind.NEVER_LAUNCHED: {"launch_late_s": NEVER_S},
    Kind.NEW_GROUP_LEFT_OUT: {"makes_group": True},
    Kind.OTHER_MEMBERS: {"makes_group": False},
    Kind.NOT_MONITORED: {"monitored_every": 10},
    Kind.FIRST_STANDS: {"first_s": 1.0},
    Kind.FIRST_TAKES_LONG: {"first_s": 8.0},
    Kind.LATE_IMPORTS: {"spread_s": 30.0},
    Kind.CROWDED: {"late_probes_s": 2.0, "noise": 0.3},
    Kind.SLOW_RARELY: {"step_s": 0.1},
    Kind.EPOCH_MEMORY: {"evaluation": Evaluation.ALL, "evaluate_every": 30},
}


def _draw_fault(choices: Choices, shape: Shape, kind: Kind) -> Fault:
    # Strikes between two and twelve seconds after the first step.
    earliest, latest = max(2, int(2 / shape.step_s)), max(6, int(10 / shape.step_s))
    step = choices.between(earliest, latest)
    if kind is Kind.EVALUATES_WRAPPED:
        step = shape.evaluate_every
    elif kind is Kind.NOT_MONITORED:
        step = shape.monitored_every * max(1, step // shape.monitored_every)
    is_first = kind in (Kind.EVALUATES_WRAPPED, Kind.FIRST_STANDS)
    rank = 0 if is_first else choices.between(0, shape.world_size - 1)
    return Fault(kind, rank, step, choices.between(0, 19), _draw_value(choices, kind))


def _draw_value(choices: Choices, kind: Kind) -> float:
    if kind in SLOWNESS:
        return choices.pick((2.0, 1.5, 1.3, 3.0, 5.0))
    if kind is Kind.HICCUP:
        return choices.pick((1.0, 3.0, 6.0))
    if kind in ENDS_SLOWLY:
        return choices.pick((3.0, 1.0, 6.0))
    if kind in LEAKS:
        return choices.pick((40.0, 25.0, 60.0, 90.0))
    if kind in (Kind.CACHE_FILLS, Kind.SLOW_END):
        return choices.pick((8.0, 4.0, 12.0)) if kind is Kind.CACHE_FILLS else choices.pick((3.0, 1.0, 6.0))
    is_for_ever = kind in STANDS | STANDS_AT_A_CALL | KEPT or kind in (Kind.ALL_STAND, Kind.CANCELLED, Kind.KERNEL)
    return FOR_EVER_S if is_for_ever else 0.0
