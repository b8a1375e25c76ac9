"""Checks of what a program passes: a wrong type or value is an error of ours, before anything is done with it. Pure.

Each check raises the kind of error that the caller's documentation names, with the parameter's name, the value and what
to give instead.
"""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from reprlib import Repr
from typing import Any

MAX_SECONDS = 1_000_000.0
"""Upper limit of time-outs, twelve days: a store counts milliseconds in 31 bits (torch 2.13)."""

BELOW_ZERO = -5e-324
"""Limit of ranges that begin with 0."""

MAX_WHOLE = (1 << 63) - 1

_repr = Repr()
_repr.maxstring = _repr.maxother = 60


def refuse(kind: type[Exception], name: str, value: object, wanted: str) -> Exception:
    """Return the error of an argument that makes no sense."""
    return kind(f"{name}={_repr.repr(value)} makes no sense: give {wanted}")


def check_whole(
    kind: type[Exception], name: str, value: object, *, least: int = 1, most: int = MAX_WHOLE, wanted: str = ""
) -> None:
    """Refuse all but whole numbers of a range; numpy's are such, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise refuse(kind, name, value, wanted or f"a whole number from {least} on")


def check_number(
    kind: type[Exception],
    name: str,
    value: object,
    *,
    range_: tuple[float, float] = (0.0, math.inf),
    wanted: str = "a number above 0",
) -> None:
    """Refuse all but numbers above the first of two limits, and at most the second; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not range_[0] < _as_float(value) <= range_[1]:
        raise refuse(kind, name, value, wanted)


def check_seconds(kind: type[Exception], name: str, value: object) -> None:
    """Refuse all but a finite time above 0."""
    check_number(kind, name, value, range_=(0.0, MAX_SECONDS), wanted="a number above 0, of seconds, at most 10^6")


def check_flag(kind: type[Exception], name: str, value: object) -> None:
    """Refuse all but True and False: a text like "no" would count as True."""
    if not isinstance(value, bool):
        raise refuse(kind, name, value, "True or False")


def check_text(kind: type[Exception], name: str, value: object) -> None:
    """Refuse all but texts with something in them."""
    if not isinstance(value, str) or not value:
        raise refuse(kind, name, value, "a text")


def check_path(kind: type[Exception], name: str, value: object) -> None:
    """Refuse all but paths: an empty one would be the working directory, bytes are another world."""
    text = value if isinstance(value, str | type) else getattr(value, "__fspath__", str)()
    if not isinstance(text, str) or not text or "\0" in text or not _has_file_name(text):
        raise refuse(kind, name, value, "a path, as a text or a Path")


def absolute_path(kind: type[Exception], name: str, value: str | Path) -> Path:
    """Return a path from the root on, `~` replaced; refuse what is none."""
    check_path(kind, name, value)
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as error:
        raise refuse(kind, name, value, "a path whose home directory exists") from error


def check_has(kind: type[Exception], name: str, value: object, members: tuple[str, ...], wanted: str) -> None:
    """Refuse an object without one of these members; a class in place of its object has none of them."""
    if isinstance(value, type) or not all(hasattr(value, member) for member in members):
        raise refuse(kind, name, value, wanted)


def check_is(kind: type[Exception], name: str, value: object, types: Any, wanted: str) -> None:
    """Refuse what is of another type."""
    if not isinstance(value, types):
        raise refuse(kind, name, value, wanted)


def _has_file_name(text: str) -> bool:
    """Return whether a text can be bytes of a file system, which half of a surrogate pair cannot."""
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _as_float(value: numbers.Real) -> float:
    """Return a number as a float, NaN if none holds it."""
    try:
        return float(value)
    except OverflowError:
        return math.nan
