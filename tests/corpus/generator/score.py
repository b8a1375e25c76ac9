"""Plays stories, compares what was said with the truth, and counts."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from app.diagnosis.causes import Cause
from ddpcore.wire import MONITORED_BARRIER, NEW_GROUP
from tests.corpus.generator.cluster import StoryCluster
from tests.corpus.generator.kinds import CALL_FAULTS, SLOWNESS, Kind
from tests.corpus.generator.oracle import STANDS_S, burden_of_rank_0, shown_s, truths_of
from tests.corpus.generator.program import Semantics

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.corpus.generator.cluster import PastReport
    from tests.corpus.generator.oracle import Truth
    from tests.corpus.generator.stories import Story

SLICE_S = 0.5
SLOW_FRAC = 0.1
"""Of a step's time: a rank that costs the others so much is slow, whatever it does meanwhile."""
STRIKE_S = 60.0
"""Every fault has struck by then."""
HEALTHY_S = 40.0
SHOWS_S = 20.0
"""So long is waited for a call that does not fit to have an effect."""
SLOW_S = 50.0
"""Who is slow in turns, or by little, may be named late: that is graded otherwise than silence."""
AFTER_S = 5.0
"""Played on behind the last moment in which a verdict is due: it has to stand."""


class Grade(StrEnum):
    """How right the diagnosis was about a story."""

    RIGHT = "right"
    PARTLY = "partly"
    """A right rank with another cause, operation, or too late, or not to the end."""
    WRONG = "wrong"
    """Somebody was named who is not to blame, or the network."""
    SILENT = "silent"
    FALSE_ALARM = "false alarm"
    """Something was said though nothing was the matter, or before it was."""


@dataclass(frozen=True)
class Result:
    """One story played."""

    story: Story
    grade: Grade
    is_fault: bool
    took_s: float | None
    said: tuple[str, ...]
    why: str = ""


def play(story: Story) -> Result:
    """Simulate a story and grade what is said."""
    cluster = StoryCluster(story)
    truths = truths_of(story)
    if not truths:
        cluster.run(HEALTHY_S)
    else:
        run_to_strike(cluster)
        watch(cluster, story, truths)
    return grade(story, cluster, truths)


def run_to_strike(cluster: StoryCluster) -> None:
    """Let time pass until a fault has struck."""
    while not cluster.struck and cluster.elapsed_s < STRIKE_S:
        cluster.run(SLICE_S)


def watch(cluster: StoryCluster, story: Story, truths: tuple[Truth, ...]) -> None:
    """Let time pass until all is due that is to be said, and for as long as it has to stand."""
    kinds = {fault.kind for fault in story.faults}
    begun_s = cluster.elapsed_s
    if kinds <= CALL_FAULTS:
        while cluster.stood_s(STANDS_S) is None and cluster.elapsed_s < begun_s + SHOWS_S:
            cluster.run(SLICE_S)
    within_s = max(truth.within_s for truth in truths)
    cluster.run(max(0.0, within_s + AFTER_S - (STANDS_S if kinds <= CALL_FAULTS else 0.0)))
    due_s = (shown_s(cluster, story) or 0.0) + within_s
    cluster.run(max(0.0, due_s + AFTER_S - cluster.elapsed_s))
    if kinds & SLOWNESS and not cluster.told_alarms:
        cluster.run(max(0.0, due_s - within_s + SLOW_S - cluster.elapsed_s))
    timeout_s = story.shape.timeout_s
    stands_s = cluster.stood_s(STANDS_S)
    if timeout_s and stands_s is not None and not kinds & SLOWNESS:
        cluster.run(max(0.0, stands_s + timeout_s + AFTER_S - cluster.elapsed_s))


def grade(story: Story, cluster: StoryCluster, truths: tuple[Truth, ...]) -> Result:
    """Return how right it was what has been said."""
    told = [one for one in cluster.told_alarms if not _is_true_of_rank_0(one, story)]
    said = tuple(_words(one) for one in cluster.told_alarms)
    since_s = shown_s(cluster, story) if truths else None
    guilty = frozenset[int]().union(*(truth.guilty for truth in truths))
    if since_s is None:
        # What is named rightly before it has an effect is no false alarm.
        in_vain = [one for one in told if not _may_be_said(one, truths, guilty)]
        grade = Grade.FALSE_ALARM if in_vain else Grade.RIGHT
        return Result(story, grade, False, None, said)
    struck_s = min(at_s for at_s, _, _ in cluster.struck)
    if any(one.at_s < struck_s for one in told):
        return Result(story, Grade.FALSE_ALARM, True, None, said, "before the strike")
    wrong = [one for one in told if not _may_be_said(one, truths, guilty)]
    if wrong:
        return Result(story, Grade.WRONG, True, None, said, f"known since {since_s:.1f}")
    if not told:
        is_scored = any(truth.is_scored for truth in truths)
        return Result(story, Grade.SILENT if is_scored else Grade.RIGHT, is_scored, None, said, f"since {since_s:.1f}")
    return _grade_named(story, cluster, truths, since_s, said)


def _grade_named(
    story: Story, cluster: StoryCluster, truths: tuple[Truth, ...], since_s: float, said: tuple[str, ...]
) -> Result:
    guilty = frozenset[int]().union(*(truth.guilty for truth in truths))
    if cluster.has_aborted:
        # gloo ends a rank before its probe, or that of the one that passed too much, has looked: then it can not be
        # known who passed what, and the verdict blames nobody.
        truths = tuple(replace(truth, culprits=truth.culprits | {frozenset()}) for truth in truths)
    right = [one for one in cluster.told_alarms if any(_is_right(one, truth, guilty, len(truths)) for truth in truths)]
    if not right:
        return Result(story, Grade.PARTLY, True, None, said, "cause")
    took_s = right[0].at_s - since_s
    why = ""
    if took_s > max(truth.within_s for truth in truths):
        why = f"late: {took_s:.1f} s since {since_s:.1f}"
    elif not any((one.verdict.cause, one.verdict.culprits) in cluster.alarming for one in right):
        why = "does not stand to the end"
    elif not cluster.has_aborted and not any(_names_operation(one) for one in right):
        why = f"operation: {right[0].verdict.group}#{right[0].verdict.seq} of {sorted(right[0].pending)}"
    elif not cluster.has_aborted and not any(_names_operation(one) for one in _last_of(cluster, right)):
        last = _last_of(cluster, right)[0]
        why = f"operation at {last.at_s:.1f} s: {last.verdict.group}#{last.verdict.seq} of {sorted(last.pending)}"
    return Result(story, Grade.PARTLY if why else Grade.RIGHT, True, max(0.0, took_s), said, why)


def _last_of(cluster: StoryCluster, right: list[PastReport]) -> list[PastReport]:
    return [cluster.last_told.get((one.verdict.cause, one.verdict.culprits), one) for one in right]


def _is_true_of_rank_0(told: PastReport, story: Story) -> bool:
    """Return whether rank 0 is called slow where it alone evaluates or saves for so long that it is."""
    verdict = told.verdict
    is_named = verdict.cause is Cause.STRAGGLER and verdict.cost_frac is not None and tuple(verdict.culprits) == (0,)
    return is_named and burden_of_rank_0(story.shape) >= SLOW_FRAC


def _may_be_said(told: PastReport, truths: tuple[Truth, ...], guilty: frozenset[int]) -> bool:
    culprits = frozenset(told.verdict.culprits)
    if not culprits:
        return any(told.verdict.cause in truth.causes for truth in truths)
    # The other one of a pair may be named with the one that is to blame, not alone.
    return culprits <= guilty and any(culprits & truth.may_be_alone for truth in truths)


def _is_right(told: PastReport, truth: Truth, guilty: frozenset[int], num_truths: int) -> bool:
    culprits = frozenset(told.verdict.culprits)
    if told.verdict.cause not in truth.causes:
        return False
    if truth.are_any_right:
        return bool(culprits) and culprits <= truth.guilty
    if not culprits and _may_blame_nobody(told):
        return True
    # Two of one kind that struck together may be named together.
    return culprits in truth.culprits or (num_truths > 1 and bool(culprits) and culprits <= guilty)


def _may_blame_nobody(told: PastReport) -> bool:
    """Return whether nobody can know which of the sides is meant.

    A broadcast is over at once for those that it does not hold up, and no recorder has which root they passed. Of one
    rank in a transfer, and others in a collective, the one has left out a call before it or its peer the transfer:
    gloo's recorder has neither sends nor receives.
    """
    return told.are_roots_even or any(side.peer_call is not None for side in told.verdict.sides)


def _names_operation(told: PastReport) -> bool:
    verdict = told.verdict
    if verdict.op in ("send", "recv", MONITORED_BARRIER, NEW_GROUP) or verdict.cause is Cause.MEMORY_GROWTH:
        # Counted by themselves; and memory grows in no operation.
        return True
    if any(group == NEW_GROUP for group, _ in told.pending):
        # It is in no order with the others.
        return True
    if verdict.seq is None or (verdict.cause is Cause.STRAGGLER and verdict.cost_frac is not None):
        return True
    if verdict.cause is Cause.MISMATCH and (verdict.group, verdict.seq) in told.differing:
        # GPUs may stop at a call before it, which all have made alike, since kernels of two groups wait for each other,
        # or not have come to it yet: what contradicts itself is the first call in which the members differ.
        return True
    return not told.pending or (verdict.group, verdict.seq) in told.pending


def _words(told: PastReport) -> str:
    verdict = told.verdict
    where = f" {verdict.group}#{verdict.seq} {verdict.op}" if verdict.seq is not None else ""
    return f"{told.at_s:.1f} s: {verdict.cause.value} {list(verdict.culprits)}{where}"


def table(results: Iterable[Result]) -> list[str]:
    """Return the figures by class of fault and semantics, as lines."""
    rows: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        rows[result.story.kind, result.story.shape.semantics.value].append(result)
    order = {kind.value: place for place, kind in enumerate(Kind)}
    head = (
        f"{'fault':46} {'':5}{'n':>5}{'right':>7}{'partly':>7}{'wrong':>7}{'silent':>7}{'false':>7}{'s':>7}{'max':>7}"
    )
    keys = sorted(rows, key=lambda key: (order.get(key[0], len(order)), key[1]))
    lines = [head, *(_row(kind, semantics, rows[kind, semantics]) for kind, semantics in keys)]
    for name in Semantics:
        some = [one for key in keys if key[1] == name.value for one in rows[key]]
        lines.append(_row("all", name.value, some))
    return lines


def _row(kind: str, semantics: str, results: list[Result]) -> str:
    counts = [sum(result.grade is grade for result in results) for grade in Grade]
    took = [result.took_s for result in results if result.took_s is not None]
    seconds = f"{statistics.median(took):7.1f}{max(took):7.1f}" if took else ""
    return f"{kind:46} {semantics:5}{len(results):5}{''.join(f'{count:7}' for count in counts)}{seconds}"
