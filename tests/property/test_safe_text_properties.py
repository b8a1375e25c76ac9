"""Whatever text comes in, what goes out is one harmless line."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from app.text import LINE_LIMIT, NAME_LIMIT, clean, clean_name

BANNED = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
texts = st.text(st.characters(), max_size=400)


@given(texts, st.integers(1, 300))
def test_no_banned_character_comes_out_and_the_length_is_bounded(text: str, limit: int) -> None:
    shown = clean(text, limit)

    assert {unicodedata.category(character) for character in shown} & BANNED == set()
    assert len(shown) <= limit
    shown.encode()


@given(texts, st.integers(1, 300))
def test_cleaning_twice_is_cleaning_once(text: str, limit: int) -> None:
    assert clean(clean(text, limit), limit) == clean(text, limit)


@given(st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), max_size=NAME_LIMIT))
def test_plain_text_passes_unchanged(text: str) -> None:
    assert clean(text) == text


@given(texts)
def test_a_remembered_name_is_the_cleaned_name(text: str) -> None:
    assert clean_name(text) == clean(text)


@given(st.text(st.sampled_from("\x1b\x07[]52;c2Jm\u202e\u2066\x9b\x85\u200b\ud800 ab"), max_size=LINE_LIMIT))
def test_no_escape_sequence_survives(text: str) -> None:
    assert not set(clean(text, LINE_LIMIT)) & set("\x1b\x07\x9b\x85\u202e\u2066\u200b\ud800")
