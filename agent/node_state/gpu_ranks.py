"""Which rank is behind each process on a GPU, which GPU each rank is at home on, and who is where he should not be.

A rank's home is the GPU that its local rank is in what the rank may see (CUDA_VISIBLE_DEVICES), if the rank holds
memory there; else the GPU where it holds most, unless another rank is at home there. A rank that holds memory on the
home of another and not on a home of its own alone is foreign there: the usual result of a CUDA call before
`torch.cuda.set_device`.

`gpu_fault` returns what happened to the home of a rank that has ended badly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.ends import GpuFault
from agent.wire.machine import MAX_HOLDERS, MAX_XIDS, GpuCondition, GpuHolder, GpuReport, JobRank, Xid
from ddpcore.process_group.visible_devices import PhysicalGpu, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.node_state.gpu_sample import GpuProcess, SampledGpu
    from agent.wire.machine import GpuFigures

AFTER_END_S = 5.0
"""Seconds after a rank's end in which an error of its GPU may still be logged: the driver meets a dead GPU as it takes
a process down, and a sample comes once a second."""
GONE = frozenset({GpuCondition.LOST, GpuCondition.RESET_REQUIRED})
"""Conditions in which a GPU runs nothing. One that NVML may not read is none of them."""


class RankProcess(NamedTuple):
    """A living worker.

    `reported_pid` is the rank's own, another one in a container; None until it reports. `torch_bytes` is what torch has
    reserved, by UUID of the GPU.
    """

    whose: JobRank
    local_rank: int
    pid: int
    reported_pid: int | None = None
    torch_bytes: Mapping[str, int] = {}


def gpu_reports(gpus: Sequence[SampledGpu], ranks: Sequence[RankProcess]) -> list[GpuReport]:
    """Return the report of each GPU."""
    known = _Ranks(ranks)
    holders = [_holders(gpu, known) for gpu in gpus]
    homes = _homes(gpus, known)
    reports = []
    for place, gpu in enumerate(gpus):
        owners = sorted(whose for whose, home in homes.items() if home == place)
        reports.append(
            GpuReport(
                figures=gpu.figures,
                owners=owners[:MAX_HOLDERS],
                holders=[_judged(holder, place, owners, homes) for holder in holders[place]],
            )
        )
    return reports


class _Ranks:
    """Finds the rank of a process."""

    def __init__(self, ranks: Sequence[RankProcess]) -> None:
        self.ranks = {rank.whose: rank for rank in ranks}
        self._by_pid = {rank.pid: rank.whose for rank in ranks}
        reported = [rank.reported_pid for rank in ranks]
        # A pid of a container is only good for a match as long as no two containers know it.
        self._by_inner_pid = {
            rank.reported_pid: rank.whose
            for rank in ranks
            if rank.reported_pid is not None and reported.count(rank.reported_pid) == 1
        }

    def of(self, process: GpuProcess) -> JobRank | None:
        """Return whose a process is: by descent, by its environment, or by its pid in a container."""
        for pid in (process.pid, *process.ancestors):
            if pid in self._by_pid:
                return self._by_pid[pid]
        if process.rank is not None:
            job_rank = JobRank(process.job_id, process.rank)
            return job_rank if job_rank in self.ranks else None
        return next((self._by_inner_pid[pid] for pid in process.inner_pids if pid in self._by_inner_pid), None)


def _holders(gpu: SampledGpu, known: _Ranks) -> list[GpuHolder]:
    holders = [
        GpuHolder(process.pid, process.used_bytes, process.mig_uuid, known.of(process), name=process.name)
        for process in gpu.processes
    ]
    return sorted(holders, key=lambda holder: (-(holder.used_bytes or 0), holder.pid))


def _judged(holder: GpuHolder, place: int, owners: Sequence[JobRank], homes: Mapping[JobRank, int]) -> GpuHolder:
    whose = holder.whose
    if whose is None or whose not in homes or homes[whose] == place or not owners:
        return holder
    return msgspec.structs.replace(holder, is_foreign=True)


def num_visible_gpus(gpus: Sequence[GpuReport], env: Mapping[str, str]) -> int | None:
    """Return how many GPUs a program with this environment would see; None where only CUDA knows.

    With MIG every process sees one instance, and which one is the program's to arrange.
    """
    if any(gpu.figures.mig_instances for gpu in gpus):
        return None
    physical = [PhysicalGpu(gpu.figures.index, gpu.figures.uuid, gpu.figures.name) for gpu in gpus]
    try:
        return len(visible_gpus(env.get("CUDA_VISIBLE_DEVICES"), physical, env.get("CUDA_DEVICE_ORDER")))
    except LookupError:
        return None


def _homes(gpus: Sequence[SampledGpu], known: _Ranks) -> dict[JobRank, int]:
    """Return the place, in the given order, of the GPU that each rank with memory on one is at home on."""
    held: dict[JobRank, dict[int, int]] = {}
    seen_as: dict[JobRank, GpuProcess] = {}
    for place, gpu in enumerate(gpus):
        for process in gpu.processes:
            whose = known.of(process)
            if whose is not None:
                places = held.setdefault(whose, {})
                places[place] = places.get(place, 0) + (process.used_bytes or 0)
                seen_as.setdefault(whose, process)
    for whose, rank in known.ranks.items():
        if whose not in held and (places := _by_torch(gpus, rank)):
            held[whose] = places
    physical = [_physical(gpu) for gpu in gpus]
    meant = {whose: _meant(seen_as[whose], physical, known.ranks[whose]) for whose in held if whose in seen_as}
    homes = {whose: place for whose, place in meant.items() if place is not None and place in held[whose]}
    taken = set(homes.values())
    for whose, places in held.items():
        most = max(places, key=lambda place: (places[place], -place))
        wish = meant.get(whose)
        if whose not in homes:
            homes[whose] = most if wish is None or most not in taken else wish
    return homes


def _by_torch(gpus: Sequence[SampledGpu], rank: RankProcess) -> dict[int, int]:
    """Return the bytes that a rank holds by torch's count, by place, where NVML's pids mean nothing to us."""
    return {
        place: rank.torch_bytes[uuid]
        for place, gpu in enumerate(gpus)
        for uuid in (gpu.figures.uuid, *(instance.uuid for instance in gpu.figures.mig_instances))
        if uuid in rank.torch_bytes
    }


def _physical(gpu: SampledGpu) -> PhysicalGpu:
    figures = gpu.figures
    migs = tuple(instance.uuid for instance in figures.mig_instances)
    return PhysicalGpu(figures.index, figures.uuid, figures.name, migs)


def _meant(process: GpuProcess, gpus: Sequence[PhysicalGpu], rank: RankProcess) -> int | None:
    """Return the place of the GPU that a rank is meant for, None where only its program knows."""
    try:
        visible = visible_gpus(process.visible_devices, gpus, process.device_order)
    except LookupError:
        return None
    if len(visible) == 1:
        return gpus.index(visible[0].gpu)
    return gpus.index(visible[rank.local_rank].gpu) if rank.local_rank < len(visible) else None


class Home(NamedTuple):
    """The GPU that a rank is at home on."""

    gpu: int
    """Index by PCI bus."""
    uuid: str

    def is_(self, gpu: GpuFigures) -> bool:
        """Return whether that is this GPU: one that is lost may have no name left, and the others new numbers."""
        return gpu.uuid == self.uuid or (gpu.index == self.gpu and not gpu.uuid)


def gpu_fault(gpu: GpuFigures, known: GpuFault | None, alive_s: float, ended_s: float, sampled_s: float) -> GpuFault:
    """Return what happened to a GPU from when a rank was first seen to a little after its end.

    Args:
        gpu: Its figures, with the ages of errors at the time of the sample.
        known: What was known of it before: an error that comes again later does not change when it came first.
        alive_s: Time at which the rank was first seen.
        ended_s: Time of its end.
        sampled_s: Time of the sample.
    """
    xids = {xid.code: xid for xid in known.xids} if known else {}
    for xid in gpu.xids:
        at_s = sampled_s - xid.age_s
        if alive_s <= at_s <= ended_s + AFTER_END_S:
            xids.setdefault(xid.code, Xid(xid.code, xid.times, max(0.0, ended_s - at_s)))
    is_gone = gpu.condition in GONE and sampled_s <= ended_s + AFTER_END_S
    condition = gpu.condition if is_gone else known.condition if known else GpuCondition.OK
    return GpuFault(gpu.index, condition, sorted(xids.values(), key=lambda xid: xid.age_s)[:MAX_XIDS])
