"""What a filter is made of: terms about keys, and terms about text."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.filters.patterns import TextPattern


class KeyKind(Enum):
    """What stands behind a key."""

    WORD = "word"
    """One of a few known words, or several: `state=waiting,missing`."""
    NAME = "name"
    """A name with `*` and `?`: `node=gpu*`."""
    NUMBER = "number"
    """Numbers and ranges: `rank=0,3-5,8-`."""
    FIGURE = "figure"
    """A figure to compare with: `step<100`."""


class Key(NamedTuple):
    """A key that a table knows.

    Attributes:
        name: As it is typed.
        kind: Of what stands behind it.
        choices: Of a key of words, those there are.
        units: Of a figure, how much each unit is; the empty one is what a bare number counts.
        numbers: Of a key of numbers, words for some of them.
    """

    name: str
    kind: KeyKind
    choices: tuple[str, ...] = ()
    units: tuple[tuple[str, float], ...] = (("", 1.0),)
    numbers: tuple[tuple[str, int], ...] = ()


class WordTerm(msgspec.Struct, frozen=True):
    """The key's word is one of these."""

    key: str
    choices: frozenset[str]
    is_inverse: bool = False


class NameTerm(msgspec.Struct, frozen=True):
    """The key's name fits one of these patterns."""

    key: str
    patterns: tuple[TextPattern, ...]
    is_inverse: bool = False

    def fits(self, name: str) -> bool:
        """Tell whether a name is meant, inversion aside."""
        return any(pattern.is_in(name) for pattern in self.patterns)


class NumberTerm(msgspec.Struct, frozen=True):
    """The key's number lies in one of these ranges, both ends included."""

    key: str
    ranges: tuple[tuple[int, int], ...]
    is_inverse: bool = False

    def among(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return which numbers are meant, inversion aside."""
        found: NDArray[np.bool_] = np.zeros(len(numbers), np.bool_)
        for first, last in self.ranges:
            found |= (numbers >= first) & (numbers <= last)
        return found


_COMPARED = {"<": np.less, "<=": np.less_equal, "=": np.equal, ">=": np.greater_equal, ">": np.greater}


class FigureTerm(msgspec.Struct, frozen=True):
    """The key's figure compares so with this one; a figure that is not known does not."""

    key: str
    comparison: str
    """One of `<`, `<=`, `=`, `>=` and `>`."""
    value: float
    is_inverse: bool = False

    def holds_of(self, figures: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which figures are meant, inversion aside; NaN is not known."""
        found: NDArray[np.bool_] = _COMPARED[self.comparison](figures, self.value)
        return found


class TextTerm(msgspec.Struct, frozen=True):
    """The pattern is found in the row's text."""

    pattern: TextPattern
    is_inverse: bool = False


Term = WordTerm | NameTerm | NumberTerm | FigureTerm | TextTerm


class Filter(msgspec.Struct, frozen=True):
    """Terms that must all hold; without any, everything does."""

    source: str = ""
    """As it was typed."""
    terms: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.terms)

    @property
    def texts(self) -> tuple[TextTerm, ...]:
        """Those about text, which are asked last."""
        return tuple(term for term in self.terms if isinstance(term, TextTerm))


class WrongFilter(msgspec.Struct, frozen=True):
    """What was typed is no filter."""

    why: str
    """A sentence."""
    at: int
    """Place of the character that it is about."""


EVERYTHING = Filter()
