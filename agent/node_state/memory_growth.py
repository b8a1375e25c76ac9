"""Finds which ranks of a node are running out of memory, and when.

Pure: there is no clock, `now_s` is given.

`MemoryGrowth` watches a rank once it trains. Growth counts as running out of memory once it has lasted as long as the
time that is left, at its rate, to the nearest limit, and that is ten minutes or less: a model that loads and a cache
that fills are over before. A loss of memory that is fast is reported when half of what was free is gone.

`host_held` and `gpu_held` return what a rank holds of its host's memory and of its GPU's, as `MemoryGrowth` needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.node_state.memory_series import MemorySeries, Steady
from agent.wire.machine import GrowthReport, LimitKind, LimitReport
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from agent.node_state.observations import HostSampled, WorkerSampled
    from agent.wire.machine import GpuReport, JobRank
    from ddpcore.wire import GpuMemoryReport, RankReport

NEAR_S = 600.0
"""A limit that is reached later is no warning yet."""
KEPT_NEAR_S = 900.0
"""Seconds to a limit up to which a warning remains one."""
MIN_HOLD_S, MAX_HOLD_S = 20.0, 60.0
"""A warning remains for a quarter of the time that it looked back on after the growth has stopped, within these."""
WARM_UP_S = 10.0
"""Seconds after the first step: allocators, kernels and loaders take what they need."""
STEPLESS_WARM_UP_S = 60.0
STEPLESS_PATIENCE = 2.0
"""Growth of a program without steps must have lasted so many times longer."""
MIN_GROWTH_BYTES = 8 * 2**20
MIN_GROWTH_FRAC = 0.002
"""Fraction of the limit: smaller growth is none."""
MIN_PART = 0.1
"""Part of the growth of all ranks that share a limit: a rank with less is not running out of it."""
JUDGE_PERIOD_S = 2.0
UNJUDGED_PHASES = frozenset({Phase.STARTING, Phase.JOINING, Phase.CHECKPOINT, Phase.EVAL})
"""What a rank holds in them it gives back, or needs from then on."""
MAX_BYTES = 2.0**62


class Limit(NamedTuple):
    """A limit, and who shares it: equal keys are one limit."""

    key: str
    report: LimitReport


class Held(NamedTuple):
    """Memory of one kind that a rank holds now, and the limits of it.

    `held_bytes` is without what is given back on demand. `step` and `phase` are None of a program that reports none.
    """

    key: tuple[str, int, str]
    held_bytes: int
    limits: Sequence[Limit]
    step: int | None
    phase: Phase | None


class _Watched:
    """One rank's memory of one kind."""

    def __init__(self, now_s: float) -> None:
        self.series = MemorySeries()
        self.since_s = now_s
        self.trained_s: float | None = None
        self.held: Held | None = None
        self.steady: list[Steady] = []
        self.growth: GrowthReport | None = None
        self.near_until_s = float("-inf")
        self.is_over = False
        """Its process has ended: how it grew last is kept."""

    def take(self, held: Held, now_s: float) -> None:
        """Take what is held now, if that counts."""
        self.held = held
        has_steps = held.step is not None
        if has_steps and self.trained_s is None:
            self.trained_s = now_s
            self.series = MemorySeries()
        begin_s = self.since_s + STEPLESS_WARM_UP_S if self.trained_s is None else self.trained_s + WARM_UP_S
        if now_s >= begin_s and held.phase not in UNJUDGED_PHASES:
            self.series.put(held.held_bytes, held.step, now_s)

    @property
    def best(self) -> Steady | None:
        """The longest steady growth."""
        return max(self.steady, key=lambda steady: steady.for_s, default=None)


class MemoryGrowth:
    """All ranks of a node."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, int, str], _Watched] = {}
        self._judged_s = float("-inf")

    def take(self, held: Held, now_s: float) -> None:
        """Take what a rank holds now."""
        watched = self._watched.get(held.key)
        if watched is None:
            watched = self._watched[held.key] = _Watched(now_s)
        watched.take(held, now_s)

    def forget(self, job_id: str, ranks: Iterable[int] | None = None) -> None:
        """Drop what is known of a job's ranks: all of them without `ranks`."""
        gone = None if ranks is None else set(ranks)
        self._watched = {
            key: watched
            for key, watched in self._watched.items()
            if key[0] != job_id or (gone is not None and key[1] not in gone)
        }

    def end(self, job_id: str, rank: int) -> None:
        """Keep what is known of a rank whose process has ended."""
        for key, watched in self._watched.items():
            if key[:2] == (job_id, rank):
                watched.is_over = True

    def of(self, job_id: str, rank: int) -> list[GrowthReport]:
        """Return how a rank's memory grows, by kind of memory; empty where it does not."""
        found = [
            self._watched[key].growth for key in ((job_id, rank, "host"), (job_id, rank, "gpu")) if key in self._watched
        ]
        return [growth for growth in found if growth is not None]

    def judge(self, now_s: float) -> None:
        """Look at all ranks again, if that is due."""
        if now_s - self._judged_s < JUDGE_PERIOD_S:
            return
        self._judged_s = now_s
        living = [watched for watched in self._watched.values() if not watched.is_over]
        for watched in living:
            watched.steady = list(watched.series.steady(MIN_GROWTH_BYTES))
        totals = _totals(living)
        for watched in living:
            self._judge_one(watched, totals, now_s)

    def _judge_one(self, watched: _Watched, totals: Mapping[str, float], now_s: float) -> None:
        held, best = watched.held, watched.best
        if held is None:
            return
        found: list[GrowthReport] = []
        for limit in held.limits:
            for steady in watched.steady:
                others_hz = totals[limit.key] - best.rate_bytes_hz if best is not None else 0.0
                growth = _growth(held, limit.report, steady, others_hz)
                if growth is not None:
                    found.append(_kept_near(growth) if watched.near_until_s >= now_s else growth)
        near = [growth for growth in found if growth.is_near]
        if near:
            soonest = min(near, key=lambda growth: growth.remaining_s).limit
            watched.growth = max(
                (growth for growth in near if growth.limit == soonest), key=lambda growth: growth.for_s
            )
            watched.near_until_s = now_s + min(max(MIN_HOLD_S, watched.growth.for_s / 4), MAX_HOLD_S)
        elif now_s >= watched.near_until_s:
            longest_s = max((growth.for_s for growth in found), default=0.0)
            longest = [growth for growth in found if growth.for_s == longest_s]
            watched.growth = min(longest, key=lambda growth: growth.remaining_s, default=None)


def _totals(living: Iterable[_Watched]) -> dict[str, float]:
    """Return by how much all ranks that share a limit grow, bytes a second, by limit."""
    totals: dict[str, float] = {}
    for watched in living:
        if watched.held is not None and (best := watched.best) is not None:
            for limit in watched.held.limits:
                totals[limit.key] = totals.get(limit.key, 0.0) + best.rate_bytes_hz
    return totals


def _growth(held: Held, limit: LimitReport, steady: Steady, others_hz: float) -> GrowthReport | None:
    """Return how a rank's memory grows towards a limit; None where the growth is going to stop before."""
    if steady.growth_bytes < MIN_GROWTH_FRAC * limit.limit_bytes:
        return None
    total_hz = steady.rate_bytes_hz + max(0.0, others_hz)
    above = max(0.0, held.held_bytes - steady.now_bytes)
    free = max(0.0, limit.limit_bytes - limit.used_bytes + above - steady.spike_bytes)
    if steady.further_bytes < free or steady.rate_bytes_hz < MIN_PART * total_hz:
        return None
    remaining_s = min(free / total_hz, 1e9)
    patience = 1.0 if held.step is not None else STEPLESS_PATIENCE
    return GrowthReport(
        limit=limit,
        held_bytes=held.held_bytes,
        rate_bytes_hz=min(steady.rate_bytes_hz, 1e15),
        for_s=steady.for_s,
        remaining_s=remaining_s,
        is_near=remaining_s <= NEAR_S and patience * remaining_s <= steady.for_s,
    )


def _kept_near(growth: GrowthReport) -> GrowthReport:
    """Return growth that has been a warning before: it remains one while the limit is not far."""
    return msgspec.structs.replace(growth, is_near=growth.is_near or growth.remaining_s <= KEPT_NEAR_S)


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
    return next((one for one in report.gpu_memory if one.uuid == uuid), None) if report is not None else None


def _step(report: RankReport | None) -> int | None:
    return None if report is None or report.step is None else report.steps_done


def _phase(report: RankReport | None) -> Phase | None:
    return None if report is None else report.phase
