"""Formats units, ranges and code places as text, and escapes unsafe characters in text from others.

The unit functions serve the screen, printed lines and sentences alike: `..._text` is for sentences; `..._cell` is never
wider than its documented width, for columns that must not jump.

`clean` and `clean_name` make text from ranks and nodes safe: no control, escape, bidirectional or invisible character
survives. A rank's output may contain terminal escapes (OSC 52 writes the clipboard, CSI 2J clears the screen) or
characters that reorder the line. Each such character is shown as an escape of its code point.

Source: Unicode categories Cc, Cf, Zl, Zp and Cs; Trojan Source (CVE-2021-42574).
"""

from __future__ import annotations

import math
import re
import signal
import unicodedata
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from ddpcore.wire import BARRIER_GROUP, DEFAULT_GROUP, FIRST_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ddpcore.wire import Place

UNKNOWN = "-"
"""Text of a value that is not known."""

MAX_RANGES = 12
"""Limit of rank ranges that a sentence names; it counts the rest."""

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def bytes_text(num_bytes: float | None) -> str:
    """Return `412 MiB` or `1.5 GiB`."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    value, unit = _scaled(num_bytes)
    return f"{_three_digits(value) if unit else f'{value:.0f}'} {_BYTE_UNITS[unit]}"


def bytes_cell(num_bytes: float | None) -> str:
    """Return `412M` or `1.5G`: at most 5 characters."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    value, unit = _scaled(num_bytes)
    return f"{_three_digits(value) if unit else f'{value:.0f}'}{_BYTE_UNITS[unit][0]}"


def _scaled(num_bytes: float) -> tuple[float, int]:
    value, unit = max(0.0, float(num_bytes)), 0
    while value >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        value /= 1024
        unit += 1
    return min(value, 9999.0), unit


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def seconds_text(seconds: float | None) -> str:
    """Return `0.4 s`, `12 s`, `3 min 20 s` or `2 h 5 min`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _joined(whole // 60, "min", whole % 60, "s")
    return _joined(whole // 3600, "h", whole % 3600 // 60, "min")


def short_seconds_text(seconds: float) -> str:
    """Return `0.4 ms` or `12 ms` below one second, else as `seconds_text`."""
    return f"{_three_digits(1000 * seconds)} ms" if seconds < 1 else seconds_text(seconds)


def _joined(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit} {small} {small_unit}" if small else f"{large} {large_unit}"


def seconds_cell(seconds: float | None) -> str:
    """Return `0.4s`, `12s`, `3m20s`, `2h05m` or `3d`: at most 6 characters."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 100 * 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{min(whole // 86400, 99999)}d"


def percent_text(fraction: float | None) -> str:
    """Return `42 %`."""
    return UNKNOWN if fraction is None or not math.isfinite(fraction) else f"{round(100 * fraction)} %"


def signed_percent_text(fraction: float) -> str:
    """Return `+4 %` or `-3 %`; `0 %` has no sign."""
    rounded = round(100 * fraction)
    return f"{rounded:+} %" if rounded else "0 %"


def step_text(step: int | None, *, is_least: bool) -> str:
    """Return `384`, `384+` where it may be more; empty where it is not known."""
    return "" if step is None else f"{step}{'+' if is_least else ''}"


def loss_step_text(loss_step: int | None, step: int | None) -> str:
    """Return ` at step 120` for a loss of an earlier step than the one that is shown beside it; else nothing."""
    return f" at step {loss_step:,}" if loss_step is not None and step is not None and loss_step < step else ""


def loss_text(loss: float | None) -> str:
    """Return `2.31`: three significant digits, trailing zeros kept."""
    if loss is None:
        return UNKNOWN
    if not math.isfinite(loss):
        return "NaN" if math.isnan(loss) else f"{loss}"
    return f"{loss:.2f}" if 0.095 <= abs(loss) < 1000 else f"{loss:.3g}"


def clock_text(seconds: float) -> str:
    """Return `1:05` or `1:02:05`, as media players show a position."""
    minutes, whole = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"


def rate_text(per_second: float | None) -> str:
    """Return `24` or `3.2`, without a unit."""
    return UNKNOWN if per_second is None or not math.isfinite(per_second) else _three_digits(per_second)


def number_ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers as (first, last), in order."""
    runs: list[tuple[int, int]] = []
    first = last = None
    for number in sorted(set(numbers)):
        if first is None or last is None:
            first = last = number
        elif number == last + 1:
            last = number
        else:
            runs.append((first, last))
            first = last = number
    if first is not None and last is not None:
        runs.append((first, last))
    return runs


def ranges_text(numbers: Iterable[int], max_ranges: int = MAX_RANGES) -> str:
    """Return `0-3, 7`; runs beyond `max_ranges` are counted: `0, 2, 4 and 13 more`."""
    runs = number_ranges(numbers)
    shown = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:max_ranges])
    num_left = sum(last - first + 1 for first, last in runs[max_ranges:])
    return f"{shown} and {num_left} more" if num_left else shown


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 2`, `ranks 0-1, 3` or `no rank`."""
    if not ranks:
        return "no rank"
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges_text(ranks)}"


def nodes_text(nodes: Sequence[str], max_named: int = 2) -> str:
    """Return `demo-0`, `demo-0 and demo-1`, `demo-0, demo-1 and demo-2` or `demo-0, demo-1 and 3 more`.

    Names all of `max_named + 1` nodes; of more, the rest beyond `max_named` is counted.
    """
    if len(nodes) <= max_named + 1:
        return " and ".join(filter(None, [", ".join(nodes[:-1]), *nodes[-1:]]))
    return f"{', '.join(nodes[:max_named])} and {len(nodes) - max_named} more"


def attempt_text(attempt: int) -> str:
    """Return `restart 1` for attempt 1, as an agent counts; empty for attempt 0, a job's first start."""
    return f"restart {attempt}" if attempt else ""


def place_text(place: Place | None) -> str:
    """Return `file.py:line in function` without the file's directory; empty when it is not known."""
    return "" if place is None else clean_name(f"{place.file.rpartition('/')[2]}:{place.line} in {place.function}")


def call_text(group: str, seq: int | None, op: str, label: str) -> str:
    """Return `all_reduce #57`, `barrier "epoch" #3` or `all_reduce #57 of group 4`."""
    parts = [clean_name(op) or "collective"]
    if label:
        parts.append(f'"{clean_name(label)}"')
    if seq:
        parts.append(f"#{seq}")
    if group not in (DEFAULT_GROUP, BARRIER_GROUP, "") and not group.startswith(FIRST_GROUP):
        parts.append(f"of group {clean_name(group)}")
    return " ".join(parts)


def sizes_text(num_elements: int) -> str:
    """Return `1 element` or `2,001,000 elements`."""
    return f"{num_elements:,} element{'' if num_elements == 1 else 's'}"


def signal_text(number: int) -> str:
    """Return `SIGKILL`, or `signal 99` where this system has no name for it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def finite(value: float | None) -> float | None:
    """Return the value, or None when it is not a finite number."""
    return None if value is None or not math.isfinite(value) else float(value)


def json_value(value: object) -> object:
    """Return a row, or a list of rows, as built-in types for JSON.

    Floats keep six significant digits; values that are not finite become None, since JSON cannot express them.
    """
    return _rounded(msgspec.to_builtins(value))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.6g}") if abs(value) < 1e5 else round(value, 1)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


NAME_LIMIT = 256
LINE_LIMIT = 4096

_SUSPECT = re.compile(r"[^\x20-\x7e\xa1-\xac\xae-\u02ff\u2500-\u27ff\u4e00-\u9fff]")
"""Characters outside the harmless blocks common in logs; each match is checked by its category."""

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


def own_color(environ: Mapping[str, str]) -> bool | None:
    """Return `click.echo`'s `color`: None leaves it to click, False is for NO_COLOR and dumb terminals."""
    return False if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else None


def clean(text: str, limit: int = NAME_LIMIT) -> str:
    r"""Return `text` as one safe line of at most `limit` characters.

    A tab becomes spaces; control, format, surrogate, private and unassigned characters and line ends become `\xNN`,
    `\uNNNN` or `\UNNNNNNNN`; what is over the limit is cut and marked with an ellipsis.
    """
    shown = _SUSPECT.sub(_shown, text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "\u2026"


@lru_cache(maxsize=4096)
def clean_name(text: str) -> str:
    """Return `clean(text)`, cached: names of nodes, operations and files recur in every report."""
    return clean(text)
