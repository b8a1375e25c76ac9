"""The hosts of a Slurm allocation, as its environment tells of them. Pure; `scontrol` itself is asked by the command.

Source: sbatch(1), OUTPUT ENVIRONMENT VARIABLES: SLURM_JOB_NODELIST, SLURM_TASKS_PER_NODE (`8(x2),4`),
SLURM_GPUS_ON_NODE; scontrol(1), `show hostnames`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from app.errors import UsageError
from app.inventory.inventory import MAX_HOSTS, MAX_RANKS, HostEntry
from app.ssh.config import parse_destination

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    Ranks are its tasks where it has more than one a node, else its GPUs: who takes whole nodes asks for one task each.

    Args:
        hostnames: Of its nodes in their order, as `scontrol show hostnames` prints them.
        environ: Its environment.

    Raises:
        UsageError: What Slurm says is not what it says elsewhere.
    """
    for name in hostnames:
        parse_destination(name)
    counts = _spread(environ.get(TASKS, ""), len(hostnames))
    gpus = environ.get(GPUS, "")
    if not counts or max(counts) == 1:
        counts = [int(gpus)] * len(hostnames) if _NUMBER.fullmatch(gpus) and 1 <= int(gpus) <= MAX_RANKS else []
    return [HostEntry(name, counts[number] if counts else None) for number, name in enumerate(hostnames)]


def _spread(text: str, num_nodes: int) -> list[int]:
    """Return `8(x2),4` as [8, 8, 4]; nothing where it is not of so many nodes.

    Raises:
        UsageError: It is nothing of the kind.
    """
    if not text:
        return []
    counts: list[int] = []
    for part in text.split(","):
        match = _RUN.fullmatch(part.strip())
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= int(match[1]) <= MAX_RANKS or not 1 <= times <= MAX_HOSTS:
            raise UsageError(f"{TASKS}={text!r} is nothing that Slurm says")
        counts += [int(match[1])] * times
    return counts if len(counts) == num_nodes else []
