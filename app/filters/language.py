"""Reads a filter that the user types; the result is a filter or a sentence that explains what is wrong.

Terms stand side by side and must all hold: `state=waiting node=gpu* rank=0,3-5 wait>5s word "some text" /regex/`; `!`
before a term inverts it. What is still being typed counts as it stands: an open quote or pattern ends with the line.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

from app.filters.patterns import PatternError, TextPattern, glob, literal
from app.filters.terms import (
    EVERYTHING,
    FigureTerm,
    Filter,
    KeyKind,
    NameTerm,
    NumberTerm,
    TextTerm,
    WordTerm,
    WrongFilter,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.filters.terms import Key, Term

MAX_FILTER_CHARS = 2000
MAX_TERMS = 32
MAX_NUMBER = 2**53
_KEY = re.compile(r"([A-Za-z_]\w*)(!=|<=|>=|=|<|>)", re.ASCII)
_RANGE = re.compile(r"(\d{1,15})(-(\d{1,15})?)?", re.ASCII)
_FIGURE = re.compile(r"((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d*)?|\.\d+)\s*([A-Za-z%]*)", re.ASCII)


class _WrongError(Exception):
    """The text is no filter; caught where it is read."""

    def __init__(self, why: str, at: int) -> None:
        super().__init__(why)
        self.why, self.at = why, at


def read_filter(text: str, keys: Sequence[Key]) -> Filter | WrongFilter:
    """Return the filter that `text` is, for a table that knows `keys`, or what is wrong with it."""
    if len(text) > MAX_FILTER_CHARS:
        return WrongFilter(f"a filter has at most {MAX_FILTER_CHARS} characters", MAX_FILTER_CHARS)
    try:
        terms = tuple(_Reader(text, keys).terms())
    except _WrongError as wrong:
        return WrongFilter(wrong.why, wrong.at)
    if len(terms) > MAX_TERMS:
        return WrongFilter(f"a filter has at most {MAX_TERMS} terms", len(text))
    return Filter(text.strip(), terms) if terms else EVERYTHING


class _Reader:
    """Walks through a text once."""

    def __init__(self, text: str, keys: Sequence[Key]) -> None:
        self._text = text
        self._keys = {key.name: key for key in keys}
        self._at = 0

    def terms(self) -> list[Term]:
        found: list[Term] = []
        while self._skip_blanks():
            found.append(self._term())
        return found

    def _skip_blanks(self) -> bool:
        """Go to the next term; return whether there is one."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._at < len(self._text)

    def _term(self) -> Term:
        start, is_inverse = self._at, False
        while self._text.startswith("!", self._at):
            is_inverse, self._at = not is_inverse, self._at + 1
        if self._at == len(self._text) or self._text[self._at].isspace():
            raise _WrongError("behind ! stands what is not to be shown, as in !state=running", start)
        start = self._at
        if self._text[start] == "/":
            return TextTerm(self._pattern(self._enclosed("/"), start), is_inverse)
        if self._text[start] == '"':
            return TextTerm(self._pattern(literal(self._enclosed('"')), start), is_inverse)
        match = _KEY.match(self._text, start)
        if match is None:
            return TextTerm(self._pattern(literal(self._word()), start), is_inverse)
        self._at = match.end()
        key, comparison = self._key(match.group(1), start), match.group(2)
        is_quoted = self._text.startswith('"', self._at)
        value_at = self._at
        value = self._enclosed('"') if is_quoted else self._word()
        if comparison == "!=":
            comparison, is_inverse = "=", not is_inverse
        return _term_of(key, comparison, value, is_inverse=is_inverse, at=value_at)

    def _word(self) -> str:
        """Take everything up to the next blank."""
        start = self._at
        while self._at < len(self._text) and not self._text[self._at].isspace():
            self._at += 1
        return self._text[start : self._at]

    def _enclosed(self, mark: str) -> str:
        r"""Take what stands between two marks, or from the mark to the end of the line.

        A pattern ends where a blank follows the mark, so that a path is one; with `\` before it a mark is a character.
        """
        text, taken = self._text, []
        self._at += 1
        while self._at < len(text):
            character = text[self._at]
            after = text[self._at + 1 : self._at + 2]
            if character == "\\" and after == mark:
                taken.append(mark)
                self._at += 2
                continue
            self._at += 1
            if character == mark and (mark == '"' or not after.strip()):
                break
            taken.append(character)
            if character == "\\" and after:
                taken.append(after)
                self._at += 1
        return "".join(taken)

    def _key(self, name: str, at: int) -> Key:
        key = self._keys.get(name.lower())
        if key is not None:
            return key
        near = difflib.get_close_matches(name.lower(), self._keys, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(self._keys))};"
        raise _WrongError(f"no key is called {name}: {meant} In quotes it is a text to look for", at)

    @staticmethod
    def _pattern(source: str, at: int) -> TextPattern:
        try:
            return TextPattern(source)
        except PatternError as error:
            raise _WrongError(f"/{source}/ is no pattern: {error}", at) from None


def _term_of(key: Key, comparison: str, value: str, *, is_inverse: bool, at: int) -> Term:
    if key.kind is KeyKind.FIGURE:
        return FigureTerm(key.name, comparison, _figure(key, value, at), is_inverse)
    if comparison != "=":
        example = f", as in {key.name}=2-" if key.kind is KeyKind.NUMBER else ""
        raise _WrongError(f"{key.name} is no figure: it goes with = or !={example}", at - len(comparison))
    parts = [part for part in value.split(",") if part]
    if not parts:
        raise _WrongError(f"behind {key.name}= stands {_wanted(key)}", at)
    match key.kind:
        case KeyKind.WORD:
            choices = frozenset(word for part in parts for word in _choices(key, part.lower(), at))
            return WordTerm(key.name, choices, is_inverse)
        case KeyKind.NAME:
            return NameTerm(key.name, tuple(_name_pattern(part, at) for part in parts), is_inverse)
        case _:
            return NumberTerm(key.name, tuple(_range(key, part, at) for part in parts), is_inverse)


def _wanted(key: Key) -> str:
    match key.kind:
        case KeyKind.WORD:
            return f"one of {', '.join(key.choices)}"
        case KeyKind.NAME:
            return "a name; * stands for any characters"
        case KeyKind.NUMBER:
            return " or ".join(["numbers, as in 0,3-5", *(word for word, _ in key.numbers)])
        case _:
            units = ", ".join(unit for unit, _ in key.units if unit)
            return f"a number{f' with {units} behind it or none' if units else ''}"


def _choices(key: Key, part: str, at: int) -> list[str]:
    """Return the choices that begin with a text: a clear prefix is enough."""
    if part in key.choices:
        return [part]
    if begun := [word for word in key.choices if word.startswith(part)]:
        return begun
    near = difflib.get_close_matches(part, key.choices, 1)
    meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(key.choices)}"
    raise _WrongError(f"no {key.name} is called {part}: {meant}", at)


def _name_pattern(part: str, at: int) -> TextPattern:
    try:
        return TextPattern(glob(part), is_case_exact=True)
    except PatternError as error:
        raise _WrongError(f"{part} is no name: {error}", at) from None


def _range(key: Key, part: str, at: int) -> tuple[int, int]:
    named = dict(key.numbers).get(part.lower())
    if named is not None:
        return named, named
    match = _RANGE.fullmatch(part)
    if match is None:
        raise _WrongError(f"{part} is no {key.name}: behind {key.name}= stand {_wanted(key)}", at)
    first = int(match.group(1))
    last = first if match.group(2) is None else int(match.group(3) or MAX_NUMBER)
    return min(first, last), max(first, last)


def _figure(key: Key, value: str, at: int) -> float:
    match = _FIGURE.fullmatch(value)
    units = dict(key.units)
    if match is None or match.group(2).lower() not in units:
        if "," in value:
            raise _WrongError(f"{value} is no {key.name}: commas part thousands, a point the rest: 1,000.5", at)
        problem = f"{value} is no {key.name}: " if value else ""
        raise _WrongError(f"{problem}behind {key.name} stands {_wanted(key)}", at)
    return float(match.group(1).replace(",", "").replace("_", "")) * units[match.group(2).lower()]
