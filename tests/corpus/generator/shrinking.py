"""Makes a failing story as small as it can be, and writes it as a line to keep (`named_stories.jsonl`)."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from tests.corpus.generator.kinds import HEALTHY, Kind
from tests.corpus.generator.lives import play
from tests.corpus.generator.score import Grade
from tests.corpus.generator.stories import stories

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.corpus.generator.stories import Story

KEPT_FIELDS = ("semantics", "num_nodes", "ranks_per_node")
MAX_STORIES = 60
"""Drawn in search of a smaller failure of the same kind; a story takes about a second."""


def shrink(story: Story, is_failing: Callable[[Story], bool] | None = None) -> Story:
    """Return the smallest story found of the same kind and semantics that fails in the same way; else the story itself.

    What the story has is taken away, one thing after another, while it still fails. Then hypothesis draws from the rule
    that made it, and shrinks what it finds.
    """
    grade = play(story).grade if is_failing is None else Grade.RIGHT
    fails = is_failing or (lambda one: play(one).grade is grade)
    if is_failing is None and grade is Grade.RIGHT:
        return story
    return min(reduced(story, fails), _drawn(story, fails), key=_size)


def reduced(story: Story, fails: Callable[[Story], bool]) -> Story:
    """Return a story without whatever it fails without."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for simpler in _simpler(story):
            if fails(simpler):
                story, is_smaller = simpler, True
                break
    return story


def _simpler(story: Story) -> Iterator[Story]:
    """Return the story with one thing less, what costs most first."""
    shape = story.shape
    for num_nodes, per_node in ((1, 2), (2, 1), (1, 3), (2, 2), (1, 4), (2, 3), (2, 4), (4, 2)):
        is_less = num_nodes * per_node < shape.world_size
        if is_less and all(fault.rank < num_nodes * per_node for fault in story.faults):
            yield replace(story, shape=replace(shape, num_nodes=num_nodes, ranks_per_node=per_node))
    plain = type(shape)()
    for field in fields(shape):
        own = getattr(shape, field.name)
        if field.name not in KEPT_FIELDS and own != getattr(plain, field.name):
            yield replace(story, shape=replace(shape, **{field.name: getattr(plain, field.name)}))
    for index, fault in enumerate(story.faults):
        for simpler in (replace(fault, step=max(2, fault.step // 2)), replace(fault, place=0)):
            if simpler != fault:
                yield replace(story, faults=(*story.faults[:index], simpler, *story.faults[index + 1 :]))


def _size(story: Story) -> tuple[int, int]:
    return (story.shape.world_size, len(entry(story, "")))


def _drawn(story: Story, fails: Callable[[Story], bool]) -> Story:
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


def entry(story: Story, name: str) -> str:
    """Return a line of `named_stories.jsonl` to keep a story."""
    return json.dumps({"name": name, "is_right": True, "story": changed(story)})


def changed(value: object) -> object:
    """Return what is not as it is by default, as JSON has it."""
    if isinstance(value, tuple):
        return [changed(one) for one in value]
    if not is_dataclass(value):
        return value
    told = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    return {name: changed(own) for name, (own, default) in told.items() if own != default}
