"""Where a story's random decisions come from: a seed, or hypothesis, which can shrink them. One definition serves both.

Options stand in their order from plain to rich: hypothesis shrinks towards the first, and towards low numbers.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Protocol, TypeVar

from hypothesis import strategies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import DrawFn

T = TypeVar("T")


class Choices(Protocol):
    """Makes decisions."""

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""

    def between(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""


class Seeded:
    """Decides by a seed: the same one makes the same story."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[self._random.randrange(len(options))]

    def between(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


class Drawn:
    """Lets hypothesis decide."""

    def __init__(self, draw: DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return self._draw(strategies.sampled_from(options))

    def between(self, low: int, high: int) -> int:
        return self._draw(strategies.integers(low, high))


def one_in(choices: Choices, number: int) -> bool:
    """Return True once in `number` times."""
    return choices.between(0, number - 1) == number - 1 if number > 1 else True
