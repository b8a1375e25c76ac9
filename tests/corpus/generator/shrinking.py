"""Makes a failing story as small as it can be, and writes it as a test to keep (`test_named_stories`)."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from tests.corpus.generator.kinds import HEALTHY, Kind
from tests.corpus.generator.lives import play
from tests.corpus.generator.score import Grade
from tests.corpus.generator.stories import stories

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.corpus.generator.program import Shape
    from tests.corpus.generator.stories import Fault, Story

MAX_STORIES = 200
"""Played in search of a failure of the same kind; a story takes about a second."""


def shrink(story: Story, is_failing: Callable[[Story], bool] | None = None) -> Story:
    """Return the smallest story found of the same kind and semantics that fails in the same way; else the story itself.

    Hypothesis draws from the rule that made the story, and shrinks what it finds.
    """
    grade = play(story).grade if is_failing is None else Grade.RIGHT
    fails = is_failing or (lambda one: play(one).grade is grade)
    serious = [fault.kind for fault in story.faults if fault.kind not in HEALTHY]
    kind = next(iter(serious or [fault.kind for fault in story.faults]), Kind.NONE)
    limits = settings(
        max_examples=MAX_STORIES,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    try:
        return find(stories(kind, story.shape.semantics), fails, settings=limits)
    except NoSuchExample:
        return story


def as_test(story: Story, name: str) -> str:
    """Return the entry of `NAMED` in `test_named_stories` that keeps a story."""
    return f'    "{name}": {source(story)},'


def source(value: Story | Shape | Fault) -> str:
    """Return the Python that makes a value, without what is as it is by default."""
    told = []
    for field in fields(value):
        own = getattr(value, field.name)
        if own == field.default:
            continue
        told.append(f"{field.name}={_literal(own)}")
    return f"{type(value).__name__}({', '.join(told)})"


def _literal(value: object) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(one)}, ' for one in value)})"
    return repr(value) if isinstance(value, (int, float, str)) else source(value)  # type: ignore[arg-type]
