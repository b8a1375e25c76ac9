"""The hosts of a hostfile, as DeepSpeed and MPI take it. Pure.

Source: DeepSpeed's resource configuration (`host slots=8`); Open MPI's hostfile (`host slots=8 max_slots=8`, `host:8`
of MPICH), in both of which `#` begins a comment.
"""

from __future__ import annotations

import re

from app.errors import UsageError
from app.inventory.inventory import MAX_RANKS, HostEntry
from app.settings.layers import Origin, Trouble
from app.ssh.config import parse_destination

_SLOTS = re.compile(r"slots\s*=\s*(\d+)")
_MPICH = re.compile(r"(?P<host>[^\s:\[\]]+):(?P<slots>\d+)")


def read_hostfile(text: str, place: str) -> list[HostEntry]:
    """Return the hosts of a hostfile in their order; one that stands there again adds its slots, as with MPI.

    Args:
        text: A host a line.
        place: The file's name, for what is said of it.

    Raises:
        UsageError: A line names no host, or slots that cannot be.
    """
    slots: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        said = line.partition("#")[0].strip()
        if said:
            host, count = _host_of(said, Origin(place, number))
            before = slots.get(host)
            slots[host] = count if before is None else before + (count or 0)
    return [HostEntry(host, count) for host, count in slots.items()]


def _host_of(line: str, origin: Origin) -> tuple[str, int | None]:
    name, *rest = line.split(None, 1)
    told = _SLOTS.search(rest[0]) if rest else None
    count = int(told[1]) if told else None
    mpich = _MPICH.fullmatch(name)
    if mpich and told is None:
        name, count = mpich["host"], int(mpich["slots"])
    try:
        parse_destination(name)
    except UsageError as error:
        raise UsageError(str(Trouble(origin, str(error))), "a line is a host, and slots=N behind it") from None
    if count is not None and not 1 <= count <= MAX_RANKS:
        raise UsageError(str(Trouble(origin, f"slots={count} is not from 1 to {MAX_RANKS}")))
    return name, count
