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

MAX_DIGITS = 9
_SLOTS = re.compile(r"(?<![\w-])slots\s*=\s*([0-9]+)")
_MPICH = re.compile(r"(?P<host>[^\s:\[\]]+):(?P<slots>[0-9]+)")


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
            if (slots[host] or 1) > MAX_RANKS:
                raise UsageError(str(Trouble(Origin(place, number), f"{host} has more than {MAX_RANKS} slots by now")))
    return [HostEntry(host, count) for host, count in slots.items()]


def _host_of(line: str, origin: Origin) -> tuple[str, int | None]:
    name, *rest = line.split(None, 1)
    told = _SLOTS.search(rest[0]) if rest else None
    slots = told[1] if told else ""
    mpich = _MPICH.fullmatch(name)
    if mpich and told is None:
        name, slots = mpich["host"], mpich["slots"]
    try:
        parse_destination(name)
    except UsageError as error:
        raise UsageError(str(Trouble(origin, str(error))), "a line is a host, and slots=N behind it") from None
    if not slots:
        return name, None
    if len(slots) > MAX_DIGITS or not 1 <= int(slots) <= MAX_RANKS:
        raise UsageError(str(Trouble(origin, f"slots={slots[:MAX_DIGITS]} is not from 1 to {MAX_RANKS}")))
    return name, int(slots)
