"""Stories that failed once, as they were drawn, or shrunk: the lines of named_stories.jsonl.

`python -m tests.corpus --shrink SEED` prints such a line. Of a story that is not `is_right`, nobody can tell who is to
blame, or not to the end: what counts is that no victim is named.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.corpus.generator.lives import play
from tests.corpus.generator.score import Grade
from tests.corpus.generator.stories import Story  # noqa: TC001 - msgspec reads lines as it
from tests.support.long_tests import one_in


class Named(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the file."""

    name: str
    is_right: bool
    story: Story


NAMED = msgspec.json.Decoder(Named).decode_lines(Path(__file__).with_name("named_stories.jsonl").read_bytes())
RIGHT = {named.name: named.story for named in NAMED if named.is_right}
NOT_WRONG = {named.name: named.story for named in NAMED if not named.is_right}


@pytest.mark.parametrize("name", one_in(5, RIGHT))
def test_a_story_that_was_told_wrong_is_told_right(name: str) -> None:
    result = play(RIGHT[name])
    assert result.grade is Grade.RIGHT, (result.said, result.why)


@pytest.mark.parametrize("story", NOT_WRONG.values(), ids=NOT_WRONG.keys())
def test_a_story_in_which_a_victim_was_named_names_none(story: Story) -> None:
    result = play(story)
    assert result.grade not in (Grade.WRONG, Grade.FALSE_ALARM), result.said
