"""The figures of a job that the charts follow: vector operations over its ranks, one pass over its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agent.wire.codec import EPOCH_METRIC, LOSS_METRIC, STEP_METRIC
from agent.wire.machine import GpuWatchState
from app.model.job_model import Process
from app.model.rank_columns import CPU_WINDOW_S
from app.text import clean_name
from app.view.rows import METRIC_PREFIX, Figure, FigureKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from agent.wire.machine import GpuReport
    from agent.wire.reports import WorkerReport
    from app.diagnosis.diagnoser import JobDiagnosis
    from app.diagnosis.rank_facts import AllNodes
    from app.model.cluster import Cluster, Node
    from app.model.job_model import JobModel

MAX_METRICS = 8
"""Limit of metrics per job; the first by name are kept."""
_NO_FIGURES = frozenset({LOSS_METRIC, STEP_METRIC, EPOCH_METRIC})
"""Metrics that have figures of their own."""


def job_figures(cluster: Cluster, job: JobModel, found: JobDiagnosis, nodes: AllNodes, now_s: float) -> list[Figure]:
    """Return the current figures, over nodes that report and over ranks on them whose processes live.

    With GPUs on a node of the job, GPU figures are included; without any, the CPU and memory of its processes are.
    """
    is_up = np.append(nodes.is_up, False)
    is_seen = is_up[job.node_of] & (job.process != Process.UNSEEN) & (job.process != Process.EXITED)
    ranks = np.flatnonzero(is_seen)
    own = [node for node in cluster.nodes.values() if node.index in job.assignments]
    up = [node for node in own if is_up[node.index]]
    return [
        _over_ranks(FigureKey.LOSS, job.loss, ranks, job.has_loss),
        *_metrics(job.workers(ranks[job.has_metrics[ranks]].tolist())),
        Figure(FigureKey.STEP_RATE, job.steps_per_s(now_s)),
        _over_ranks(FigureKey.WAIT_FRAC, found.wait_frac, ranks, ~np.isnan(found.wait_frac)),
        *(_of_gpus(job, up) if _have_gpus(own) else (_cpu_cores(job, ranks), _memory(job, ranks))),
        _of_hosts(up),
    ]


def _over_ranks(key: str, values: NDArray[np.float64], ranks: NDArray[np.int64], is_known: NDArray[np.bool_]) -> Figure:
    reported = ranks[is_known[ranks]]
    return _over(key, values[reported], lambda at: f"rank {reported[at]}")


def _over_workers(key: str, values: Sequence[float], workers: Sequence[WorkerReport]) -> Figure:
    return _over(key, values, lambda at: f"rank {workers[at].rank}")


def _over(key: str, reported: Sequence[float] | NDArray[np.float64], who: Callable[[int], str]) -> Figure:
    """Return the mean of all values, and the extremes of the finite ones."""
    values = np.asarray(reported, np.float64)
    if not len(values):
        return Figure(key, None)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = float(values.mean())
    finite = np.flatnonzero(np.isfinite(values))
    if len(values) < 2 or not len(finite):
        return Figure(key, mean)
    low, high = int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])
    return Figure(key, mean, float(values[low]), float(values[high]), who(low), who(high))


def _of_hosts(nodes: Sequence[Node]) -> Figure:
    # A newly started agent has not sampled its machine yet.
    reported = [node for node in nodes if node.report is not None and node.report.memory_total_bytes]
    busy = [node.report.cpu_frac for node in reported if node.report is not None]
    return _over(FigureKey.HOST_CPU, busy, lambda at: clean_name(reported[at].name))


def _have_gpus(nodes: Sequence[Node]) -> bool:
    return any(node.report is not None and node.report.gpus.gpus for node in nodes)


def _of_gpus(job: JobModel, nodes: Sequence[Node]) -> Iterator[Figure]:
    """Yield the figures of the home GPUs of the job's ranks; of all GPUs where no home is known."""
    reported = [gpu for node in nodes for gpu in _watched(node)]
    gpus = [gpu for gpu in reported if gpu.owners and _is_home(gpu, job.job_id)] or reported

    def who_of(known: Sequence[GpuReport]) -> Callable[[int], str]:
        return lambda at: _gpu_name(nodes, known[at])

    busy = [gpu for gpu in gpus if gpu.figures.busy_frac is not None]
    yield _over(FigureKey.GPU_USE, [gpu.figures.busy_frac or 0.0 for gpu in busy], who_of(busy))
    used = [gpu for gpu in gpus if gpu.figures.memory_used_bytes is not None]
    yield _over(FigureKey.GPU_MEMORY, [gpu.figures.memory_used_bytes or 0 for gpu in used], who_of(used))


def _watched(node: Node) -> Sequence[GpuReport]:
    """Return the GPUs of a node whose figures are current."""
    report = node.report
    return report.gpus.gpus if report is not None and report.gpus.state is GpuWatchState.WATCHING else ()


def _is_home(gpu: GpuReport, job_id: str) -> bool:
    return gpu.owners[0].job_id == job_id or any(owner.job_id == job_id for owner in gpu.owners)


def _gpu_name(nodes: Sequence[Node], gpu: GpuReport) -> str:
    node = next(node for node in nodes if any(other is gpu for other in _watched(node)))
    return f"GPU {gpu.figures.index} of {clean_name(node.name)}"


def _cpu_cores(job: JobModel, ranks: NDArray[np.int64]) -> Figure:
    return _over_ranks(FigureKey.CPU_CORES, job.cpu_cores, ranks, job.seen_s >= CPU_WINDOW_S)


def _memory(job: JobModel, ranks: NDArray[np.int64]) -> Figure:
    return _over_ranks(FigureKey.RANK_MEMORY, job.rss_bytes, ranks, ~np.isnan(job.rss_bytes))


def _metrics(printed: Sequence[WorkerReport]) -> Iterator[Figure]:
    """Yield the figures that the job's patterns found in its ranks' lines."""
    names = {name for worker in printed for name in worker.metrics} - _NO_FIGURES
    for name in sorted(names)[:MAX_METRICS]:
        reported = [worker for worker in printed if worker.metrics.get(name) is not None]
        values = [worker.metrics[name] or 0.0 for worker in reported]
        yield _over_workers(METRIC_PREFIX + clean_name(name), values, reported)


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean, NaN when a value is NaN; None without values."""
    if not values:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.mean(np.asarray(values, np.float64)))
