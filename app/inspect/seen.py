"""What hosts have seen of their ranks and GPUs, checked, and put together into jobs. Pure.

Source: `app.inspect.on_host`, `app.inspect.gpus_on_host`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import msgspec

from app.text import clean, clean_name

if TYPE_CHECKING:
    from collections.abc import Iterable

Text = Annotated[str, msgspec.Meta(max_length=512)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
InWorld = Annotated[int, msgspec.Meta(ge=0, le=2**18)]
Printed = Annotated[str, msgspec.Meta(max_length=1 << 16)]
MAX_TROUBLE = 512
Trouble = Annotated[str, msgspec.Meta(max_length=MAX_TROUBLE)]
Answer = Annotated[str, msgspec.Meta(max_length=1 << 24)]
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
    wanted_s: float | None = None
    """Seconds in which its main thread has run or waited for a core, so far; None where the kernel does not count."""


class SeenChild(Look, frozen=True, kw_only=True):
    """A child process of a rank that may wait for it."""

    pid: Number
    name: Text


class Gpu(msgspec.Struct, frozen=True):
    """Figures of a GPU that a rank uses, just after the last look at it; None where the driver has none."""

    busy_percent: int | None
    """Part of the last second, at most, in which a kernel ran; one that waits for other ranks runs too."""
    power_watts: float | None
    power_limit_watts: float | None

    @property
    def is_idle(self) -> bool:
        """Whether no kernel ran."""
        return self.busy_percent == 0


class SmiSeen(msgspec.Struct, frozen=True):
    """What nvidia-smi has printed for a query: a line a GPU, or a process, with figures between commas."""

    text: Printed
    trouble: Trouble


class RasSeen(msgspec.Struct, frozen=True):
    """What NCCL's RAS has answered (`app.inspect.nccl_ras`)."""

    version: Trouble
    """Version of the NCCL that a rank has loaded."""
    answers: Annotated[list[Answer], msgspec.Meta(max_length=2)]
    trouble: Trouble


class GpusSeen(msgspec.Struct, frozen=True):
    """What a host with GPU ranks has shown besides them."""

    gpus: SmiSeen
    processes: SmiSeen
    ras: dict[int, RasSeen] = {}
    """Answers of NCCL, by the pid of a rank 0 that was asked."""


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
    directory: Text = ""
    """Working directory; empty where it may not be read."""
    own_job: Text = ""
    """Name of its job where that is one of rankdeck's; else empty."""
    host: str = ""
    gpu: Gpu | None = None
    """What its GPU does, where the driver shows it."""


class HostSeen(msgspec.Struct, frozen=True):
    """What a host has seen."""

    ranks: Annotated[list[SeenRank], msgspec.Meta(max_length=1024)]
    unseen: dict[str, int]
    """Python processes that may not be looked at, by their user."""
    user: Text
    is_root: bool
    yama: int | None
    gpus: GpusSeen | None = None
    """Its GPUs, where a rank uses one."""


class SeenJob(msgspec.Struct, frozen=True):
    """Ranks that belong together."""

    name: str
    how: str
    size: int
    """World size; the number of ranks seen where no environment has it."""
    ranks: list[SeenRank]
    """Ranks in their order."""
    ras: RasSeen | None = None
    """What NCCL has answered by rank 0; None where it was not asked."""

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
    answers: dict[tuple[str, int], RasSeen] = {}
    for host, seen in hosts:
        gpus = gpus_by_pid(seen.gpus) if seen.gpus else {}
        answers |= {(host, pid): answer for pid, answer in (seen.gpus.ras if seen.gpus else {}).items()}
        for rank in seen.ranks:
            is_local = rank.how == "spawn" or rank.key.rpartition(" ")[2].startswith(LOOPBACK_STORES)
            key: tuple[str, ...] = (rank.how, rank.key, str(rank.uid), host if is_local else "")
            while rank.rank in groups.get(key, {}):
                key = (*key, host)
            groups.setdefault(key, {})[rank.rank] = msgspec.structs.replace(rank, host=host, gpu=gpus.get(rank.pid))
    jobs = []
    for (how, name, *_), ranks in groups.items():
        size = max([rank.size or 0 for rank in ranks.values()] + [max(ranks) + 1])
        in_order = [ranks[number] for number in sorted(ranks)]
        ras = answers.get((in_order[0].host, in_order[0].pid))
        jobs.append(SeenJob(clean(name), clean_name(how), size, in_order, ras))
    return sorted(jobs, key=lambda job: -len(job.ranks))


def gpus_by_pid(seen: GpusSeen) -> dict[int, Gpu]:
    """Return the GPU of each process that uses one; a process with several is left out.

    In a container the driver may show no process, or other numbers.
    """
    gpus = {}
    for uuid, *figures in _rows(seen.gpus.text, 4):
        busy, power, limit = map(_figure, figures)
        gpus[uuid] = Gpu(None if busy is None else int(busy), power, limit)
    used: dict[int, set[str]] = {}
    for pid, uuid in _rows(seen.processes.text, 2):
        if pid.isdecimal() and len(pid) < 10 and uuid in gpus:
            used.setdefault(int(pid), set()).add(uuid)
    return {
        pid: gpus[uuid] for pid, (uuid, *others) in ((pid, sorted(uuids)) for pid, uuids in used.items()) if not others
    }


def _rows(text: str, num_cells: int) -> list[list[str]]:
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines())
    return [row for row in rows if len(row) == num_cells]


def _figure(cell: str) -> float | None:
    """Return a figure of nvidia-smi; None for `[N/A]` and `[Not Supported]`."""
    try:
        figure = float(cell)
    except ValueError:
        return None
    return figure if math.isfinite(figure) and 0 <= figure < 1e9 else None
