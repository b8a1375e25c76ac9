"""The truth of a story, from its program, its fault and the rules of gloo and NCCL; the diagnosis is not asked.

Who may be named: the ranks at which a fault strikes. A call that does not fit contradicts another one: where a group
has as many members on the one side as on the other, nobody can know which is meant, and both may be named.

A fault counts as shown when ranks that it does not strike are held up for good, or die; or, of slowness, when its cost
by construction is large enough. A fault without effect is a healthy life.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause
from tests.corpus.generator.kinds import (
    CALL_FAULTS,
    ENDS,
    ENDS_SLOWLY,
    HEALTHY,
    KEPT,
    LEAKS,
    RESTARTED,
    SLOWNESS,
    STANDS,
    STANDS_AT_A_CALL,
    Kind,
)
from tests.corpus.generator.mutations import RARE_STEPS, strikes
from tests.corpus.generator.program import Evaluation, Pipes, Semantics

if TYPE_CHECKING:
    from tests.corpus.generator.cluster import StoryCluster
    from tests.corpus.generator.program import Shape
    from tests.corpus.generator.stories import Fault, Story

QUICK_S = 2.0
"""For exits, stops and mismatches."""
STALL_S = 12.0
"""For the rest."""
PACE_S = 15.0
"""How slow a rank is shows over a window of 12 s of steps (as in the other corpus)."""
LONG_PACE_S = 40.0
"""Where few steps tell it takes a window of 36 s."""
RARE_S = 1.3
"""Seconds between two pauses of a rank that is slow in some steps alone, up to which it must be named."""
SLACK_S = 0.6
"""Reports are up to 0.3 s old, frames 0.2 s: what holds since a moment can be known so much later."""
TERMINATED_S = 4.0
"""A launcher ends its ranks by SIGTERM too: it takes a while to know that no other end explains it (as in the other
corpus)."""
STANDS_S = 5.0
"""A wait that has lasted so long at the end of a play, a multiple of all steps, is for good."""
JOIN_S = 62.0
"""Ranks may come a minute late (`Thresholds.join_s`)."""
WARM_UP_S = 14.0
"""Of a rank's memory: allocators and loaders take what they need in the first ten seconds of steps."""
FIRST_STEPS = 2
"""How long a step takes is known from the second one on."""
LOST_S = 8.0
"""A host is taken for lost after six seconds without a word."""

CALLS_DIFFER = frozenset({Cause.MISMATCH, Cause.FEWER_CALLS})
STANDING = frozenset({Cause.STRAGGLER, Cause.SILENT, Cause.INPUT_BOUND}) | {
    cause for cause in Cause if cause.value in ("standstill", "not_exiting", "mismatch")
}
ENDED = frozenset({Cause.EXITED, Cause.OOM, Cause.FEWER_CALLS})

CAUSES: dict[Kind, frozenset[Cause]] = {
    **dict.fromkeys(CALL_FAULTS, CALLS_DIFFER),
    # A rank that swallows an exception in its loop may also be seen as one that is a step ahead.
    **{kind: STANDING - {Cause.INPUT_BOUND} for kind in STANDS | STANDS_AT_A_CALL},
    **dict.fromkeys(KEPT, frozenset({Cause.NOT_EXITING})),
    # Who has been warned of is killed in the end.
    **dict.fromkeys(LEAKS, frozenset({Cause.MEMORY_GROWTH, Cause.OOM})),
    Kind.RESTARTS: frozenset({Cause.EXITED}),
    Kind.FAILS_AGAIN: frozenset({Cause.EXITED}),
    Kind.RAISE_SLOWLY: frozenset({Cause.EXITED}),
    Kind.ALL_RAISE: frozenset({Cause.EXITED}),
    Kind.LEAVE_SLOWLY: frozenset({Cause.FEWER_CALLS, Cause.EXITED}),
    Kind.CANCELLED: STANDING - {Cause.INPUT_BOUND},
    Kind.NEVER_LAUNCHED: frozenset({Cause.NOT_JOINED}),
    Kind.SEND_LEFT_OUT: STANDING,
    Kind.RECEIVE_LEFT_OUT: STANDING,
    Kind.GIL: frozenset({Cause.SILENT}),
    Kind.STOP: frozenset({Cause.FROZEN}),
    Kind.EXIT: frozenset({Cause.FEWER_CALLS, Cause.EXITED}),
    Kind.RAISE: frozenset({Cause.EXITED}),
    Kind.KILL: frozenset({Cause.EXITED}),
    Kind.TERMINATE: frozenset({Cause.EXITED}),
    Kind.OOM: frozenset({Cause.OOM}),
    Kind.HOST: frozenset({Cause.NODE_LOST}),
    Kind.AGENT: frozenset({Cause.NODE_LOST}),
    Kind.LINK: frozenset({Cause.TRANSPORT}),
    # Without NCCL's times all have called what does not complete, or wait for each other's sends.
    Kind.KERNEL: frozenset({Cause.STRAGGLER, Cause.TRANSPORT, Cause.MISMATCH}),
    Kind.ABSENT: frozenset({Cause.NOT_JOINED}),
    Kind.ALL_STAND: STANDING,
    **{kind: frozenset({Cause.STRAGGLER}) for kind in SLOWNESS},
}


TWO_SIDED = frozenset({Kind.NEW_GROUP_LEFT_OUT, Kind.RECEIVE_ANY})
"""Of two ranks, each of which waits for the other, either may be meant."""


@dataclass(frozen=True)
class Truth:
    """What is to be said of one fault, and what may be.

    Attributes:
        causes: Any of them is right.
        culprits: Any of these sets is right.
        guilty: Ranks that may be named at all.
        within_s: From the moment in which the fault can be known.
        is_scored: Silence counts against the diagnosis; False where torch's semantics are not known, or the fault is
            too small to be asked for.
        are_any_right: Any of the guilty are right, by themselves or together.
    """

    causes: frozenset[Cause]
    culprits: frozenset[frozenset[int]]
    guilty: frozenset[int]
    within_s: float
    is_scored: bool = True
    are_any_right: bool = False

    @property
    def may_be_alone(self) -> frozenset[int]:
        """The guilty, without those of whom each is to be named only with another one that is to blame."""
        least = (those for those in self.culprits if not any(other < those for other in self.culprits if other))
        return self.guilty if self.are_any_right else frozenset[int]().union(*least)


def truths_of(story: Story) -> tuple[Truth, ...]:
    """Return what is to be said of each fault of a story, should it show."""
    return tuple(truth_of(story, fault) for fault in story.faults if fault.kind not in HEALTHY)


def truth_of(story: Story, fault: Fault) -> Truth:
    """Return what is to be said of a fault."""
    shape = story.shape
    struck = frozenset(rank for rank in range(shape.world_size) if strikes(fault, shape, rank))
    culprits, guilty = {struck}, struck
    if fault.kind in CALL_FAULTS or (fault.kind in TWO_SIDED and shape.world_size == 2):
        culprits, guilty = _sides(story, fault)
        if fault.kind is Kind.OTHER_DST:
            # The others are through, and nothing holds what they passed.
            culprits = {*culprits, frozenset[int]()}
    elif fault.kind in (Kind.HOST, Kind.AGENT):
        first = fault.rank // shape.ranks_per_node * shape.ranks_per_node
        guilty = frozenset(range(first, first + shape.ranks_per_node))
        culprits = {guilty}
    elif fault.kind is Kind.ALL_STAND:
        # No rank keeps another waiting: the job is told, and at most those that stand elsewhere than most.
        culprits = {struck, frozenset()}
    elif fault.kind is Kind.LINK:
        culprits, guilty = {frozenset()}, frozenset()
    elif fault.kind is Kind.KERNEL and not shape.is_timed:
        culprits = {struck, frozenset()}
    elif fault.kind is Kind.SLOW_IN_TURNS:
        culprits = {struck, *(frozenset({rank}) for rank in struck)}
    return Truth(
        CAUSES[fault.kind],
        frozenset(culprits),
        guilty,
        _within_s(story, fault),
        _is_scored(story, fault),
        # The nodes find out each by itself, and the kernel kills one rank of each.
        are_any_right=fault.kind in (Kind.LEAK_OF_ALL, Kind.ALL_RAISE),
    )


def _sides(story: Story, fault: Fault) -> tuple[set[frozenset[int]], frozenset[int]]:
    """Return who may be named for a call that does not fit."""
    shape = story.shape
    alone = frozenset({fault.rank})
    groups = [tuple(range(shape.world_size)), *shape.members().values()]
    pairs = {frozenset(members) for members in groups if len(members) == 2 and fault.rank in members}
    if fault.kind in (Kind.SEND_LEFT_OUT, Kind.RECEIVE_LEFT_OUT):
        # A send without its receive is one call too many of the one rank, or one too few of the other.
        peers = [frozenset({(fault.rank + by) % shape.world_size}) for by in (1, -1)]
        pairs |= {alone | peer for peer in peers} | set(peers)
    if not pairs:
        return {alone}, alone
    # Of two ranks that contradict each other both may be named, or neither.
    return {alone, *pairs, frozenset()}, alone.union(*pairs)


def _within_s(story: Story, fault: Fault) -> float:
    if fault.kind in (CALL_FAULTS | ENDS | ENDS_SLOWLY | RESTARTED) - {Kind.TERMINATE} or fault.kind is Kind.STOP:
        bound_s = QUICK_S
    elif fault.kind in (Kind.ABSENT, Kind.NEVER_LAUNCHED):
        bound_s = JOIN_S
    elif fault.kind is Kind.TERMINATE:
        bound_s = TERMINATED_S
    elif fault.kind in (Kind.HOST, Kind.AGENT):
        bound_s = LOST_S
    elif fault.kind in LEAKS:
        # Half of what was free is gone.
        bound_s = WARM_UP_S + fault.value / 2
    elif fault.kind is Kind.SLOW_RARELY:
        bound_s = LONG_PACE_S
    elif fault.kind in SLOWNESS:
        # A pace needs some steps to be known.
        bound_s = max(PACE_S, 20 * story.shape.step_s) * (1 if fault.value >= 2 else 2)
    else:
        bound_s = STALL_S
    return bound_s + SLACK_S + (1.0 if story.shape.drop else 0.0)


def _is_scored(story: Story, fault: Fault) -> bool:
    if fault.kind is Kind.OTHER_REDUCE_OP:
        return False
    if fault.kind is Kind.ALL_STAND and fault.step <= FIRST_STEPS:
        return False
    if story.shape.semantics is Semantics.NCCL:
        if fault.kind in (Kind.OTHER_SIZE, Kind.OTHER_DTYPE, Kind.OTHER_ROOT, Kind.OTHER_DST):
            return False
        # Which GPU is slow does not show in when its main thread calls; the recorder has times for that only with
        # TORCH_NCCL_ENABLE_TIMING.
        if fault.kind in SLOWNESS - {Kind.SLOW_INPUT} and not story.shape.is_timed:
            return False
    # A rank that pauses once in some seconds differs from chance after minutes.
    if fault.kind is Kind.SLOW_RARELY and RARE_STEPS * story.shape.step_s * fault.value > RARE_S:
        return False
    # Of two ranks that wait for each other in turns neither is slower than the other.
    if fault.kind is Kind.SLOW_IN_TURNS and story.shape.world_size == 2:
        return False
    # What ranks lose in sends and receives is in no recorder of gloo's, so where a step has some, a part of the cost of
    # a slow rank is lost where nobody measures it.
    if fault.kind in SLOWNESS and story.shape.pipes is not Pipes.NONE:
        return False
    if fault.kind in (Kind.LINK, Kind.HOST, Kind.AGENT):
        return story.shape.num_nodes > 1
    # A swallowed exception or a size has effects of many kinds; whether it shows is seen in the play (`shown_s`).
    return True


def burden_of_rank_0(shape: Shape) -> float:
    """Return for which part of a step's time the others wait, on average, for what rank 0 alone does."""
    evaluates = shape.evaluation is Evaluation.RANK_0 and shape.evaluate_every
    alone_s = shape.evaluate_s / shape.evaluate_every if evaluates else 0.0
    alone_s += shape.save_s / shape.save_every if shape.save_every else 0.0
    return alone_s / (shape.step_s + alone_s)


def shown_s(cluster: StoryCluster, story: Story) -> float | None:
    """Return since when a played story's faults can be known; None while they have no effect.

    Of what holds ranks up: when the last of those that it holds up for good came to stand. Of what ends a rank, or
    stops it, or makes it slow: when it struck.
    """
    if not cluster.struck:
        return None
    kinds = {fault.kind for fault in story.faults}
    struck_s = min(at_s for at_s, _, _ in cluster.struck)
    if Kind.ALL_STAND in kinds:
        return max(at_s for at_s, _, _ in cluster.struck)
    if kinds & SLOWNESS or kinds & (
        ENDS
        | ENDS_SLOWLY
        | RESTARTED
        | KEPT
        | LEAKS
        | {Kind.NEVER_LAUNCHED, Kind.STOP, Kind.HOST, Kind.AGENT, Kind.ABSENT}
    ):
        return struck_s
    stands = cluster.stood_s(STANDS_S)
    return max(struck_s, stands) if stands is not None else None
