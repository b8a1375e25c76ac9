"""What hosts have seen of their ranks (`app.inspect.on_host`), checked, and put together into jobs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from app.text import clean, clean_name

if TYPE_CHECKING:
    from collections.abc import Iterable

Text = Annotated[str, msgspec.Meta(max_length=512)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
InWorld = Annotated[int, msgspec.Meta(ge=0, le=2**18)]
MAX_FRAMES = 64
LOOPBACK_STORES = ("localhost", "127.", "[::1]", "::1", ":")
"""Beginnings of a store's address that each host has for itself."""


class SeenFrame(msgspec.Struct, frozen=True, array_like=True):
    """A call on a stack."""

    file: Text
    line: int
    function: Text
    """Qualified from Python 3.11 on: `DistributedDataParallel._sync_buffers`."""
    numbers: dict[str, int]
    """Small integers among its local variables that show a loop's step, or a call's peer."""

    @property
    def name(self) -> str:
        """Name of the function alone."""
        return self.function.rpartition(".")[2]


class Look(msgspec.Struct, frozen=True):
    """What one look at a process has shown."""

    frames: Annotated[list[SeenFrame], msgspec.Meta(max_length=MAX_FRAMES)]
    """The main thread's, innermost first."""
    trouble: Text
    """Why the frames are not seen; empty otherwise."""
    at_s: float
    state: Text
    """The kernel's letter; empty once it has ended."""
    cpu_s: float
    switches: int | None
    """Number of waits of its main thread; None where the kernel does not count them."""
    wchan: Text
    io_bytes: int | None = None
    """Bytes that it has read and written so far; None where the kernel does not count them."""
    asleep_s: float | None = None
    """Seconds since its main thread last ran; None where that is not known, or it runs."""


class SeenChild(Look, frozen=True, kw_only=True):
    """A child process of a rank that may wait for it."""

    pid: Number
    name: Text


class SeenRank(msgspec.Struct, frozen=True):
    """A rank on a host."""

    pid: Number
    age_s: float
    """Seconds since it was started."""
    uid: int
    program: Text
    rank: InWorld
    size: InWorld | None
    how: Text
    """Launcher: torchrun, RANK (set by hand), mpirun, srun, Lightning or spawn."""
    key: Text
    """Name of its job, the same on all hosts of a job."""
    looks: Annotated[list[Look], msgspec.Meta(min_length=1, max_length=100)]
    children: list[SeenChild] = []
    uses_gpu: bool = False
    start: int = 0
    """When its process was started, in the kernel's ticks since the machine was: with `pid` it names one process."""
    host: str = ""


class HostSeen(msgspec.Struct, frozen=True):
    """What a host has seen."""

    ranks: Annotated[list[SeenRank], msgspec.Meta(max_length=1024)]
    unseen: dict[str, int]
    """Python processes that may not be looked at, by their user."""
    user: Text
    is_root: bool
    yama: int | None


class SeenJob(msgspec.Struct, frozen=True):
    """Ranks that belong together."""

    name: str
    how: str
    size: int
    """World size; the number of ranks seen where no environment has it."""
    ranks: list[SeenRank]
    """Ranks in their order."""

    @property
    def missing(self) -> list[int]:
        """Ranks that no host has shown."""
        return sorted(set(range(self.size)) - {rank.rank for rank in self.ranks})


def jobs_of(hosts: Iterable[tuple[str, HostSeen]]) -> list[SeenJob]:
    """Return the jobs of some hosts, the largest first.

    Ranks belong together by their job's key and user. A store on loopback is another one on each host; a rank that a
    host has a second time belongs to another job of the same key.
    """
    groups: dict[tuple[str, ...], dict[int, SeenRank]] = {}
    for host, seen in hosts:
        for rank in seen.ranks:
            is_local = rank.how == "spawn" or rank.key.rpartition(" ")[2].startswith(LOOPBACK_STORES)
            key: tuple[str, ...] = (rank.how, rank.key, str(rank.uid), host if is_local else "")
            while rank.rank in groups.get(key, {}):
                key = (*key, host)
            groups.setdefault(key, {})[rank.rank] = msgspec.structs.replace(rank, host=host)
    jobs = []
    for (how, name, *_), ranks in groups.items():
        size = max([rank.size or 0 for rank in ranks.values()] + [max(ranks) + 1])
        jobs.append(SeenJob(clean(name), clean_name(how), size, [ranks[number] for number in sorted(ranks)]))
    return sorted(jobs, key=lambda job: -len(job.ranks))
