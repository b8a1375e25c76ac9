"""How a log line is drawn: who printed it, on which stream, what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

from app.tui.drawing import Line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from app.tui.log_store import StoredLine
    from app.tui.theme import Look

MAX_PREFIX = 24


def prefix(stored: StoredLine) -> str:
    """Return `demo-1:r2`, or `demo-1:launcher`."""
    return f"{stored.node}:r{stored.rank}" if stored.rank >= 0 else f"{stored.node}:launcher"


def prefix_width(lines: list[StoredLine]) -> int:
    """Return the cells in which the prefixes of some lines fit."""
    return text_width(prefix(line) for line in lines)


def text_width(prefixes: Iterable[str]) -> int:
    """Return the cells in which some prefixes fit."""
    return min(MAX_PREFIX, max(map(cell_len, prefixes), default=0))


def log_line(
    look: Look, stored: StoredLine, width: int, offset: int = 0, found: tuple[int, int] | None = None, who: str = ""
) -> Line:
    """Return a log line with its prefix in `width` cells, its text from cell `offset` on.

    Args:
        look: Of the terminal.
        stored: The line.
        width: Of its prefix.
        offset: Cells that the text is moved to the side.
        found: Which characters of it were looked for.
        who: Its prefix, where that is not who printed it.
    """
    palette = look.palette
    line = Line(look).put(" ").cell(who or prefix(stored), width, look.rank_style(stored.rank))
    line.put(f" {look.glyphs.stderr if stored.is_stderr else ' '} ", palette.warning)
    if found is not None and not offset:
        start, stop = found
        line.put(stored.text[:start], palette.ink).put(stored.text[start:stop], palette.found)
        return line.put(stored.text[stop:], palette.ink)
    return line.put(shifted(stored.text, offset) if offset else stored.text, palette.ink)


def shifted(text: str, cells: int) -> str:
    """Return text without its first cells; half of a wide character becomes a blank."""
    if text.isascii():
        return text[cells:]
    size = cell_len(text)
    if size <= cells:
        return ""
    kept = set_cell_size(text, cells)
    num_whole = len(kept) if text.startswith(kept) else len(kept) - 1
    rest = text[num_whole:]
    return rest if text.startswith(kept) else " " + rest[1:]
