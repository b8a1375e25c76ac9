"""The memory of ranks in rows and words: how much each holds, and how unevenly."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from agent.wire.memory import LimitKind
from app.memory_rows import MemoryRow, MemorySummary
from app.model.job_model import Process
from app.rows import OLD_S, Finding, Severity
from app.safe_text import clean_name
from app.wording.gpu_words import held_by
from app.wording.growth_words import MINUTE_S
from app.words import bytes_text, percent_text, ranks_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.model.cluster import Cluster
    from app.model.job_model import JobModel

EVEN_FRAC = 0.005
"""Less than this over the median would be printed as 0 %."""
UNEVEN_FRAC = 0.5
UNEVEN_BYTES = 256 * 2**20
"""A rank with half as much again as the median, and this much more, is worth a look; rank 0 often has a little more."""

FRAGMENTED_FRAC = 0.3
FRAGMENTED_BYTES = 2 * 2**30
"""A rank for which torch has reserved this much more than its tensors ever took, of them and in bytes, is fragmented:
large blocks do not fit into what is free."""


class JobMemory:
    """The memory of a job's ranks at one moment."""

    def __init__(self, cluster: Cluster, job: JobModel, now_s: float) -> None:
        self._cluster, self._job, self._now_s = cluster, job, now_s

    def row(self, rank: int) -> MemoryRow:
        """Return the row of a rank."""
        job = self._job
        rss, held_then, owner = self._rss[rank], self._held[rank], int(job.node_of[rank])
        worker, held = job.worker(rank), held_by(self._cluster, job, rank)
        memory = None if worker is None else worker.memory
        growths = () if memory is None or worker is None or worker.exit is not None else memory.growths
        host = next((growth for growth in growths if growth.limit.kind is not LimitKind.GPU), None)
        gpu = next((growth for growth in growths if growth.limit.kind is LimitKind.GPU), None)
        is_near = any(growth.is_near for growth in growths)
        limit = host.limit if host is not None else next(iter(memory.limits), None) if memory is not None else None
        return MemoryRow(
            rank=rank,
            node=clean_name(self._cluster.node_names[owner]) if owner >= 0 else "",
            rss_bytes=_whole(rss),
            pss_bytes=None if worker is None or math.isnan(rss) else worker.pss_bytes,
            peak_rss_bytes=_whole(job.peak_rss_bytes[rank]),
            from_median_frac=_fraction(held_then - self._median, self._median),
            severity=Severity.WARNING if is_near else _severity(held_then, self._median),
            gpu=held.gpu,
            gpu_used_bytes=held.used_bytes,
            torch_allocated_bytes=held.allocated_bytes,
            torch_reserved_bytes=held.reserved_bytes,
            torch_peak_bytes=held.peak_bytes,
            gpu_total_bytes=held.total_bytes,
            age_s=self._age_s(owner),
            has_ended=bool(self._job.process[rank] == Process.EXITED),
            tree_bytes=(memory.tree_bytes or None) if memory is not None else None,
            limit="" if limit is None else str(limit.kind),
            limit_bytes=None if limit is None else limit.limit_bytes,
            limit_used_bytes=None if limit is None else limit.used_bytes,
            growth_bytes_per_min=None if host is None else MINUTE_S * host.rate_bytes_hz,
            remaining_s=None if host is None else host.remaining_s,
            gpu_growth_bytes_per_min=None if gpu is None else MINUTE_S * gpu.rate_bytes_hz,
            gpu_remaining_s=None if gpu is None else gpu.remaining_s,
            is_near=is_near,
        )

    def summary(self) -> MemorySummary | None:
        """Return the memory of all ranks together, None while none is known."""
        of_all = self._rss if self._is_anyone_alive else self._held
        known = of_all[~np.isnan(of_all)]
        if not len(known):
            return None
        largest, pss = int(np.nanargmax(of_all)), self._pss_of_all() if self._is_anyone_alive else None
        total = int(known.sum()) if pss is None else pss
        high, median = float(of_all[largest]), self._median
        imbalance = _fraction(high - median, median)
        ranks = "1 rank" if len(known) == 1 else f"{len(known)} ranks"
        if self._is_anyone_alive:
            hold = f"{ranks} hold{'s' if len(known) == 1 else ''}"
        else:
            hold = f"no rank lives; at {'its peak' if len(known) == 1 else 'their peaks'} {ranks} held"
        note = " (shared pages counted in each)" if pss is None and len(known) > 1 else ""
        if imbalance is None or imbalance < EVEN_FRAC:
            most = f"no RSS is over the median of {bytes_text(median)}"
        else:
            over = f"{percent_text(imbalance)} over median {bytes_text(median)}"
            most = f"most RSS on {ranks_text([largest])}: {bytes_text(high)}, {over}"
        old = self._old_text()
        return MemorySummary(
            total_bytes=total,
            median_bytes=int(median),
            max_bytes=int(high),
            max_rank=largest,
            imbalance_frac=imbalance,
            severity=_severity(high, median),
            text=f"{hold} {bytes_text(total)}{note}" + ("" if len(known) == 1 else f"; {most}") + old,
        )

    def _old_text(self) -> str:
        """Return which of the figures are not those of now."""
        node_of = np.where(np.isnan(self._rss), -1, self._job.node_of)
        ages = {int(node): self._age_s(int(node)) or 0.0 for node in np.unique(node_of)}
        old = {node: age_s for node, age_s in ages.items() if age_s > OLD_S}
        if not old:
            return ""
        ranks = np.flatnonzero(np.isin(node_of, list(old))).tolist()
        return f"; {ranks_text(ranks)} as of {seconds_text(max(old.values()))} ago"

    def _age_s(self, owner: int) -> float | None:
        """Return how old the figures of a node's ranks are; None for ranks that no node has told of."""
        if owner < 0:
            return None
        return max(0.0, self._now_s - float(self._cluster.heard_s[owner]))

    def _pss_of_all(self) -> int | None:
        """Return the memory of the living ranks, pages that they share counted once; None while one's is not known."""
        living = self._job.pss_bytes[~np.isnan(self._rss)]
        return None if np.isnan(living).any() else int(living.sum())

    @cached_property
    def _rss(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The memory of each living rank, NaN where there is none."""
        return np.where(self._job.process == Process.EXITED, np.nan, self._job.rss_bytes)

    @cached_property
    def _held(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """What each living rank holds, and each other one held at its peak."""
        return np.where(np.isnan(self._rss), self._job.peak_rss_bytes, self._rss)

    @cached_property
    def _is_anyone_alive(self) -> bool:
        return not np.isnan(self._rss).all()

    @cached_property
    def _median(self) -> float:
        of_all = self._rss if self._is_anyone_alive else self._held
        known = of_all[~np.isnan(of_all)]
        return float(np.median(known)) if len(known) else math.nan


def _whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


def _fraction(part: float, whole: float) -> float | None:
    return None if math.isnan(part) or math.isnan(whole) or whole <= 0 else float(part / whole)


def _severity(rss: float, median: float) -> Severity:
    if math.isnan(rss):
        return Severity.QUIET
    is_uneven = rss > median * (1 + UNEVEN_FRAC) and rss - median > UNEVEN_BYTES
    return Severity.WARNING if is_uneven else Severity.OK


def memory_findings(rows: Sequence[MemoryRow], summary: MemorySummary | None) -> list[Finding]:
    """Return what is odd about memory and no leak: one rank far above the others, and fragmented GPU memory."""
    found = []
    growing = {row.rank for row in rows if row.growth_bytes_per_min is not None}
    is_uneven = summary is not None and summary.severity is Severity.WARNING
    if summary is not None and is_uneven and summary.max_rank is not None and summary.max_rank not in growing:
        who, more = ranks_text([summary.max_rank]), summary.max_bytes / max(1, summary.median_bytes)
        text = f"{who} holds {bytes_text(summary.max_bytes)}, {more:.1f} times the median"
        found.append(Finding(Severity.WARNING, text, "a rank that loads, gathers or logs for all holds more"))
    return found + [_fragmented(row) for row in rows if _is_fragmented(row)]


def _is_fragmented(row: MemoryRow) -> bool:
    reserved, peak = row.torch_reserved_bytes, row.torch_peak_bytes
    if reserved is None or peak is None or row.has_ended:
        return False
    return reserved - peak >= max(FRAGMENTED_BYTES, FRAGMENTED_FRAC * peak)


def _fragmented(row: MemoryRow) -> Finding:
    return Finding(
        Severity.WARNING,
        f"torch has reserved {bytes_text(row.torch_reserved_bytes)} of GPU memory for {ranks_text([row.rank])}, whose "
        f"tensors took at most {bytes_text(row.torch_peak_bytes)}",
        "it is fragmented: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )
