"""Parts of a filter: terms about keys, and terms about text."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from app.filters.patterns import TextPattern


class KeyKind(Enum):
    """Type of a key's value."""

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
        name: Name as it is typed.
        kind: Type of its value.
        choices: Values of a WORD key.
        units: Size of each unit of a FIGURE key; the empty one is for a bare number.
        numbers: Names for some numbers of a NUMBER key.
    """

    name: str
    kind: KeyKind
    choices: tuple[str, ...] = ()
    units: tuple[tuple[str, float], ...] = (("", 1.0),)
    numbers: tuple[tuple[str, int], ...] = ()


class WordTerm(msgspec.Struct, frozen=True):
    """The key's value is one of these."""

    key: str
    choices: frozenset[str]
    is_inverse: bool = False


class NameTerm(msgspec.Struct, frozen=True):
    """The key's name fits one of these patterns."""

    key: str
    patterns: tuple[TextPattern, ...]
    is_inverse: bool = False

    def fits(self, name: str) -> bool:
        """Return whether a name fits, inversion aside."""
        return any(pattern.is_in(name) for pattern in self.patterns)


class NumberTerm(msgspec.Struct, frozen=True):
    """The key's number lies in one of these ranges, both ends included."""

    key: str
    ranges: tuple[tuple[int, int], ...]
    is_inverse: bool = False

    def among(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return which numbers fit, inversion aside."""
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
        """Return which figures fit, inversion aside; NaN is not known."""
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
    """Text as it was typed."""
    terms: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.terms)

    @property
    def texts(self) -> tuple[TextTerm, ...]:
        """Terms about text, which are checked last."""
        return tuple(term for term in self.terms if isinstance(term, TextTerm))


class WrongFilter(msgspec.Struct, frozen=True):
    """The text is no filter."""

    why: str
    """A sentence."""
    at: int
    """Index of the character that it is about."""


EVERYTHING = Filter()
