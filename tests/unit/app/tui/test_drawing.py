"""Lines are exactly as wide as they are told to be, whatever characters they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style

from app.tui.theme import Look
from app.tui.widgets.drawing import Line, fitted, shifted, wrapped

TEXTS = st.text(st.sampled_from("abc  -\u4e16\u754c\u00e9\u2026"), max_size=60)
LOOK, PLAIN = Look(), Look(is_ascii=True)


@given(parts=st.lists(TEXTS, max_size=6), width=st.integers(0, 100), look=st.sampled_from([LOOK, PLAIN]))
def test_a_fitted_line_has_exactly_its_width(parts: list[str], width: int, look: Look) -> None:
    line = Line(look)
    for part in parts:
        line.put(part)

    assert sum(segment.cell_length for segment in line.fit(width).segments) == width == line.width


@given(text=TEXTS, width=st.integers(0, 40), is_right=st.booleans())
def test_fitted_text_has_exactly_its_width(text: str, width: int, is_right: bool) -> None:
    assert cell_len(fitted(text, width, "\u2026", is_right=is_right)) == width


def test_cut_text_ends_in_an_ellipsis_and_short_text_is_padded() -> None:
    assert fitted("bytegpt.py", 6, "~") == "byteg~"
    assert fitted("ab", 4, "~") == "ab  "
    assert fitted("ab", 4, "~", is_right=True) == "  ab"


@given(text=TEXTS, width=st.integers(2, 40), max_lines=st.integers(1, 4))
def test_wrapped_lines_are_no_wider_and_no_more_than_allowed(text: str, width: int, max_lines: int) -> None:
    lines = wrapped(text, width, max_lines, "\u2026")

    assert 1 <= len(lines) <= max_lines
    assert all(cell_len(line) <= width for line in lines)
    if not any(line.endswith("\u2026") for line in lines):
        assert " ".join(lines).split() == text.split()


def test_a_number_stays_with_its_unit() -> None:
    text = "it is held 27 % of the time, for 12 s"
    assert wrapped(text, 14, 4, "~") == ["it is held", "27 % of the", "time, for 12 s"]
    assert wrapped("of rank 3 so far", 10, 4, "~") == ["of rank 3", "so far"]
    assert wrapped("a GPU at 1,230 MHz, at 4 Cents", 14, 4, "~") == ["a GPU at", "1,230 MHz, at", "4 Cents"]


@given(frac=st.floats(0, 1), width=st.integers(1, 60), mark=st.none() | st.floats(0, 1.2))
def test_a_bar_has_exactly_its_width_with_and_without_a_mark(frac: float, width: int, mark: float | None) -> None:
    line = Line(LOOK).bar(frac, width, Style(), mark_frac=mark)

    text = "".join(segment.text for segment in line.segments)
    assert len(text) == width == line.width
    assert (LOOK.glyphs.mark in text) is (mark is not None)


def test_ascii_look_shows_other_characters_as_escapes() -> None:
    line = Line(PLAIN).put("caf\u00e9").cell("\u4e16", 8)

    assert "".join(segment.text for segment in line.segments) == "caf\\xe9\\u4e16  "


def test_a_style_laid_over_keeps_what_it_does_not_say() -> None:
    line = Line(LOOK).put("a", Style(color="red")).laid_over(Style(bold=True))

    assert line.segments[0].style == Style(color="red", bold=True)


@pytest.mark.parametrize(
    ("text", "cells", "rest"),
    [
        ("abcdef", 2, "cdef"),
        ("abc", 5, ""),
        ("\u4e16\u754cx", 2, "\u754cx"),
        ("\u4e16\u754cx", 1, " \u754cx"),
        ("\u4e16", 9, ""),
    ],
)
def test_text_moves_to_the_side_by_cells(text: str, cells: int, rest: str) -> None:
    assert shifted(text, cells) == rest


@given(text=TEXTS, cells=st.integers(0, 80))
def test_what_is_left_of_moved_text_is_as_wide_as_it_should_be(text: str, cells: int) -> None:
    assert cell_len(shifted(text, cells)) == max(0, cell_len(text) - cells)
