"""GPUs in rows and sentences: what each is doing, who holds its memory, what is wrong, and what to do about it."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.machine import GpuCondition, GpuWatchState, JobRank, ThrottleReason
from app.diagnosis.causes import Severity
from app.model.xids import BROKEN_XIDS, XIDS
from app.text import LINE_LIMIT, bytes_text, clean, clean_name, finite, ranks_text, seconds_text
from app.view.rows import Finding, GpuRow, HolderRow, NodeRow, XidRow

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agent.wire.machine import GpuFigures, GpuReport
    from app.model.cluster import Cluster, Node
    from app.model.job_model import JobModel
    from ddpcore.wire import GpuMemoryReport

RECENT_XID_S = 3600.0
"""Seconds for which a driver error is a warning; older ones are only shown."""
USUAL_FIX = "call torch.cuda.set_device(local_rank) before the first CUDA call, and give torch.load a map_location"

CONDITION_TEXTS = {
    GpuCondition.LOST: "lost",
    GpuCondition.RESET_REQUIRED: "needs a reset",
    GpuCondition.UNREADABLE: "NVML will not talk to it",
}
CONDITION_HINTS = {
    GpuCondition.LOST: "drain the node and reboot it; look for Xid 79 in dmesg",
    GpuCondition.RESET_REQUIRED: "end what uses it, then nvidia-smi --gpu-reset",
    GpuCondition.UNREADABLE: "look at the rights of /dev/nvidia* and at dmesg",
}
SLOW_TEXTS = {
    ThrottleReason.HW_SLOWDOWN: "slowed by its hardware",
    ThrottleReason.SW_THERMAL: "slowed: too hot",
    ThrottleReason.HW_THERMAL: "slowed by its hardware: too hot",
    ThrottleReason.HW_POWER_BRAKE: "slowed by the power supply",
}
"""Reasons worth showing: a busy GPU is always at its power cap, and a synchronised one follows another."""


class Held(NamedTuple):
    """Memory that a rank holds on its home GPU; None is not known."""

    gpu: int | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_bytes: int | None = None


NOTHING = Held()
_ORDER = {severity: order for order, severity in enumerate((Severity.CRITICAL, Severity.WARNING, Severity.OK))}


def held_by(cluster: Cluster, job: JobModel, rank: int) -> Held:
    """Return what a rank holds on its GPU, as NVML and torch report it."""
    worker, owner = job.worker(rank), int(job.node_of[rank])
    if worker is None or worker.exit is not None or owner < 0:
        return NOTHING
    torch = {} if worker.report is None else {reported.uuid: reported for reported in worker.report.gpu_memory}
    report = cluster.nodes[cluster.node_names[owner]].report
    gpus = [] if report is None else report.gpus.gpus
    home = next((gpu for gpu in gpus if JobRank(job.job_id, rank) in gpu.owners), None)
    if home is None:
        return _of_torch(max(torch.values(), key=lambda reported: reported.reserved_bytes, default=None))
    mine = [holder for holder in home.holders if holder.whose == JobRank(job.job_id, rank)]
    used = [holder.used_bytes for holder in mine]
    reported = next((torch[uuid] for uuid in _uuids(home) if uuid in torch), None)
    return _of_torch(reported)._replace(
        gpu=home.figures.index,
        used_bytes=sum(size or 0 for size in used) if any(size is not None for size in used) else None,
        total_bytes=_total_bytes(home, {holder.mig_uuid for holder in mine} | ({reported.uuid} if reported else set())),
    )


def _total_bytes(gpu: GpuReport, uuids: set[str]) -> int | None:
    """Return the memory of a GPU, or of its MIG instances with these UUIDs where it has any."""
    if not gpu.figures.mig_instances:
        return gpu.figures.memory_total_bytes
    totals = [part.memory_total_bytes or 0 for part in gpu.figures.mig_instances if part.uuid in uuids]
    return sum(totals) if all(totals) and totals else None


def _of_torch(reported: GpuMemoryReport | None) -> Held:
    if reported is None:
        return NOTHING
    return Held(None, None, None, reported.allocated_bytes, reported.reserved_bytes, reported.peak_allocated_bytes)


def _uuids(gpu: GpuReport) -> Iterator[str]:
    yield gpu.figures.uuid
    yield from (instance.uuid for instance in gpu.figures.mig_instances)


def gpu_rows(cluster: Cluster, job: JobModel | None, now_s: float, max_rows: int | None = None) -> list[GpuRow]:
    """Return a row per GPU of every node; with `max_rows` only so many, the most severe first."""
    gpus = [
        (node, gpu, node.report.gpus.age_s + max(0.0, now_s - float(cluster.last_report_s[node.index])))
        for node in cluster.nodes.values()
        if node.report is not None
        for gpu in node.report.gpus.gpus
    ]
    if max_rows is not None:
        gpus = heapq.nsmallest(max_rows, gpus, key=lambda reported: _ORDER[_severity(*reported[:2])])
    return [_row(node, gpu, job, age_s) for node, gpu, age_s in gpus]


class BrokenGpu(NamedTuple):
    """A GPU that has failed: it is gone, or has reported an error from which it does not recover by itself."""

    ranks: list[int]
    """Ranks of the job that have it as their home GPU."""
    text: str


def broken_gpus(cluster: Cluster, job: JobModel | None, now_s: float) -> list[BrokenGpu]:
    """Return the GPUs with a critical failure, in the order of the nodes."""
    broken = []
    for node in cluster.nodes.values():
        for gpu in node.report.gpus.gpus if node.report is not None and node.may_have_broken_gpus else ():
            if _severity(node, gpu) is Severity.CRITICAL:
                row = _row(node, gpu, job, max(0.0, now_s - float(cluster.last_report_s[node.index])))
                broken.append(BrokenGpu(row.ranks, _broken(row).text))
    return broken


def _row(node: Node, gpu: GpuReport, job: JobModel | None, age_s: float) -> GpuRow:
    figures, job_id = gpu.figures, None if job is None else job.job_id
    is_silent = node.report is not None and node.report.gpus.state is GpuWatchState.SILENT
    torch = list(_torch_on(gpu, job, node.index))
    ranks = [owner.rank for owner in gpu.owners if owner.job_id == job_id]
    return GpuRow(
        node=clean_name(node.name),
        gpu=figures.index,
        name=clean_name(figures.name),
        uuid=clean_name(figures.uuid),
        state="silent" if is_silent else str(figures.condition),
        severity=_severity(node, gpu),
        ranks=ranks,
        busy_frac=finite(figures.busy_frac),
        memory_busy_frac=finite(figures.memory_busy_frac),
        memory_used_bytes=figures.memory_used_bytes,
        memory_total_bytes=figures.memory_total_bytes,
        torch_allocated_bytes=sum(reported.allocated_bytes for reported in torch) if torch else None,
        torch_reserved_bytes=sum(reported.reserved_bytes for reported in torch) if torch else None,
        temperature_celsius=finite(figures.temperature_celsius),
        power_watts=finite(figures.power_watts),
        power_limit_watts=finite(figures.power_limit_watts),
        sm_clock_hz=figures.sm_clock_hz,
        sm_clock_max_hz=figures.sm_clock_max_hz,
        memory_clock_hz=figures.memory_clock_hz,
        throttle_reasons=[str(reason) for reason in figures.throttle_reasons],
        ecc_corrected_errors=figures.ecc_corrected_errors,
        ecc_uncorrected_errors=figures.ecc_uncorrected_errors,
        xids=[XidRow(xid.code, xid.times, xid.age_s) for xid in figures.xids],
        holders=[
            HolderRow(
                holder.pid,
                holder.whose.rank if holder.whose is not None and holder.whose.job_id == job_id else None,
                holder.used_bytes,
                holder.is_foreign,
            )
            for holder in gpu.holders
        ],
        detail=clean("; ".join(_anomalies(figures, gpu)), LINE_LIMIT),
        age_s=age_s,
    )


def _torch_on(gpu: GpuReport, job: JobModel | None, node: int) -> Iterator[GpuMemoryReport]:
    """Yield torch's memory on a GPU in each living rank of the job on that node."""
    uuids = set(_uuids(gpu)) - {""}
    for rank in [] if job is None else job.ranks_of(node):
        worker = job.worker(rank) if job is not None else None
        if worker is not None and worker.exit is None and worker.report is not None:
            yield from (reported for reported in worker.report.gpu_memory if reported.uuid in uuids)


def _severity(node: Node, gpu: GpuReport) -> Severity:
    figures = gpu.figures
    recent = {xid.code for xid in figures.xids if xid.age_s < RECENT_XID_S}
    if figures.condition is not GpuCondition.OK or recent & BROKEN_XIDS:
        return Severity.CRITICAL
    if node.report is not None and node.report.gpus.state is GpuWatchState.SILENT:
        return Severity.WARNING
    is_damaged = bool(figures.ecc_uncorrected_errors or figures.has_row_remap_failed)
    is_slowed = any(reason in SLOW_TEXTS for reason in figures.throttle_reasons)
    is_crowded = any(holder.is_foreign for holder in gpu.holders)
    return Severity.WARNING if recent or is_damaged or is_slowed or is_crowded else Severity.OK


def _anomalies(figures: GpuFigures, gpu: GpuReport) -> Iterator[str]:
    if figures.condition is not GpuCondition.OK:
        yield CONDITION_TEXTS[figures.condition]
    for xid in figures.xids:
        suffix = f" ({XIDS[xid.code].what})" if xid.code in XIDS else ""
        times = f" {xid.times} times, last" if xid.times > 1 else ""
        yield f"Xid {xid.code}{suffix}{times} {seconds_text(xid.age_s)} ago"
    foreign = sorted({holder.whose.rank for holder in gpu.holders if holder.is_foreign and holder.whose is not None})
    if foreign:
        yield f"{ranks_text(foreign)} {'holds' if len(foreign) == 1 else 'hold'} memory here too"
    if figures.ecc_uncorrected_errors:
        yield f"{figures.ecc_uncorrected_errors} uncorrected memory errors"
    if figures.has_row_remap_failed:
        yield "a faulty row of memory could not be replaced"
    elif figures.is_row_remap_pending:
        yield "a faulty row of memory is replaced at the next reset"
    slow = [SLOW_TEXTS[reason] for reason in figures.throttle_reasons if reason in SLOW_TEXTS]
    yield from slow or (["power cap"] if ThrottleReason.SW_POWER_CAP in figures.throttle_reasons else [])
    others = [holder for holder in gpu.holders if holder.whose is None]
    if others:
        pids = ", ".join(str(holder.pid) for holder in others[:4])
        held = bytes_text(sum(holder.used_bytes or 0 for holder in others))
        yield f"{held} held by pid {pids}{' and more' if len(others) > 4 else ''}"


def findings(gpus: Sequence[GpuRow], nodes: Sequence[NodeRow]) -> list[Finding]:
    """Return the GPU problems that need attention, the worst first."""
    found = [
        Finding(Severity.WARNING, f"{node.node}: {node.gpu_detail}; figures of its GPUs are old or missing", "")
        for node in nodes
        if node.gpu_watch == GpuWatchState.SILENT
    ]
    for row in gpus:
        if row.severity is Severity.CRITICAL:
            found.append(_broken(row))
        if any(holder.is_foreign and holder.rank is not None for holder in row.holders):
            found.append(_foreign(row))
    return sorted(found, key=lambda finding: finding.severity is not Severity.CRITICAL)


def _broken(row: GpuRow) -> Finding:
    hint = next((hint for condition, hint in CONDITION_HINTS.items() if row.state == condition), "drain the node")
    return Finding(Severity.CRITICAL, f"GPU {row.gpu} of {row.node}{_home_of(row)}: {row.detail}", hint)


def _foreign(row: GpuRow) -> Finding:
    foreign = [holder for holder in row.holders if holder.is_foreign and holder.rank is not None]
    ranks = sorted({holder.rank for holder in foreign if holder.rank is not None})
    size = sum(holder.used_bytes or 0 for holder in foreign)
    held = bytes_text(size) if size else "memory"
    verb = "holds" if len(ranks) == 1 else "hold"
    return Finding(
        Severity.WARNING, f"{ranks_text(ranks)} {verb} {held} on GPU {row.gpu} of {row.node}{_home_of(row)}", USUAL_FIX
    )


def _home_of(row: GpuRow) -> str:
    return f", home of {ranks_text(row.ranks)}" if row.ranks else ""
