"""The hosts of a hostfile, as DeepSpeed and MPI take it, and those of a Slurm allocation.

Pure.

`read_hostfile` reads a hostfile.
Source: DeepSpeed's resource configuration (`host slots=8`); Open MPI's hostfile (`host slots=8 max_slots=8`, `host:8`
of MPICH), in both of which `#` begins a comment.

`allocated_hosts` reads an allocation from its environment; the command runs `scontrol` itself.
Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES: SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE (`8(x2),4`),
SLURM_GPUS_ON_NODE; scontrol(1), `show hostnames`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.inventory.inventory import MAX_HOSTS, MAX_RANKS, HostEntry
from app.settings.layers import Origin, Trouble
from app.ssh.config import parse_destination

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_DIGITS = 9
_SLOTS = re.compile(r"(?<![\w-])slots\s*=\s*([0-9]+)")
_MPICH = re.compile(r"(?P<host>[^\s:\[\]]+):(?P<slots>[0-9]+)")


def read_hostfile(text: str, place: str) -> list[HostEntry]:
    """Return the hosts of a hostfile in their order; a repeated host adds its slots, as with MPI.

    Args:
        text: A host a line.
        place: File name, for error messages.

    Raises:
        UsageError: A line names no host, or invalid slots.
    """
    slots: dict[str, int | None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].strip()
        if entry:
            host, count = _host_of(entry, Origin(place, number))
            before = slots.get(host)
            slots[host] = count if before is None else before + (count or 0)
            if (slots[host] or 1) > MAX_RANKS:
                raise UsageError(str(Trouble(Origin(place, number), f"{host} has more than {MAX_RANKS} slots by now")))
    return [HostEntry(host, count) for host, count in slots.items()]


def _host_of(line: str, origin: Origin) -> tuple[str, int | None]:
    name, *rest = line.split(None, 1)
    slot_match = _SLOTS.search(rest[0]) if rest else None
    slots = slot_match[1] if slot_match else ""
    mpich = _MPICH.fullmatch(name)
    if mpich and slot_match is None:
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


NODE_LIST = "SLURM_JOB_NODELIST"
TASKS = "SLURM_TASKS_PER_NODE"
GPUS = "SLURM_GPUS_ON_NODE"
_RUN = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_NUMBER = re.compile("[0-9]{1,9}")


def allocation(environ: Mapping[str, str]) -> str:
    """Return the list of nodes of the allocation that this shell is in, as Slurm writes it.

    Raises:
        UsageError: It is in none.
    """
    nodes = environ.get(NODE_LIST, "")
    if not nodes:
        raise UsageError(f"this shell is in no Slurm allocation: {NODE_LIST} is not set", "salloc, or sbatch, sets it")
    return nodes


def allocated_hosts(hostnames: Sequence[str], environ: Mapping[str, str]) -> list[HostEntry]:
    """Return the hosts of an allocation.

    Ranks are its tasks where it has more than one a node, else its GPUs: users of whole nodes ask for one task each.

    Args:
        hostnames: Names of its nodes in their order, as `scontrol show hostnames` prints them.
        environ: Its environment.

    Raises:
        UsageError: A variable of Slurm has an unknown form.
    """
    for name in hostnames:
        parse_destination(name)
    counts = _spread(environ.get(TASKS, ""), len(hostnames))
    gpus = environ.get(GPUS, "")
    if not counts or max(counts) == 1:
        counts = [int(gpus)] * len(hostnames) if _NUMBER.fullmatch(gpus) and 1 <= int(gpus) <= MAX_RANKS else []
    return [HostEntry(name, counts[number] if counts else None) for number, name in enumerate(hostnames)]


def _spread(text: str, num_nodes: int) -> list[int]:
    """Return `8(x2),4` as [8, 8, 4]; empty where it does not match the number of nodes.

    Raises:
        UsageError: It has another form.
    """
    if not text:
        return []
    counts: list[int] = []
    for part in text.split(","):
        match = _RUN.fullmatch(part.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= int(match[1]) <= MAX_RANKS or not 1 <= times <= MAX_HOSTS:
            raise UsageError(f"{TASKS}={text!r} is nothing that Slurm sets")
        counts += [int(match[1])] * times
    return counts if len(counts) == num_nodes else []
