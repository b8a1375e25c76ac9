"""Stories that failed once, as they were drawn, or shrunk (`python -m tests.corpus --shrink SEED` prints an entry)."""

from __future__ import annotations

import pytest

from tests.corpus.generator.kinds import Kind
from tests.corpus.generator.lives import play
from tests.corpus.generator.program import Evaluation, Groups, Pipes, Semantics, Shape
from tests.corpus.generator.score import Grade
from tests.corpus.generator.stories import Fault, Story

RIGHT: dict[str, Story] = {
    "nccl: all stand in a lock, and no time was the ranks' own": Story(
        shape=Shape(
            semantics=Semantics.NCCL,
            num_nodes=2,
            ranks_per_node=3,
            step_s=0.4,
            buckets=12,
            sizes_differ=True,
            accumulation=2,
            loss_every=10,
            groups=Groups.HALVES,
            metrics_every=1,
            shares=True,
            pipes=Pipes.PIPELINE,
            noise=0.3,
            late_s=4.0,
            drop=0.1,
        ),
        faults=(Fault(kind=Kind.ALL_STAND, rank=1, step=10, place=1, value=1000000000.0),),
        seed=113,
    ),
    "nccl: a call in another group, in a circle, while others are held by sends": Story(
        shape=Shape(
            semantics=Semantics.NCCL,
            num_nodes=2,
            step_s=0.05,
            buckets=2,
            sizes_differ=True,
            has_buffers=True,
            accumulation=4,
            groups=Groups.PAIRS,
            metrics_every=1,
            pipes=Pipes.PIPELINE,
            evaluation=Evaluation.ALL,
            evaluate_every=30,
            save_every=45,
            noise=0.3,
            late_s=4.0,
            reports_steps=False,
        ),
        faults=(Fault(kind=Kind.OTHER_GROUP, rank=1, step=109, place=3),),
        seed=661,
        mismatch_hangs=False,
        root_runs_ahead=True,
    ),
    "nccl: whole nodes were named whose GPUs wait in sends and receives": Story(
        shape=Shape(
            semantics=Semantics.NCCL,
            num_nodes=4,
            step_s=0.8,
            buckets=2,
            has_buffers=True,
            groups=Groups.HALVES,
            metrics_every=5,
            pipes=Pipes.PIPELINE,
            evaluation=Evaluation.ALL,
            evaluate_every=30,
            save_every=45,
            timeout_s=30.0,
            uneven=0.04,
            late_s=4.0,
            reports_steps=False,
        ),
        faults=(Fault(kind=Kind.SLEEP, rank=5, step=2, place=7, value=1000000000.0),),
        seed=462,
        mismatch_hangs=False,
    ),
    "nccl: a rank that left out a call waits in another group's, which all have called": Story(
        shape=Shape(
            semantics=Semantics.NCCL,
            num_nodes=2,
            step_s=0.4,
            buckets=2,
            sizes_differ=True,
            groups=Groups.PAIRS,
            metrics_every=5,
            save_every=20,
            timeout_s=30.0,
            noise=0.3,
            late_s=4.0,
        ),
        faults=(Fault(kind=Kind.SWALLOWED, rank=1, step=16, place=2),),
        seed=685,
        mismatch_hangs=False,
    ),
    "gloo: a rank receives from any rank while others send or are in collectives": Story(
        shape=Shape(
            ranks_per_node=4,
            step_s=0.8,
            sizes_differ=True,
            groups=Groups.PAIRS,
            metrics_every=1,
            pipes=Pipes.PIPELINE,
            evaluation=Evaluation.RANK_0,
            evaluate_every=15,
            save_every=20,
            noise=0.3,
            late_s=4.0,
            first_s=1.0,
        ),
        faults=(Fault(kind=Kind.RECEIVE_ANY, rank=3, step=11, place=4, value=1000000000.0),),
        seed=135,
    ),
    "gloo: of 64 ranks one receives from any rank, and another one waits alone in a broadcast": Story(
        shape=Shape(
            num_nodes=8,
            ranks_per_node=8,
            step_s=0.4,
            has_buffers=True,
            accumulation=2,
            pipes=Pipes.RING,
            evaluation=Evaluation.ALL,
            evaluate_every=30,
            save_every=20,
            noise=0.3,
            late_s=4.0,
            gates_every=5,
            averages=True,
        ),
        faults=(Fault(kind=Kind.RECEIVE_ANY, rank=56, step=13, place=3, value=1000000000.0),),
        seed=773,
        root_runs_ahead=True,
    ),
    "gloo: a rank that begins a step again is in the next one's call before its pair's": Story(
        shape=Shape(
            num_nodes=3,
            step_s=0.4,
            buckets=6,
            loss_every=10,
            groups=Groups.NODES,
            metrics_every=5,
            save_every=45,
            noise=0.0,
            first_s=1.0,
            makes_group=True,
            spread_s=8.0,
        ),
        faults=(Fault(kind=Kind.RETRIED, rank=4, step=19, place=8),),
        seed=922,
        mismatch_hangs=False,
    ),
    "gloo: one rank leaves out new_group, and is in a collective": Story(
        shape=Shape(
            ranks_per_node=3,
            step_s=0.4,
            buckets=3,
            shares=True,
            pipes=Pipes.PIPELINE,
            evaluation=Evaluation.ALL,
            evaluate_every=30,
            noise=0.3,
            reports_steps=False,
            gates_every=15,
            first_s=4.0,
            makes_group=True,
        ),
        faults=(Fault(kind=Kind.NEW_GROUP_LEFT_OUT, step=12, place=5, value=1000000000.0),),
        seed=332,
    ),
    "gloo: a wait at a first-block, long over, made the rank that left a victim": Story(
        shape=Shape(
            ranks_per_node=4,
            step_s=0.8,
            buckets=3,
            has_buffers=True,
            groups=Groups.HALVES,
            metrics_every=5,
            pipes=Pipes.RING,
            evaluation=Evaluation.ALL,
            evaluate_every=15,
            save_every=20,
            noise=0.0,
            late_s=4.0,
            first_s=4.0,
            makes_group=True,
            gathers=True,
        ),
        faults=(Fault(kind=Kind.LEAVE_SLOWLY, rank=3, step=11, place=12, value=1.0),),
        seed=674,
        mismatch_hangs=False,
    ),
    "gloo: ranks that time out in a broadcast were named, since others were twelve calls further": Story(
        shape=Shape(
            num_nodes=4,
            step_s=0.05,
            buckets=12,
            sizes_differ=True,
            has_buffers=True,
            accumulation=4,
            groups=Groups.PAIRS,
            metrics_every=5,
            evaluation=Evaluation.RANK_0,
            evaluate_every=15,
            save_every=20,
            timeout_s=30.0,
            noise=0.0,
        ),
        faults=(Fault(kind=Kind.SLEEP, rank=1, step=53, value=1000000000.0),),
        seed=516,
        mismatch_hangs=False,
    ),
}
NOT_WRONG: dict[str, Story] = {
    "gloo: the sender was named for its receiver's extra all_reduce": Story(
        shape=Shape(
            num_nodes=8,
            buckets=6,
            accumulation=4,
            pipes=Pipes.PIPELINE,
            save_every=20,
            uneven=0.04,
            reports_steps=False,
        ),
        faults=(Fault(kind=Kind.DOUBLED, rank=3, step=32, place=14),),
        seed=445,
        root_runs_ahead=True,
    ),
    "nccl: the first two of four to differ were both named": Story(
        shape=Shape(
            semantics=Semantics.NCCL,
            num_nodes=2,
            step_s=0.8,
            buckets=2,
            sizes_differ=True,
            pipes=Pipes.RING,
            evaluation=Evaluation.ALL,
            evaluate_every=15,
            save_every=20,
            noise=0.3,
            reports_steps=False,
        ),
        faults=(Fault(kind=Kind.DOUBLED, rank=1, step=4, place=12),),
        seed=937,
        mismatch_hangs=False,
        root_runs_ahead=True,
    ),
}
"""Nobody can tell who is to blame, or not to the end: what counts is that no victim is named."""


@pytest.mark.parametrize("story", RIGHT.values(), ids=RIGHT.keys())
def test_a_story_that_was_told_wrong_is_told_right(story: Story) -> None:
    result = play(story)
    assert result.grade is Grade.RIGHT, (result.said, result.why)


@pytest.mark.parametrize("story", NOT_WRONG.values(), ids=NOT_WRONG.keys())
def test_a_story_in_which_a_victim_was_named_names_none(story: Story) -> None:
    result = play(story)
    assert result.grade not in (Grade.WRONG, Grade.FALSE_ALARM), result.said
