"""The tables of a `rankdeck.toml`, read key by key; all their errors are kept, with their lines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.settings.keys import nearest_text
from app.settings.layers import Origin, Trouble
from app.settings.schema import repeated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from app.settings.toml_lines import Path

    Fields = Mapping[str, tuple[str, Callable[[object], object]]]
    """Field and value parser by key of the file."""


class WrongValueError(ValueError):
    """A value is invalid; the message contains why."""


class TableReader:
    """Reads the tables of a file.

    Attributes:
        troubles: All errors.
    """

    def __init__(self, lines: Mapping[Path, int], place: str) -> None:
        """`lines` holds the line of each key; `place` is the file's name."""
        self.troubles: list[Trouble] = []
        self._lines = lines
        self._place = place

    def values(self, table: object, known: Fields, path: Path, brackets: str) -> dict[str, Any]:
        """Return the valid values of a table by field.

        Args:
            table: As it was read.
            known: The keys that it may have.
            path: Its place in the file.
            brackets: The table's heading, as `[cluster]`.
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
        """Keep an error."""
        self.troubles.append(Trouble(Origin(self._place, self.line(path)), what))

    def line(self, path: Path) -> int:
        """Return the line of a key, or of the table that contains it."""
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
    """Return a list of texts.

    Raises:
        WrongValueError: It is none.
    """
    if not isinstance(value, list):
        raise WrongValueError(f"{repeated(value)} is no list of texts")
    return tuple(text(item) for item in value)


def yes_or_no(value: object) -> bool:
    """Return true or false.

    Raises:
        WrongValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise WrongValueError(f"{repeated(value)} is neither true nor false")
    return value


def whole_number(lowest: int, highest: int) -> Callable[[object], int]:
    """Return a parser of whole numbers within bounds."""

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
