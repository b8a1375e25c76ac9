"""The tables of a `rankdeck.toml`: read key by key, and everything that is wrong in them kept, with its line. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.settings.keys import nearest_text
from app.settings.layers import Origin, Trouble
from app.settings.schema import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from app.settings.toml_lines import Path

    Fields = Mapping[str, tuple[str, Callable[[object], object]]]
    """By key of the file: the field, and what takes its value."""


class WrongValueError(ValueError):
    """A value cannot be; the message says why."""


class TableReader:
    """Takes tables of a file apart.

    Attributes:
        troubles: All that is wrong.
    """

    def __init__(self, lines: Mapping[Path, int], place: str) -> None:
        """`lines` says where each key stands; `place` is the file's name."""
        self.troubles: list[Trouble] = []
        self._lines = lines
        self._place = place

    def values(self, table: object, known: Fields, path: Path, brackets: str) -> dict[str, Any]:
        """Return the right values of a table, by the fields that take them.

        Args:
            table: As it was read.
            known: The keys that it may have.
            path: Where it is.
            brackets: What is written above its keys.
        """
        if not isinstance(table, dict):
            self.complain(path, f"{path[0]} is a table: write {brackets} above its keys")
            return {}
        values = {}
        for key, value in table.items():
            if key not in known:
                self.complain((*path, key), f"{key}: no such key of {path[0]}{nearest_text(key, list(known))}")
                continue
            field, take = known[key]
            try:
                values[field] = take(value)
            except WrongValueError as error:
                self.complain((*path, key), f"{key}: {error}")
        return values

    def complain(self, path: Path, what: str) -> None:
        """Keep that something is wrong."""
        self.troubles.append(Trouble(Origin(self._place, self.line(path)), what))

    def line(self, path: Path) -> int:
        """Return where something stands, or what it stands in."""
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path, 1)


def text(value: object) -> str:
    """Return a text of one line.

    Raises:
        WrongValueError: It is none.
    """
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise WrongValueError(f"{repeated(value)} is no text of one line")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Return some texts.

    Raises:
        WrongValueError: It is no list of them.
    """
    if not isinstance(value, list):
        raise WrongValueError(f"{repeated(value)} is no list of texts")
    return tuple(text(item) for item in value)


def yes_or_no(value: object) -> bool:
    """Return a truth.

    Raises:
        WrongValueError: It is none.
    """
    if not isinstance(value, bool):
        raise WrongValueError(f"{repeated(value)} is neither true nor false")
    return value


def whole_number(lowest: int, highest: int) -> Callable[[object], int]:
    """Return what takes a whole number within bounds."""

    def take(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise WrongValueError(f"{repeated(value)} is no number from {lowest} to {highest}")
        return value

    return take


def seconds(value: object) -> float:
    """Return a number of seconds.

    Raises:
        WrongValueError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise WrongValueError(f"{repeated(value)} is no number of seconds from 0 to {MAX_SECONDS:,}")
    return float(value)


MAX_SECONDS = 10_000_000
