"""Text that acts on a terminal, or is taken for markup, and a look at whether a screen does what it says."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

from tests.support.screens import screen_strips

if TYPE_CHECKING:
    from tests.support.consoles import Desk

PAYLOADS = (
    "[/b]",
    "[@click=app.quit]x[/]",
    "[bold red]x",
    "\x1b[2J\x1b[H",
    "\x1b]52;c;ZWNobyBoYWNrZWQ=\x07",
    "\x9b2J",
    "\u202egnp.exe",
    "a\r\nb\tc\x00",
    "\u0301\u200d\ufe0f\U0001f469\u200d\U0001f469",
    "\u4e16\u754c" * 40,
    "\\",
)
HARMFUL = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def assert_is_harmless(console: Desk) -> None:
    for strip in screen_strips(console.console):
        for segment in strip:
            if segment.control:
                continue
            banned = [repr(character) for character in segment.text if unicodedata.category(character) in HARMFUL]
            assert banned == [], segment
            assert segment.style is None or "@click" not in segment.style.meta
            assert segment.style is None or segment.style.link is None
