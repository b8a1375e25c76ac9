"""Stories are drawn by one rule, and playing one twice says the same."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings

from tests.corpus.generator.kinds import Kind
from tests.corpus.generator.lives import play
from tests.corpus.generator.mutations import events_of
from tests.corpus.generator.shrinking import changed, shrink
from tests.corpus.generator.stories import Story, stories, story_of


def test_a_seed_is_a_story() -> None:
    assert story_of(7) == story_of(7)
    drawn = [story_of(seed) for seed in range(1500)]
    assert {story.kind for story in drawn} > {kind.value for kind in Kind}
    assert max(story.shape.world_size for story in drawn) == 64
    assert max(story.shape.num_nodes for story in drawn) == 16


@given(stories())
@settings(max_examples=100)
def test_every_rank_of_every_story_has_something_to_do(story: Story) -> None:
    for rank in range(min(4, story.shape.world_size)):
        events = events_of(story, rank)
        assert len([next(events) for _ in range(20)]) == 20


@pytest.mark.parametrize("seed", [0, 7])
def test_a_story_is_played_the_same_way_twice(seed: int) -> None:
    assert play(story_of(seed)) == play(story_of(seed))


@pytest.mark.parametrize(("is_timed", "said"), [(True, "straggler [0] 0#118"), (False, "transport [] 0#118")])
def test_whose_kernel_does_not_end_is_known_by_nccls_times_alone(*, is_timed: bool, said: str) -> None:
    story = story_of(42)
    assert story.faults[0].kind is Kind.KERNEL
    (verdict,) = play(replace(story, shape=replace(story.shape, is_timed=is_timed))).said
    assert said in verdict


def test_a_failing_story_is_shrunk_and_written_as_it_is_read() -> None:
    large = next(story for seed in range(1000) if (story := story_of(seed)).shape.world_size >= 8 and story.faults)
    small = shrink(large, lambda story: story.shape.ranks_per_node >= 2)
    assert small.shape.world_size == 2
    assert small.kind == large.faults[0].kind.value
    assert msgspec.convert(changed(small), Story) == small
