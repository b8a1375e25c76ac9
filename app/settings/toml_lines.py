"""TOML with the line of every key: an error in a value is shown with its place in the file.

The standard library's parser decides what a file holds; lines are found by walking over the same text once more, which
can trust it to be well-formed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

Path = tuple[str, ...]

MAX_KEY_PARTS = 64
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_STRING = re.compile(
    r'''
      """ (?: [^"\\] | \\. | "(?!"") )* "{3,5}
    | \'{3} (?: [^\'] | \'(?!\'\') )* \'{3,5}
    | " (?: [^"\\\n] | \\. )* "
    | \' [^\'\n]* \'
    ''',
    re.DOTALL | re.VERBOSE,
)
_AT = re.compile(r" \(at (?:line (\d+), column \d+|end of document)\)$")


class NotTomlError(ValueError):
    """A text is not TOML.

    Attributes:
        line: Line of the error, from 1 on.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


def parse(text: str) -> tuple[dict[str, Any], Mapping[Path, int]]:
    """Return the content of a text, and the line in which each of its tables and keys is first named.

    The tables of an array are named by their places in it: `("node", "0", "host")`.

    Raises:
        NotTomlError: It is not TOML.
    """
    import tomllib  # noqa: PLC0415 - only who has a file pays for it

    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = _AT.search(str(error))
        message = str(error)[: at.start()] if at else str(error)
        raise NotTomlError(message, int(at[1]) if at and at[1] else text.rstrip().count("\n") + 1) from None
    except ValueError:
        raise NotTomlError("it has a number of too many digits", 1) from None
    except RecursionError:
        raise NotTomlError("it is nested too deeply", 1) from None
    return content, _Walk(text).lines()


class _Walk:
    """Goes over well-formed TOML from key to key."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._line = 1
        self._found: dict[Path, int] = {}
        self._num_tables: dict[Path, int] = {}

    def lines(self) -> Mapping[Path, int]:
        table: Path = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            line = self._line
            if self._text[self._at] == "[":
                num_brackets = 0
                while self._text[self._at] == "[":
                    self._step()
                    num_brackets += 1
                table = self._key()
                if num_brackets > 1:
                    table = self._next_of(table)
                while self._at < len(self._text) and self._text[self._at] == "]":
                    self._step()
                self._put(table, line)
            else:
                key = self._key()
                self._put((*table, *key), line)
                self._step()  # over the =
                self._value()
            self._skip(_BLANK)
        return self._found

    def _next_of(self, table: Path) -> Path:
        """Return the path of one more table of an array, by its place there."""
        number = self._num_tables.get(table, 0)
        self._num_tables[table] = number + 1
        return (*table, str(number))

    def _put(self, path: Path, line: int) -> None:
        for size in range(1, len(path) + 1):
            self._found.setdefault(path[:size], line)

    def _key(self) -> Path:
        """Walk over a key, dots and blanks included, and return its parts."""
        parts: list[str] = []
        while True:
            if len(parts) == MAX_KEY_PARTS:
                raise NotTomlError(f"a key has more than {MAX_KEY_PARTS} parts", self._line)
            self._blanks()
            if self._text[self._at] in "\"'":
                parts.append(_unquoted(self._skip(_STRING)))
            else:
                parts.append(self._skip(_BARE))
            self._blanks()
            if self._at >= len(self._text) or self._text[self._at] != ".":
                return tuple(parts)
            self._step()

    def _value(self) -> None:
        """Walk over a value: until its line ends outside of brackets and strings."""
        depth = 0
        while self._at < len(self._text):
            character = self._text[self._at]
            if character in "\"'":
                self._skip(_STRING)
            elif character == "#":
                self._skip(_BLANK) if depth else self._comment()
            elif character == "\n" and not depth:
                return
            else:
                depth += (character in "[{") - (character in "]}")
                self._step()

    def _comment(self) -> None:
        end = self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1

    def _step(self) -> None:
        self._line += self._text[self._at] == "\n"
        self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """Walk over what a pattern matches here, and return it."""
        match = pattern.match(self._text, self._at)
        assert match is not None, f"the parser took what the walk does not know, in line {self._line}"
        self._at = match.end()
        self._line += match[0].count("\n")
        return match[0]


def _unquoted(quoted: str) -> str:
    """Return the part of a key that stands in quotes."""
    import tomllib  # noqa: PLC0415 - as above

    content = tomllib.loads(f"key = {quoted}")["key"]
    assert isinstance(content, str)
    return content
