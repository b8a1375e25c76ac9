"""What a rank holds of its host's memory and of its GPU's, as the trend of its memory needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.state.memory_growth import Held, Limit
from agent.wire.memory import LimitKind, LimitReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agent.state.observations import HostSampled, WorkerSampled
    from agent.wire.machine import GpuReport, JobRank
    from ddpcore.wire import GpuMemoryReport, Phase, RankReport


def host_held(sample: WorkerSampled, host: HostSampled, report: RankReport | None) -> Held | None:
    """Return what a rank holds of the host's memory; None before it is known."""
    memory = sample.memory
    if memory is None:
        return None
    limits = [Limit(limit.key, limit.report) for limit in memory.limits]
    if host.memory_total_bytes:
        swap_bytes = host.host.swap_total_bytes or 0
        free_bytes = host.memory_available_bytes + max(0, swap_bytes - (host.host.swap_used_bytes or 0))
        total_bytes = host.memory_total_bytes + swap_bytes
        machine = LimitReport(LimitKind.MACHINE, total_bytes, max(0, total_bytes - free_bytes))
        limits.append(Limit("machine", machine))
    return Held((sample.job_id, sample.rank, "host"), memory.tree_bytes, limits, _step(report), _phase(report))


def gpu_held(gpus: Sequence[GpuReport], reports: Mapping[JobRank, RankReport]) -> Iterator[Held]:
    """Yield what each rank holds on the GPU that it is at home on.

    Memory that torch's allocator has reserved and that no tensor uses is free for the rank's next tensors: fragmented
    or cached memory is no growth.
    """
    for gpu in gpus:
        figures = gpu.figures
        total, used = figures.memory_total_bytes, figures.memory_used_bytes
        if figures.mig_instances or not total or used is None:
            continue
        for owner in gpu.owners:
            report = reports.get(owner)
            torch = _torch_on(figures.uuid, report)
            cached = 0 if torch is None else max(0, torch.reserved_bytes - torch.allocated_bytes)
            held = [holder.used_bytes for holder in gpu.holders if holder.whose == owner]
            known = [size for size in held if size is not None]
            if not known and torch is None:
                continue
            held_bytes = sum(known) - cached if known else torch.allocated_bytes if torch else 0
            limit = LimitReport(LimitKind.GPU, total, max(0, used - cached))
            key = (owner.job_id, owner.rank, "gpu")
            yield Held(key, max(0, held_bytes), [Limit(f"gpu {figures.uuid}", limit)], _step(report), _phase(report))


def _torch_on(uuid: str, report: RankReport | None) -> GpuMemoryReport | None:
    return next((told for told in report.gpu_memory if told.uuid == uuid), None) if report is not None else None


def _step(report: RankReport | None) -> int | None:
    return None if report is None or report.step is None else report.steps_done


def _phase(report: RankReport | None) -> Phase | None:
    return None if report is None else report.phase
