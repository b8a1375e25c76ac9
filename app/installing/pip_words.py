"""What pip's last words mean, and what to do about it. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from app.safe_text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS_LIMIT = 240
_NOT_FOUND = re.compile(r"No matching distribution found for (?P<what>[^\s(]+)")
_NO_INDEX = re.compile(
    r"Failed to establish a new connection|NewConnectionError|NameResolutionError|Temporary failure in name resolution"
    r"|Network is unreachable|No route to host|ConnectTimeoutError|ReadTimeoutError|ProxyError|Connection refused"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded|Errno (?:28|122)\b")
_INCOMPATIBLE = re.compile(r"which is incompatible|which is not installed")


def failure(lines: Sequence[str], host: str, wheelhouse: str) -> tuple[str, str]:
    """Return what went wrong and what to do.

    Args:
        lines: The last ones that pip printed.
        host: Where.
        wheelhouse: The directory that stood in for an index; empty without.
    """
    text = "\n".join(lines)
    if _FULL.search(text):
        return "no space is left there", "make room, or name a Python on another disk: --python"
    if "externally-managed-environment" in text:
        return externally_managed()
    if "Could not find an activated virtualenv" in text:
        return "pip there wants a virtual environment (PIP_REQUIRE_VIRTUALENV)", "name its Python: --python"
    missing = _NOT_FOUND.search(text)
    if missing and wheelhouse:
        what = f"{clean(wheelhouse)} has no {clean(missing['what'])} that fits that Python"
        return what, "add it, and run this again"
    if _NO_INDEX.search(text) or missing:
        what = f"finds no {clean(missing['what'])}" if missing else "gets no answer"
        why = "reaches no package index" if _NO_INDEX.search(text) else f"{what} in its package index"
        return f"pip there {why}", f"bring its wheels along: rankdeck install {host} --wheelhouse DIR"
    if "ResolutionImpossible" in text:
        return f"what is installed there does not go with rankdeck: {last_words(lines)}", "name a venv: --venv DIR"
    if "Permission denied" in text or "Errno 13" in text:
        return f"that Python's packages may not be written: {last_words(lines)}", "name a venv of your own: --venv DIR"
    return f"pip fails there: {last_words(lines)}", ""


def externally_managed() -> tuple[str, str]:
    """Return what to say of a Python that only the operating system's package manager may change (PEP 668)."""
    return (
        "that Python belongs to the operating system, pip may not change it: PEP 668",
        "name the Python of a venv: --python; or let one be made: --venv '~/rankdeck'",
    )


def last_words(lines: Sequence[str]) -> str:
    """Return the last error that pip told of, else the last line."""
    # Above a traceback of its own pip says `ERROR: Exception:`; what it is stands in the last line.
    errors = [line for line in lines if line.startswith("ERROR:") and not line.endswith("Exception:")]
    told = (errors or [line for line in lines if line.strip()] or ["it says nothing"])[-1]
    return clean(told.removeprefix("ERROR:").strip(), WORDS_LIMIT)


def clash(lines: Sequence[str]) -> str:
    """Return which other packages an installation that went well does not suit; empty for none."""
    return "; ".join(clean(line.removeprefix("ERROR:").strip()) for line in lines if _INCOMPATIBLE.search(line))
