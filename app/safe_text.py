"""Makes text from ranks and nodes safe to show: no control, escape, bidirectional or invisible character survives.

Whatever a rank prints may contain terminal escapes (OSC 52 writes the clipboard, CSI 2J clears the screen) or
characters that reorder the line. Each such character is shown as an escape of its code point, visibly.

Source: Unicode categories Cc, Cf, Zl, Zp and Cs; Trojan Source (CVE-2021-42574).
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

NAME_LIMIT = 256
LINE_LIMIT = 4096

_SUSPECT = re.compile(r"[^\x20-\x7e\xa1-\xac\xae-\u02ff\u2500-\u27ff\u4e00-\u9fff]")
"""Everything outside the harmless blocks that logs are made of; each hit is looked at by its category."""

_BANNED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
TAB_WIDTH = 4


def _shown(match: re.Match[str]) -> str:
    character = match.group()
    if character == "\t":
        return " " * TAB_WIDTH
    if unicodedata.category(character) not in _BANNED_CATEGORIES:
        return character
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def clean(text: str, limit: int = NAME_LIMIT) -> str:
    r"""Return `text` as one safe line of at most `limit` characters.

    A tab becomes spaces; control, format, surrogate, private and unassigned characters and line ends become `\xNN`,
    `\uNNNN` or `\UNNNNNNNN`; what is over the limit is cut and marked with an ellipsis.
    """
    shown = _SUSPECT.sub(_shown, text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"


@lru_cache(maxsize=4096)
def clean_name(text: str) -> str:
    """Return `clean(text)`, remembered: names of nodes, operations and files come again in every report."""
    return clean(text)
