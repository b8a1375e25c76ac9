"""Which processes and which shared memory nobody watches over any more, judged by the kernel's facts of all of them.

A process is a leftover of rankdeck's if it carries the mark of an agent's job and nobody above it watches it. It is a
leftover of somebody else's launcher if it carries a rank, and the topmost of its ancestors that does has lost its
parent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet


class ProcessFacts(msgspec.Struct, frozen=True):
    """One process of this user."""

    pid: int
    parent_pid: int
    started_ticks: int
    is_watchful: bool
    """A shim, this agent, or what somebody still waits for or watches: what is below it is no leftover."""
    job_id: str
    """Job id of an agent's mark; empty without one."""
    rank: int | None
    """Value of torchrun's variable RANK."""


class SharedMemoryFacts(msgspec.Struct, frozen=True):
    """One file of this user in /dev/shm."""

    name: str
    is_in_use: bool
    """A process maps it or holds it open."""


SHARED_MEMORY_PREFIXES = ("torch_", "nccl-", "cuda.shm.", "psm_")
"""Prefixes of names by torch's DataLoader, NCCL, CUDA IPC and Python's multiprocessing."""


def find_orphans(
    processes: Mapping[int, ProcessFacts], orphanages: AbstractSet[int]
) -> list[tuple[ProcessFacts, bool]]:
    """Return leftover processes by pid, each with whether rankdeck has started it.

    `processes` are all of this user. `orphanages` are the pids that orphans are given to: init, and subreapers.
    """
    found = []
    for process in sorted(processes.values(), key=lambda process: process.pid):
        above = _ancestry(process, processes)
        if any(one.is_watchful for one in above):
            continue
        if any(one.job_id for one in above):
            found.append((process, True))
            continue
        ranked = [one for one in above if one.rank is not None]
        if ranked and ranked[-1].parent_pid in orphanages:
            found.append((process, False))
    return found


def find_unused(files: list[SharedMemoryFacts]) -> list[SharedMemoryFacts]:
    """Return files that training leaves when it is killed, and that nothing uses."""
    return [file for file in files if not file.is_in_use and file.name.startswith(SHARED_MEMORY_PREFIXES)]


def _ancestry(process: ProcessFacts, processes: Mapping[int, ProcessFacts]) -> list[ProcessFacts]:
    """Return a process and those above it, as far as they are this user's, the nearest first."""
    above = [process]
    seen = {process.pid}
    while (parent := processes.get(above[-1].parent_pid)) is not None and parent.pid not in seen:
        above.append(parent)
        seen.add(parent.pid)
    return above
