"""Ranks of another launcher's job that no probe reports: found among what its launcher has started, and why.

They have the variable that names the ranks which report, and another number in it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from agent.processes import shim
from agent.processes.foreign_launcher import is_prepared
from agent.processes.shim_process import environ_of
from ddpcore.wire_launch import RANK_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Container

_AUTOLOAD = b"TORCH_DEVICE_BACKEND_AUTOLOAD"
_KEEPS_OUT = b"IE"
"""Options of Python that ignore PYTHONPATH. Source: python(1)."""
_WITH_VALUE, _LAST = b"XW", b"mc"
"""Options of Python behind which a value stands, and the program."""


class MuteRank(NamedTuple):
    """A rank without a probe; `why` is empty where its process does not show it."""

    rank: int
    pid: int
    why: str


def mute_ranks(launcher_pid: int, reporting_pid: int, known: Container[int]) -> list[MuteRank]:
    """Return the ranks below a launcher that are not known, each by its first Python process.

    Args:
        launcher_pid: The launcher.
        reporting_pid: A rank whose probe reports.
        known: Ranks that are left out.
    """
    environ = environ_of(reporting_pid)
    name = next((name.encode() for name in RANK_VARIABLES if environ.get(name.encode(), b"").isdigit()), None)
    if name is None:
        return []
    found: dict[int, MuteRank] = {}
    below = shim.descendants(launcher_pid)
    for pid in sorted(below, key=below.__getitem__):
        environ = environ_of(pid)
        text = environ.get(name, b"")
        rank = int(text) if text.isdigit() else -1
        if rank >= 0 and rank not in known and rank not in found and _is_python(pid):
            found[rank] = MuteRank(rank, pid, why_mute(_arguments(pid), environ))
    return [found[rank] for rank in sorted(found)]


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{pid}/exe"))  # noqa: PTH115, PTH119 - for each process
    except OSError:
        return False


def _arguments(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - a path object for each process is waste
            return file.read().split(b"\0")
    except OSError:
        return []


def why_mute(arguments: list[bytes], environ: dict[bytes, bytes]) -> str:
    """Return why a Python process with this command line and environment loads no probe, empty if it might."""
    if option := _option_that_keeps_out(arguments):
        return f"python -{option}"
    if (value := environ.get(_AUTOLOAD, b"1")) != b"1":
        return f"{_AUTOLOAD.decode()}={value[:16].decode(errors='replace')} keeps it out"
    return "" if is_prepared(environ) else "its PYTHONPATH lacks rankdeck's launch plug-in"


def _option_that_keeps_out(arguments: list[bytes]) -> str:
    """Return the option in a command line that ignores PYTHONPATH, empty if none does."""
    skips = False
    for word in arguments[1:]:
        if skips:
            skips = False
            continue
        if not word.startswith(b"-") or word in {b"-", b"--"}:
            break
        if word.startswith(b"--"):
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in _KEEPS_OUT:
                return chr(letter)
            if letter in _LAST:
                return ""
            if letter in _WITH_VALUE:
                skips = at == len(word) - 1
                break
    return ""
