"""The names of keys: as users write them in a file, as Textual names them, and as the screen shows them.

A terminal cannot distinguish every key from every other: names that never arrive are refused with what to write instead
(`key_named`).

Source: textual.keys of Textual 8.2, whose names these are; a test compares them.

`nearest` and `nearest_text` suggest the known name that a wrong one perhaps stands for.
"""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_COMPARED = 60
"""Characters compared of a wrong name: comparing takes time that grows with their square."""


def nearest(word: str, known: Sequence[str]) -> str:
    """Return the known name that was perhaps meant, empty where none is near."""
    from difflib import get_close_matches  # noqa: PLC0415 - needed only after a typo

    begun = [name for name in known if len(word) > 1 and name.startswith(word)]
    return next(iter(begun or get_close_matches(word[:MAX_COMPARED], known, 1)), "")


def nearest_text(word: str, known: Sequence[str]) -> str:
    """Return `; the nearest is X`, or nothing where none is near."""
    near = nearest(word, known)
    return f"; the nearest is {near}" if near else ""


SYMBOLS = {
    "!": "exclamation_mark",
    '"': "quotation_mark",
    "#": "number_sign",
    "$": "dollar_sign",
    "%": "percent_sign",
    "&": "ampersand",
    "'": "apostrophe",
    "(": "left_parenthesis",
    ")": "right_parenthesis",
    "*": "asterisk",
    "+": "plus",
    ",": "comma",
    "-": "minus",
    ".": "full_stop",
    "/": "slash",
    ":": "colon",
    ";": "semicolon",
    "<": "less_than_sign",
    "=": "equals_sign",
    ">": "greater_than_sign",
    "?": "question_mark",
    "@": "at",
    "[": "left_square_bracket",
    "\\": "backslash",
    "]": "right_square_bracket",
    "^": "circumflex_accent",
    "_": "underscore",
    "`": "grave_accent",
    "{": "left_curly_bracket",
    "|": "vertical_line",
    "}": "right_curly_bracket",
    "~": "tilde",
    " ": "space",
}
_MOVES = ("up", "down", "left", "right", "home", "end", "pageup", "pagedown", "insert", "delete")
_FUNCTIONS = tuple(f"f{number}" for number in range(1, 25))
_CTRL_LETTERS = tuple(f"ctrl+{letter}" for letter in string.ascii_lowercase if letter not in "chijmq")
NAMED = frozenset(
    {
        *SYMBOLS.values(),
        *_MOVES,
        *_FUNCTIONS,
        *_CTRL_LETTERS,
        *(f"{modifier}+{move}" for modifier in ("ctrl", "shift", "ctrl+shift") for move in _MOVES),
        *(f"ctrl+{function}" for function in _FUNCTIONS),
        *("tab", "shift+tab", "enter", "escape", "backspace"),
    }
)
"""Every key beyond letters and digits that a terminal distinguishes from the others."""

_OTHER_NAMES = {
    "esc": "escape",
    "return": "enter",
    "del": "delete",
    "ins": "insert",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "page_up": "pageup",
    "page_down": "pagedown",
    "period": "full_stop",
    "dot": "full_stop",
}
_SAME_KEYS = {"ctrl+i": "tab", "ctrl+m": "enter", "ctrl+j": "enter", "ctrl+h": "backspace"}
_ALWAYS_LEAVE = ("ctrl+c", "ctrl+q")
_SHOWN = {name: symbol for symbol, name in SYMBOLS.items() if symbol != " "} | {
    "escape": "Esc",
    "enter": "Enter",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "home": "Home",
    "end": "End",
    "insert": "Insert",
    "delete": "Delete",
}
MAX_SHOWN = 40
"""Characters of a wrong name that are repeated."""


class WrongKeyError(ValueError):
    """The name is that of no key; the message names what to write instead, where that is known."""


def key_named(word: str) -> str:
    """Return Textual's name of a key that the user has written: `?`, `G`, `pageup`, `Ctrl+F`, `esc`.

    Raises:
        WrongKeyError: There is no such key, or a terminal does not distinguish it from another.
    """
    if len(word) == 1:
        if word in SYMBOLS:
            return SYMBOLS[word]
        if word.isascii() and word.isalnum():
            return word
    name = word.strip().lower().replace(" ", "_")
    name = _OTHER_NAMES.get(name, name)
    if name in NAMED:
        return name
    raise WrongKeyError(_why_not(word, name))


def _why_not(word: str, name: str) -> str:
    shown = repr(word[:MAX_SHOWN])
    if name in _ALWAYS_LEAVE:
        return f"{shown} always leaves the console, whatever else is set"
    if name in _SAME_KEYS:
        return f"a terminal sends the same for {shown} as for {_SAME_KEYS[name]}: write that, or take another"
    modifier, _, letter = name.rpartition("+")
    if modifier == "shift" and len(letter) == 1 and letter.isalpha():
        return f"{shown} is written as the capital letter: {letter.upper()!r}"
    return f"{shown} is no key{nearest_text(name, sorted(NAMED))}"


def shown_key(key: str) -> str:
    """Return a key as it stands on the screen: `?`, `Esc`, `ctrl+p`."""
    modifiers, _, last = key.rpartition("+")
    shown = _SHOWN.get(last, last.upper() if last in _FUNCTIONS else last)
    return f"{modifiers}+{shown}" if modifiers else shown
