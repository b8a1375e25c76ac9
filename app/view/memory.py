"""The memory of ranks in rows and sentences: how much each holds, how unevenly, and how fast it grows.

`JobMemory` makes the rows `MemoryRow` and `MemorySummary`. `growth_parts` and the functions below it describe memory
that grows towards a limit.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.machine import LimitKind
from app.diagnosis.causes import Severity
from app.model.job_model import Process
from app.text import bytes_text, clean_name, percent_text, ranks_text, seconds_text
from app.view.gpus import held_by
from app.view.rows import OLD_S, Finding, MemoryGrowthRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.machine import LimitReport
    from app.diagnosis.memory import Growth
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel


class MemoryRow(msgspec.Struct, frozen=True):
    """The memory of one rank, compared with the others'."""

    rank: int
    node: str
    rss_bytes: int | None
    pss_bytes: int | None
    peak_rss_bytes: int | None
    """Highest RSS in bytes that this console has seen."""
    from_median_frac: float | None
    """(rss - median) / median over the ranks of the job: 0.25 is a quarter more than the median. Of an ended rank its
    peak is compared."""
    severity: Severity
    gpu: int | None = None
    """Index of its home GPU; the next four as in `RankRow`."""
    gpu_used_bytes: int | None = None
    torch_allocated_bytes: int | None = None
    torch_reserved_bytes: int | None = None
    torch_peak_bytes: int | None = None
    gpu_total_bytes: int | None = None
    age_s: float | None = None
    """Seconds since its node's last report."""
    has_ended: bool = False
    tree_bytes: int | None = None
    """Bytes that it holds with its child processes."""
    limit: str = ""
    """Kind of the limit that it reaches first, or is nearest to: machine, cgroup, address_space, data."""
    limit_bytes: int | None = None
    limit_used_bytes: int | None = None
    """Bytes used of the limit, by every process that counts towards it."""
    growth_bytes_per_min: float | None = None
    """Growth in bytes a minute; None unless its memory grows steadily."""
    remaining_s: float | None = None
    """Seconds until the limit is reached at that rate."""
    gpu_growth_bytes_per_min: float | None = None
    """Growth of its GPU memory in bytes a minute."""
    gpu_remaining_s: float | None = None
    is_near: bool = False
    """Whether a limit is at most ten minutes away: a verdict stands then."""

    @property
    def is_old(self) -> bool:
        """Whether its figures are out of date."""
        return self.has_ended or (self.age_s is not None and self.age_s > OLD_S)


class MemorySummary(msgspec.Struct, frozen=True):
    """Memory over all ranks of the job."""

    total_bytes: int
    median_bytes: int
    max_bytes: int
    max_rank: int | None
    imbalance_frac: float | None
    """(max - median) / median."""
    severity: Severity
    text: str


EVEN_FRAC = 0.005
"""Smallest share over the median that is shown; less would print as 0 %."""
UNEVEN_FRAC = 0.5
UNEVEN_BYTES = 256 * 2**20
"""A rank with half as much again as the median, and this much more, is a warning; rank 0 often has a little more."""

FRAGMENTED_FRAC = 0.3
FRAGMENTED_BYTES = 2 * 2**30
"""Memory that torch has reserved beyond its tensors' peak, as a share of that peak and in bytes. Above both, GPU memory
is fragmented: large blocks do not fit into what is free."""


class JobMemory:
    """The memory of a job's ranks at one moment."""

    def __init__(self, cluster: Cluster, job: JobModel, now_s: float) -> None:
        self._cluster, self._job, self._now_s = cluster, job, now_s

    def row(self, rank: int) -> MemoryRow:
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
        """Return the memory of all ranks together; None while none is known."""
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
        # Beside the ranks' RSS, of which the sum would be another one, the figure is named.
        held = f"{hold} {bytes_text(total)}{note}"
        if pss is not None and len(known) > 1:
            held = f"{bytes_text(total)} PSS in {ranks}"
        if imbalance is None or imbalance < EVEN_FRAC:
            most = f"RSS is even, about {bytes_text(median)} each"
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
            text=held + ("" if len(known) == 1 else f"; {most}") + old,
        )

    def _old_text(self) -> str:
        """Return which figures are out of date, as the end of a sentence."""
        node_of = np.where(np.isnan(self._rss), -1, self._job.node_of)
        ages = {int(node): self._age_s(int(node)) or 0.0 for node in np.unique(node_of)}
        old = {node: age_s for node, age_s in ages.items() if age_s > OLD_S}
        if not old:
            return ""
        ranks = np.flatnonzero(np.isin(node_of, list(old))).tolist()
        return f"; {ranks_text(ranks)} as of {seconds_text(max(old.values()))} ago"

    def _age_s(self, owner: int) -> float | None:
        """Return the age of the figures of a node's ranks; None for ranks that no node has reported."""
        if owner < 0:
            return None
        return max(0.0, self._now_s - float(self._cluster.last_report_s[owner]))

    def _pss_of_all(self) -> int | None:
        """Return the living ranks' memory with shared pages counted once; None while one rank's is not known."""
        living = self._job.pss_bytes[~np.isnan(self._rss)]
        return None if np.isnan(living).any() else int(living.sum())

    @cached_property
    def _rss(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Memory in bytes of each living rank; NaN for the others."""
        return np.where(self._job.process == Process.EXITED, np.nan, self._job.rss_bytes)

    @cached_property
    def _held(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Memory in bytes of each living rank, and the peak of each other rank."""
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
    """Return memory anomalies other than leaks: one rank far above the others, and fragmented GPU memory."""
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


MINUTE_S = 60.0
SOON_S = 10.0
LIMIT_TEXTS = {
    LimitKind.MACHINE: "the memory of the machine",
    LimitKind.CGROUP: "the limit of its cgroup",
    LimitKind.ADDRESS_SPACE: "its limit of address space, ulimit -v",
    LimitKind.DATA: "its limit of data, ulimit -d",
    LimitKind.GPU: "the memory of its GPU",
}


def growth_parts(growth: Growth, whose: str) -> list[str]:
    """Return `the memory of rank 1 on demo-0 grows by 120 MiB/min`, the time left to its limit, and what it holds."""
    report = growth.report
    kind = "GPU memory" if growth.is_of_gpu else "memory"
    is_one = len(growth.ranks) == 1
    head = f"the {kind} of {whose} grows by {_rates(growth)}{'' if is_one else ' each'}"
    nearest = "" if is_one else f"{ranks_text([growth.nearest])} is nearest: "
    left = f"{nearest}{remaining_text(report.remaining_s)} to {limit_text(report.limit)}"
    return [head, left, f"it holds {bytes_text(report.held_bytes)} after {about_text(report.for_s)} of growth"]


def past_growth_text(growth: Growth | None) -> str:
    """Return how memory grew before a rank ended; empty when it did not."""
    if growth is None:
        return ""
    its = "its" if len(growth.ranks) == 1 else "their"
    kind = "GPU memory" if growth.is_of_gpu else "memory"
    limit = limit_text(growth.report.limit)
    return f"{its} {kind} had grown by {_rates(growth)} for {about_text(growth.report.for_s)} towards {limit}"


def growth_hint(growth: Growth | None) -> str:
    if growth is not None and growth.is_of_gpu:
        return "look for tensors kept from step to step, as losses without .item()"
    return "look for lists, caches and losses without .item() that grow"


def growth_row(growth: Growth | None) -> MemoryGrowthRow | None:
    """Return the row for `--json`."""
    if growth is None:
        return None
    report = growth.report
    return MemoryGrowthRow(
        rank=growth.nearest,
        limit=str(report.limit.kind),
        rate_bytes_per_min=MINUTE_S * report.rate_bytes_hz,
        held_bytes=report.held_bytes,
        limit_bytes=report.limit.limit_bytes,
        used_bytes=report.limit.used_bytes,
        remaining_s=report.remaining_s,
        growing_s=report.for_s,
    )


def limit_text(limit: LimitReport) -> str:
    """Return `the limit of its cgroup (8.0 GiB)`."""
    return f"{LIMIT_TEXTS[limit.kind]} ({bytes_text(limit.limit_bytes)})"


def rate_per_minute_text(rate_bytes_hz: float) -> str:
    """Return `120 MiB/min`."""
    return f"{bytes_text(MINUTE_S * rate_bytes_hz)}/min"


def remaining_text(remaining_s: float) -> str:
    """Return `about 9 min`, `about 40 s` or `less than 10 s`."""
    return f"less than {SOON_S:.0f} s" if remaining_s < SOON_S else f"about {about_text(remaining_s)}"


def about_text(seconds: float) -> str:
    """Return a time in whole minutes, or in whole seconds below two."""
    whole_s = MINUTE_S * round(seconds / MINUTE_S) if seconds >= 2 * MINUTE_S else float(round(seconds))
    return seconds_text(whole_s) if whole_s >= SOON_S else f"{whole_s:.0f} s"


def _rates(growth: Growth) -> str:
    low, high = rate_per_minute_text(growth.lowest_hz), rate_per_minute_text(growth.highest_hz)
    return low if low == high else f"{low} to {high}"
