"""Stories that failed once, by the seeds that drew them, or shrunk (`python -m tests.corpus --shrink SEED`)."""

from __future__ import annotations

import pytest

from tests.corpus.generator.lives import play
from tests.corpus.generator.score import Grade
from tests.corpus.generator.stories import story_of

RIGHT = {
    "nccl: all stand in a lock, and no time was the ranks' own": 9,
    "nccl: a call in another group, in a circle, while others are held by sends": 54,
    "nccl: whole nodes were named whose GPUs wait in sends and receives": 111,
    "nccl: a rank that left out a call waits in another group's, which all have called": 292,
}
NOT_WRONG = {
    "gloo: the sender was named for its receiver's extra all_reduce": 200,
    "nccl: the first two of four to differ were both named": 284,
}
"""Nobody can tell who is to blame, or not to the end: what counts is that no victim is named."""


@pytest.mark.parametrize("seed", RIGHT.values(), ids=RIGHT.keys())
def test_a_story_that_was_told_wrong_is_told_right(seed: int) -> None:
    result = play(story_of(seed))
    assert result.grade is Grade.RIGHT, (result.said, result.why)


@pytest.mark.parametrize("seed", NOT_WRONG.values(), ids=NOT_WRONG.keys())
def test_a_story_in_which_a_victim_was_named_names_none(seed: int) -> None:
    result = play(story_of(seed))
    assert result.grade not in (Grade.WRONG, Grade.FALSE_ALARM), result.said
