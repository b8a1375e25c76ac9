"""What a terminal must never be sent, and what it may."""

from __future__ import annotations

import pytest

from app.text import NAME_LIMIT, clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]52;c;ZWNobyBoYWNrZWQ=\x07", r"\x1b]52;c;ZWNobyBoYWNrZWQ=\x07"),
        ("\x1b[2J\x1b[H", r"\x1b[2J\x1b[H"),
        ("\x9b31mred", r"\x9b31mred"),
        ("one\r\ntwo", r"one\x0d\x0atwo"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("zero\u200bwidth\ufeff", r"zero\u200bwidth\ufeff"),
        ("next\u2028line", r"next\u2028line"),
        ("lone \ud800 surrogate", r"lone \ud800 surrogate"),
        ("private \U0010fffd", r"private \U0010fffd"),
        ("\x00\x7f\x85", r"\x00\x7f\x85"),
    ],
)
def test_what_a_terminal_would_act_on_is_shown_instead(text: str, shown: str) -> None:
    assert clean(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "[/x] [red]markup[/red]",
        "loss 2.31 \u2014 \u00e9t\u00e9 \u4f60\u597d \u2588\u2593",
        "a\u0301 combining",
        "\U0001f600",
    ],
)
def test_markup_and_other_scripts_pass_unchanged(text: str) -> None:
    assert clean(text) == text


def test_a_tab_becomes_spaces() -> None:
    assert clean("a\tb") == "a    b"


def test_what_is_too_long_is_cut_and_marked() -> None:
    assert clean("x" * 300) == "x" * (NAME_LIMIT - 1) + "\u2026"
    assert clean("\x1b" * 10, 12) == "\\x1b\\x1b\\x1\u2026"
