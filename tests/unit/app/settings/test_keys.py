"""Keys as people write them, as Textual calls them, and as the screen shows them."""

from __future__ import annotations

import string

import pytest
from textual.keys import ASCII_KEY_NAMES, Keys, _character_to_key

from app.settings.keys import NAMED, SYMBOLS, WrongKeyError, key_named, shown_key

TEXTUAL = {key.value for key in Keys} | {_character_to_key(character) for character in string.printable}


def test_every_symbol_has_the_name_that_textual_gives_it() -> None:
    assert set(SYMBOLS) == {*string.punctuation, " "}
    assert {symbol: _character_to_key(symbol) for symbol in SYMBOLS} == SYMBOLS
    assert ASCII_KEY_NAMES is not None


def test_every_named_key_is_one_that_textual_knows() -> None:
    assert set() == NAMED - TEXTUAL


@pytest.mark.parametrize(
    ("word", "key", "shown"),
    [
        ("q", "q", "q"),
        ("G", "G", "G"),
        ("7", "7", "7"),
        ("?", "question_mark", "?"),
        ("question_mark", "question_mark", "?"),
        (",", "comma", ","),
        (" ", "space", "space"),
        ("Esc", "escape", "Esc"),
        ("Return", "enter", "Enter"),
        ("PageUp", "pageup", "PageUp"),
        ("page up", "pageup", "PageUp"),
        ("F2", "f2", "F2"),
        ("Ctrl+F", "ctrl+f", "ctrl+f"),
        ("ctrl+shift+home", "ctrl+shift+home", "ctrl+shift+Home"),
        ("ctrl+f5", "ctrl+f5", "ctrl+F5"),
        ("shift+tab", "shift+tab", "shift+tab"),
    ],
)
def test_a_key_is_taken_as_people_write_it(word: str, key: str, shown: str) -> None:
    assert key_named(word) == key
    assert shown_key(key) == shown
    assert key_named(shown) == key


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("ctrl+c", "'ctrl+c' always leaves the console, whatever else is set"),
        ("CTRL+Q", "'CTRL+Q' always leaves the console, whatever else is set"),
        ("ctrl+i", "a terminal sends the same for 'ctrl+i' as for tab: write that, or take another"),
        ("ctrl+m", "a terminal sends the same for 'ctrl+m' as for enter: write that, or take another"),
        ("shift+g", "'shift+g' is written as the capital letter: 'G'"),
        ("pagedwon", "'pagedwon' is no key; the nearest is pagedown"),
        ("escpae", "'escpae' is no key; the nearest is escape"),
        ("", "'' is no key"),
        ("\u00e9", "'\u00e9' is no key"),
        ("\x1b", "'\\x1b' is no key"),
        ("xyzzy", "'xyzzy' is no key"),
        ("super+x", "'super+x' is no key"),
    ],
)
def test_what_no_terminal_sends_is_refused_with_what_to_write_instead(word: str, why: str) -> None:
    with pytest.raises(WrongKeyError) as caught:
        key_named(word)

    assert str(caught.value) == why
