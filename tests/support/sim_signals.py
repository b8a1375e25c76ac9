"""Signals of simulated ranks, GPUs and hosts: usual values with noise, what follows from slowness, and faults.

    signals = give_signals(sim)
    signals.shift(Signal.GPU_THERMAL, 0.6, rank=3)

A slow rank works while its peers wait. So its own signals differ from theirs without any fault: it waits more for a CPU
and for the interpreter lock, its GPU is warmer and at its power cap. A simulation has all of that (`_at_work`).

An agent smooths: a shift shows after some seconds, and is dated with an error, once it has lasted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import msgspec

from agent.wire.signals import LEVELS, Reading, Signal
from app.diagnosis.because.signals import TRAITS, Scope
from tests.support.sim_node import START_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from agent.wire.reports import NodeReport, WorkerReport
    from tests.support.sim import SimCluster
    from tests.support.sim_node import SimNode
    from tests.support.sim_rank import SimRank

SAMPLE_S = 1.0
"""Between two looks of the agent."""
SMOOTH_S = 2.0
"""Of the agent's mean."""
DATED_S = 4.0
"""From a lasting change until the agent reports one."""
DATE_ERROR_S = 1.5
NOISE_S = 5.0
"""For so long a value is off by the same random amount."""
LEAST_RATE = 0.005
"""A rate or a part of time below this is left out of a report."""
NUM_CPUS = 32.0

USUAL: dict[Signal, float] = {
    Signal.CPU_WAIT: 0.06,
    Signal.GC_PAUSE: 0.03,
    Signal.GIL_WAIT: 0.2,
    Signal.MAJOR_FAULTS: 2.0,
    Signal.LOG_LINES: 1.0,
    Signal.BLOCKED: 0.02,
    Signal.GPU_CLOCK: 1.98e9,
    Signal.GPU_MEMORY_CLOCK: 2.6e9,
    Signal.GPU_TEMPERATURE: 50.0,
    Signal.GPU_POWER_LIMIT: 700.0,
    Signal.GPU_POWER_CAP: 0.4,
    Signal.PCIE_WIDTH: 16.0,
    Signal.PCIE_GENERATION: 5.0,
    Signal.NVLINKS: 18.0,
    Signal.CPU_OTHERS: 0.03,
    Signal.CPU_PRESSURE: 0.05,
    Signal.IO_PRESSURE: 0.02,
    Signal.CPU_CLOCK: 3.1e9,
    Signal.NIC_SPEED: 1e11,
    Signal.TCP_RETRANSMITS: 0.001,
}
"""While a rank works all the time; 0 of a rate that is not here."""
WORKING = frozenset({Signal.CPU_WAIT, Signal.GC_PAUSE, Signal.GIL_WAIT, Signal.GPU_POWER_CAP})
"""Signals that grow with the time that a rank works."""
HEAT = 15.0
"""Degrees by which work heats a GPU."""
CAPPED_DROP = 0.1
"""Part by which a GPU's clock falls while it is at its power cap."""
EXACT = frozenset(
    {
        *(Signal.PCIE_WIDTH, Signal.PCIE_GENERATION, Signal.NVLINKS, Signal.GPU_POWER_LIMIT, Signal.NIC_SPEED),
        *(Signal.FAR_FROM_GPU, Signal.GPU_ROW_REMAP, Signal.GPU_OTHERS, Signal.CPUS_ALLOWED),
    }
)
"""Signals without noise."""


@dataclass(frozen=True)
class Shift:
    """A signal that changes to a value for good; at the start it has no past."""

    signal: Signal
    value: float
    at_s: float
    ranks: frozenset[int] = frozenset()
    """Of signals of ranks and GPUs."""
    nodes: frozenset[int] = frozenset()
    """Of signals of hosts."""


@dataclass
class SimSignals:
    """The signals of a simulated cluster.

    Attributes:
        has_gpus: Whether ranks have GPUs.
        noise: Multiple of a fifth of the least difference by which values are off at random.
        shifts: What changes.
        nic: Interface of all nodes.
    """

    sim: SimCluster
    has_gpus: bool = True
    noise: float = 1.0
    seed: int = 0
    shifts: list[Shift] = field(default_factory=list)
    nic: str = "eth0"
    cost_frac: float | None = None
    """Part of their time for which the others wait for slow ranks; None where the ranks' factors show it."""
    _taken: dict[str, tuple[float, dict[str, Reading]]] = field(default_factory=dict)

    def shift(
        self,
        signal: Signal,
        value: float,
        *,
        rank: int | None = None,
        node: int | None = None,
        everywhere: bool = False,
        at_s: float | None = None,
    ) -> None:
        """Change a signal of a rank, of all ranks of a node, of a host or everywhere, now or at a time."""
        at_s = self.sim.now_s if at_s is None else at_s
        nodes = range(len(self.sim.nodes)) if everywhere else () if node is None else (node,)
        ranks = {one.rank for index in nodes for one in self.sim.nodes[index].ranks}
        self.shift_of(signal, value, ranks if rank is None else {rank}, nodes, at_s)

    def shift_of(self, signal: Signal, value: float, ranks: Iterable[int], nodes: Iterable[int], at_s: float) -> None:
        """Change a signal of some ranks, or of some hosts, from a time on."""
        self.shifts.append(Shift(signal, value, at_s, frozenset(ranks), frozenset(nodes)))

    def work_frac(self, rank: SimRank) -> float:
        """Return which part of its time a rank works: who is not slow waits for who is."""
        factor = max((_factor(one) for one in self.sim.ranks), default=1.0)
        if self.cost_frac is not None and factor > 1.0:
            return 0.9 if _factor(rank) > 1.0 else 0.9 * (1.0 - self.cost_frac)
        return 0.9 * _factor(rank) / factor

    def readings_of_rank(self, rank: SimRank, now_s: float) -> dict[str, Reading]:
        """Return what the agent reports of a rank and its GPU."""
        return self._sampled(f"rank {rank.rank}", now_s, lambda: self._of_rank(rank, now_s))

    def _sampled(self, owner: str, now_s: float, take: Callable[[], dict[str, Reading]]) -> dict[str, Reading]:
        """Return the readings of an owner, taken once in a while."""
        at_s, readings = self._taken.get(owner, (-math.inf, {}))
        if now_s - at_s >= SAMPLE_S:
            readings = take()
            self._taken[owner] = (now_s, readings)
        return readings

    def _of_rank(self, rank: SimRank, now_s: float) -> dict[str, Reading]:
        scopes = {Scope.RANK, Scope.GPU} if self.has_gpus else {Scope.RANK}
        signals = [signal for signal, trait in TRAITS.items() if trait.scope in scopes]
        work = self.work_frac(rank)
        return self._readings(
            [(signal, _at_work(signal, work)) for signal in signals if signal is not Signal.CPUS_ALLOWED],
            [shift for shift in self.shifts if rank.rank in shift.ranks],
            f"rank {rank.rank}",
            now_s,
        )

    def readings_of_host(self, node: SimNode, now_s: float) -> dict[str, Reading]:
        """Return what the agent reports of its host."""
        return self._sampled(f"host {node.node_rank}", now_s, lambda: self._of_host(node, now_s))

    def _of_host(self, node: SimNode, now_s: float) -> dict[str, Reading]:
        signals = [signal for signal, trait in TRAITS.items() if trait.scope is Scope.HOST]
        return self._readings(
            [(signal, USUAL.get(signal, 0.0)) for signal in signals],
            [shift for shift in self.shifts if node.node_rank in shift.nodes],
            f"host {node.node_rank}",
            now_s,
        )

    def with_signals(self, node: SimNode, report: NodeReport, now_s: float) -> NodeReport:
        """Return a node's report with its signals, all of which are measured."""
        ranks = {rank.rank: rank for rank in node.ranks}

        def of(worker: WorkerReport) -> WorkerReport:
            if worker.exit is not None or worker.rank not in ranks:
                return worker
            readings = self.readings_of_rank(ranks[worker.rank], now_s)
            waits = readings.get(Signal.CPU_WAIT)
            cores = self.work_frac(ranks[worker.rank]) - (waits.value if waits else 0.0)
            return msgspec.structs.replace(worker, signals=readings, unmeasured=0, cpu_cores=max(0.0, cores))

        host, workers = self.readings_of_host(node, now_s), [of(one) for one in report.workers]
        return msgspec.structs.replace(report, signals=host, unmeasured=0, nic=self.nic, workers=workers)

    def _readings(
        self, usual: list[tuple[Signal, float]], shifts: list[Shift], owner: str, now_s: float
    ) -> dict[str, Reading]:
        base = dict(usual)
        found: dict[str, Reading] = {}
        for signal in dict.fromkeys([*base, *(shift.signal for shift in shifts)]):
            trait = TRAITS[signal]
            mine = [shift for shift in shifts if shift.signal is signal and shift.at_s <= now_s]
            if trait.scope is Scope.GPU and not self.has_gpus:
                continue
            before, value, since_s = None, base.get(signal), None
            if mine:
                shift = mine[-1]
                age_s = now_s - shift.at_s
                from_value = NUM_CPUS if value is None else value
                value = from_value + (shift.value - from_value) * (1.0 - math.exp(-age_s / SMOOTH_S))
                if age_s >= DATED_S and shift.at_s > START_S:
                    error = Random(f"{self.seed} {owner} {signal} date").uniform(-1, 1) * DATE_ERROR_S
                    before, since_s = from_value, max(0.0, age_s + error)
            if value is None:
                continue
            value = max(0.0, value + self._noise(signal, owner, now_s, value))
            if signal in LEVELS or value >= LEAST_RATE or before is not None:
                found[signal.value] = Reading(value, before, since_s)
        return found

    def _noise(self, signal: Signal, owner: str, now_s: float, value: float) -> float:
        trait = TRAITS[signal]
        if signal in EXACT or (value == 0.0 and trait.least_ratio):
            return 0.0
        size = max(trait.least, trait.least_ratio * value if trait.least_ratio < 1.0 else 0.0) / 5.0
        return self.noise * size * Random(f"{self.seed} {owner} {signal} {now_s // NOISE_S}").gauss(0.0, 1.0)


def _factor(rank: SimRank) -> float:
    return max([rank.slow_factor, *rank.drags.values()])


def _at_work(signal: Signal, work: float) -> float:
    """Return the usual value of a rank that works for a part of its time."""
    usual = USUAL.get(signal, 0.0)
    if signal is Signal.GPU_TEMPERATURE:
        return usual + HEAT * work
    if signal is Signal.GPU_CLOCK:
        return usual * (1.0 - CAPPED_DROP * work)
    return usual * work if signal in WORKING else usual


def give_signals(sim: SimCluster, *, has_gpus: bool = True, noise: float = 1.0, seed: int = 0) -> SimSignals:
    """Let all agents of a cluster take signals."""
    signals = SimSignals(sim, has_gpus, noise, seed)
    for node in sim.nodes:
        node.with_signals = partial(signals.with_signals, node)
    return signals
