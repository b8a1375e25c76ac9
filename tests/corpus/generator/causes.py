"""Runs with a slow rank, and why it is slow, drawn by rule: causes of all kinds, and their opposites.

A cause lengthens the work of a rank, or of all ranks of a host, and shifts the signals that show it. An opposite shifts
signals that explain nothing: those of all ranks, those of a rank that keeps up, those that were so long before, those
that moved to the better. Whatever `because` names then is false.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.signals import Signal
from ddpcore.wire import Phase
from tests.corpus.generator.choices import Seeded
from tests.support.sim import SimCluster
from tests.support.sim_node import START_S
from tests.support.sim_program import Training
from tests.support.sim_signals import USUAL, SimSignals, give_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.sim_node import SimNode

COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
STEP_S = {Phase.DATA: 0.015, Phase.FORWARD: 0.03, Phase.BACKWARD: 0.06, Phase.OPTIMIZER: 0.015}
PROGRAM = Training(data_s=0.015, forward_s=0.03, backward_s=0.06, optimizer_s=0.015)
SHAPES = ((2, 2), (1, 4), (2, 2), (1, 4), (3, 2), (2, 3), (4, 1), (2, 4))
HOST_SHAPES = ((2, 2), (3, 2), (4, 1), (3, 1), (4, 2))
NAMED_S = 45.0
"""A cause must be named so soon after it began."""
AFTER_S = 5.0
"""Played on behind it: what is named stands, and nothing else comes up."""
QUIET_S = 15.0
"""Played without a slow rank, or after a slow one was named without a cause."""
IDLE_S = 30.0
"""Played where no rank is slow."""
LOOK_S = 0.5
LOOKS_LEFT_OUT = 4
REPORT_S = 0.35


class Place(StrEnum):
    """Whose work a cause lengthens."""

    RANK = "rank"
    HOST = "host"


class Amount(NamedTuple):
    """A signal and its value: what is usual, and that times, or plus, a part of the cost."""

    signal: Signal
    value: float = 0.0
    part: float = 0.0
    is_factor: bool = False

    def at(self, cost: float) -> float:
        """Return the value for a rank that costs the others a fraction of the step time."""
        if self.is_factor:
            return self.value * (1.0 - self.part * cost)
        return min(0.97, self.value + self.part * cost) if self.part else self.value


class Injected(NamedTuple):
    """A kind of cause."""

    signal: Signal
    """What must be named."""
    place: Place
    shifts: tuple[Amount, ...]
    phases: tuple[Phase, ...] = tuple(STEP_S)
    least_cost: float = 0.25


def of_time(signal: Signal, part: float = 0.9) -> Amount:
    """Take a part of time that accounts for most of the cost, beside what is usual."""
    return Amount(signal, USUAL.get(signal, 0.0), part)


def lower(signal: Signal, part: float = 0.9) -> Amount:
    """Lower a clock by most of the cost."""
    return Amount(signal, USUAL[signal], part, is_factor=True)


def to(signal: Signal, value: float) -> Amount:
    """Shift a signal to a value."""
    return Amount(signal, value)


HOT = to(Signal.GPU_TEMPERATURE, 89.0)
SLOW_GPU = lower(Signal.GPU_CLOCK)
CAUSES: dict[str, Injected] = {
    one.signal.value: one
    for one in (
        Injected(Signal.GPU_THERMAL, Place.RANK, (to(Signal.GPU_THERMAL, 0.7), SLOW_GPU, HOT), COMPUTING),
        Injected(Signal.GPU_HW_SLOWDOWN, Place.RANK, (to(Signal.GPU_HW_SLOWDOWN, 0.8), SLOW_GPU), COMPUTING),
        Injected(Signal.GPU_POWER_BRAKE, Place.RANK, (to(Signal.GPU_POWER_BRAKE, 0.9), SLOW_GPU), COMPUTING),
        Injected(
            Signal.GPU_POWER_LIMIT,
            Place.RANK,
            (to(Signal.GPU_POWER_LIMIT, 350.0), to(Signal.GPU_POWER_CAP, 0.95), SLOW_GPU),
            COMPUTING,
        ),
        Injected(Signal.GPU_CLOCK, Place.RANK, (SLOW_GPU,), COMPUTING, 0.35),
        Injected(Signal.GPU_MEMORY_CLOCK, Place.RANK, (lower(Signal.GPU_MEMORY_CLOCK),), COMPUTING),
        Injected(Signal.GPU_OTHERS, Place.RANK, (to(Signal.GPU_OTHERS, 1.0),), COMPUTING),
        Injected(Signal.PCIE_WIDTH, Place.RANK, (to(Signal.PCIE_WIDTH, 4.0),)),
        Injected(Signal.PCIE_GENERATION, Place.RANK, (to(Signal.PCIE_GENERATION, 3.0),)),
        Injected(Signal.PCIE_REPLAYS, Place.RANK, (to(Signal.PCIE_REPLAYS, 60.0),)),
        Injected(Signal.NVLINKS, Place.RANK, (to(Signal.NVLINKS, 12.0),), COMPUTING),
        Injected(Signal.NVLINK_ERRORS, Place.RANK, (to(Signal.NVLINK_ERRORS, 40.0),), COMPUTING),
        Injected(Signal.GPU_ROW_REMAP, Place.RANK, (to(Signal.GPU_ROW_REMAP, 1.0),), COMPUTING),
        Injected(Signal.GPU_ECC_CORRECTED, Place.RANK, (to(Signal.GPU_ECC_CORRECTED, 30.0),), COMPUTING),
        Injected(Signal.CPU_THROTTLED, Place.RANK, (of_time(Signal.CPU_THROTTLED),)),
        Injected(Signal.CPU_WAIT, Place.RANK, (of_time(Signal.CPU_WAIT),)),
        Injected(Signal.CPUS_ALLOWED, Place.RANK, (to(Signal.CPUS_ALLOWED, 2.0), of_time(Signal.CPU_WAIT))),
        Injected(Signal.FAR_FROM_GPU, Place.RANK, (to(Signal.FAR_FROM_GPU, 1.0),)),
        Injected(Signal.CPU_OTHERS, Place.HOST, (to(Signal.CPU_OTHERS, 0.6), of_time(Signal.CPU_WAIT))),
        Injected(Signal.CPU_STEAL, Place.HOST, (to(Signal.CPU_STEAL, 0.35),)),
        Injected(Signal.CPU_CLOCK, Place.HOST, (lower(Signal.CPU_CLOCK, 1.0),)),
        Injected(Signal.SWAPPED, Place.HOST, (to(Signal.SWAPPED, 4e7), to(Signal.MAJOR_FAULTS, 2000.0))),
        Injected(Signal.MAJOR_FAULTS, Place.RANK, (to(Signal.MAJOR_FAULTS, 2000.0), of_time(Signal.BLOCKED, 0.6))),
        Injected(Signal.BLOCKED, Place.RANK, (of_time(Signal.BLOCKED),), (Phase.DATA,)),
        Injected(Signal.IO_PRESSURE, Place.HOST, (to(Signal.IO_PRESSURE, 0.5),), (Phase.DATA,)),
        Injected(Signal.MEMORY_PRESSURE, Place.HOST, (to(Signal.MEMORY_PRESSURE, 0.5),)),
        Injected(Signal.GC_PAUSE, Place.RANK, (of_time(Signal.GC_PAUSE),)),
        Injected(Signal.GIL_WAIT, Place.RANK, (of_time(Signal.GIL_WAIT, 1.0),), least_cost=0.35),
        Injected(Signal.LOG_LINES, Place.RANK, (to(Signal.LOG_LINES, 900.0),)),
        Injected(Signal.NIC_SPEED, Place.HOST, (to(Signal.NIC_SPEED, 1e9),)),
        Injected(Signal.NIC_ERRORS, Place.HOST, (to(Signal.NIC_ERRORS, 80.0),)),
        Injected(Signal.NIC_DROPS, Place.HOST, (to(Signal.NIC_DROPS, 900.0),)),
        Injected(Signal.TCP_RETRANSMITS, Place.HOST, (to(Signal.TCP_RETRANSMITS, 0.08),)),
    )
}
"""Kinds of causes by the signal that must be named."""
LOUD = (
    to(Signal.GPU_THERMAL, 0.7),
    to(Signal.CPU_WAIT, 0.5),
    to(Signal.GPU_OTHERS, 1.0),
    to(Signal.PCIE_WIDTH, 4.0),
    to(Signal.GC_PAUSE, 0.4),
    to(Signal.BLOCKED, 0.5),
    to(Signal.GPU_CLOCK, 1.2e9),
    to(Signal.MAJOR_FAULTS, 3000.0),
)
"""Shifts that would explain much, were they those of the slow rank."""
LOUD_HOSTS = (
    to(Signal.CPU_OTHERS, 0.6),
    to(Signal.IO_PRESSURE, 0.6),
    to(Signal.CPU_STEAL, 0.3),
    to(Signal.NIC_ERRORS, 90.0),
    to(Signal.SWAPPED, 5e7),
)
CROWDED = (of_time(Signal.CPU_WAIT, 0.4),)
BETTER = (
    to(Signal.GPU_CLOCK, 2.6e9),
    to(Signal.GPU_POWER_LIMIT, 900.0),
    to(Signal.CPU_WAIT, 0.0),
    to(Signal.NVLINKS, 36.0),
    to(Signal.GPU_TEMPERATURE, 30.0),
)


class Opposite(StrEnum):
    """Runs in which nothing may be named."""

    PROGRAM = "slow by its program alone"
    PROGRAM_OF_A_HOST = "all ranks of a host slow by their program"
    ALL_HOT = "all ranks hot"
    ALL_LOADED = "all hosts loaded"
    OTHER_RANK = "slow by its program, another rank's signals are bad"
    NOBODY_SLOW = "bad signals of a rank that is not slow"
    IDLE_HOST = "load on a host where nobody is late"
    SHARED_HOST = "load on a host of which one rank is slow by its program"
    STATIC = "signals bad from the start, slow by its program later"
    LATER = "signals bad only after it was slow"
    BETTER = "signals better than the others'"
    NOISE = "noise in every signal"
    CROWDED = "slow by its program, so it waits more for a CPU"


@dataclass(frozen=True)
class Run:
    """One run: what is slow, since when, and what shifts.

    Attributes:
        kinds: Causes that are injected; none of an opposite.
        rank: The slow rank, or a rank of the slow host.
        place: Whose work takes longer.
        cost: Fraction of the step time that it costs the others.
        onset_s: Seconds from the start of the job; 0 for a rank that is slow from its first step.
    """

    seed: int
    name: str
    kinds: tuple[str, ...]
    opposite: Opposite | None
    shape: tuple[int, int]
    rank: int
    place: Place
    phases: tuple[Phase, ...]
    cost: float
    onset_s: float
    noise: float
    loud: tuple[Amount, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Outcome:
    """What a run named.

    Attributes:
        named_s: Seconds from the onset until all injected causes were named; None where they were not.
        false: What was named and is none.
        is_slow_named: Whether the slow rank was named at all.
        is_compared: Whether a verdict has shown how many signals were compared.
    """

    run: Run
    named_s: float | None
    false: tuple[str, ...]
    is_slow_named: bool
    is_compared: bool

    @property
    def is_right(self) -> bool:
        """Whether its causes were named, and nothing false."""
        return not self.false and (self.named_s is not None or not self.run.kinds)


def run_of(seed: int) -> Run:
    """Draw the run of a seed: two of three have a cause."""
    choices = Seeded(seed)
    if choices.between(0, 2) == 0:
        return _opposite_of(choices, seed)
    names = list(CAUSES)
    name = names[seed % len(names)]
    kind = CAUSES[name]
    kinds = [name]
    if kind.place is Place.RANK and choices.between(0, 7) == 0:
        beside = [one for one in ("gpu_others", "pcie_width", "log_lines", "gpu_row_remap") if one != name]
        other = choices.pick(beside)
        if set(CAUSES[other].phases) >= set(kind.phases) and kind.phases != (Phase.DATA,):
            kinds.append(other)
    shape = choices.pick(HOST_SHAPES if kind.place is Place.HOST else SHAPES)
    cost = choices.between(round(100 * kind.least_cost), 60) / 100
    return Run(
        seed=seed,
        name=name if len(kinds) == 1 else "two at once",
        kinds=tuple(kinds),
        opposite=None,
        shape=shape,
        rank=choices.between(0, shape[0] * shape[1] - 1),
        place=kind.place,
        phases=kind.phases,
        cost=cost,
        onset_s=choices.pick((0.0, 16.0, 28.0)),
        noise=choices.pick((0.5, 1.0, 1.5)),
    )


def _opposite_of(choices: Seeded, seed: int) -> Run:
    opposite = choices.pick(tuple(Opposite))
    is_host = opposite in (Opposite.PROGRAM_OF_A_HOST, Opposite.ALL_LOADED, Opposite.IDLE_HOST)
    shape = choices.pick(HOST_SHAPES[:2] if is_host else SHAPES[:6])
    of_host = opposite in (Opposite.IDLE_HOST, Opposite.SHARED_HOST, Opposite.ALL_LOADED)
    loud = tuple(dict.fromkeys(choices.pick(LOUD_HOSTS if of_host else LOUD) for _ in range(choices.between(1, 3))))
    phases = choices.pick((tuple(STEP_S), COMPUTING, (Phase.DATA,)))
    return Run(
        seed=seed,
        name=opposite.value,
        kinds=(),
        opposite=opposite,
        shape=shape,
        rank=choices.between(0, shape[0] * shape[1] - 1),
        place=Place.HOST if opposite is Opposite.PROGRAM_OF_A_HOST else Place.RANK,
        phases=phases,
        cost=choices.between(25, 60) / 100,
        onset_s=choices.pick((0.0, 28.0)) if opposite is not Opposite.STATIC else 28.0,
        noise=2.5 if opposite is Opposite.NOISE else 1.0,
        loud={Opposite.BETTER: BETTER, Opposite.CROWDED: CROWDED}.get(opposite, loud),
    )


class CauseCluster(SimCluster):
    """Looks and reports less often than other simulations: most of a run's time goes into that."""

    _num_looks = 0

    def _send(self, node: SimNode) -> None:
        if self.now_s - node.sent_at_s >= REPORT_S:
            super()._send(node)

    def _observe(self) -> None:
        self._num_looks += 1
        if self._num_looks % LOOKS_LEFT_OUT == 0:
            super()._observe()


def drag(sim: SimCluster, ranks: Sequence[int], phases: Sequence[Phase], cost: float) -> None:
    """Lengthen some ranks' work in some phases, so that they cost the others a fraction of the step time."""
    longer_s = cost / (1.0 - cost) * sum(STEP_S.values())
    factor = 1.0 + longer_s / sum(STEP_S[phase] for phase in phases)
    for rank in ranks:
        sim.ranks[rank].drags = dict.fromkeys(phases, factor)


def play(run: Run) -> Outcome:
    """Simulate a run."""
    num_nodes, per_node = run.shape
    sim = CauseCluster(num_nodes, per_node, program=PROGRAM, seed=run.seed % 1000)
    signals = give_signals(sim, noise=run.noise, seed=run.seed)
    signals.cost_frac = run.cost
    node = run.rank // per_node
    slow = list(range(node * per_node, (node + 1) * per_node)) if run.place is Place.HOST else [run.rank]
    if run.opposite is Opposite.STATIC:
        _shift(signals, run.loud, run.cost, [run.rank], START_S)
    sim.run(run.onset_s)
    if run.opposite not in (Opposite.NOBODY_SLOW, Opposite.IDLE_HOST):
        drag(sim, slow, run.phases, run.cost)
    _make_loud(sim, signals, run)
    for kind in run.kinds:
        at_s = START_S if run.onset_s == 0 else sim.now_s
        ranks = slow if CAUSES[kind].place is run.place else [run.rank]
        _shift(signals, CAUSES[kind].shifts, run.cost, ranks, at_s)
    return _watch(sim, signals, run)


def _make_loud(sim: SimCluster, signals: SimSignals, run: Run) -> None:
    """Shift what explains nothing."""
    others = [rank.rank for rank in sim.ranks if rank.rank != run.rank]
    own_node = run.rank // run.shape[1]
    everybody = [rank.rank for rank in sim.ranks]
    whose: dict[Opposite | None, Sequence[int]] = {
        Opposite.ALL_HOT: everybody,
        Opposite.ALL_LOADED: everybody,
        Opposite.OTHER_RANK: others[run.seed % len(others) :][:1],
        Opposite.NOBODY_SLOW: [run.rank],
        Opposite.IDLE_HOST: [own_node * run.shape[1]],
        Opposite.SHARED_HOST: [run.rank],
        Opposite.BETTER: [run.rank],
        Opposite.CROWDED: [run.rank],
    }
    _shift(signals, run.loud if run.opposite in whose else (), run.cost, whose.get(run.opposite, ()), sim.now_s)


def _shift(signals: SimSignals, shifts: Sequence[Amount], cost: float, ranks: Sequence[int], at_s: float) -> None:
    """Shift signals of ranks, and those of hosts on the ranks' hosts."""
    nodes = sorted({rank // len(signals.sim.nodes[0].ranks) for rank in ranks})
    for amount in shifts:
        signals.shift_of(amount.signal, amount.at(cost), ranks, nodes, at_s)


def _watch(sim: SimCluster, signals: SimSignals, run: Run) -> Outcome:
    begun_s = sim.now_s
    wanted, seen, false = set(run.kinds), set[str](), set[str]()
    named_s = slow_s = None
    is_compared = False
    while True:
        sim.run(LOOK_S)
        verdicts = [verdict for verdict in sim.diagnosis.verdicts if verdict.cause.value == "straggler"]
        if verdicts and slow_s is None:
            slow_s = sim.now_s
            if run.opposite is Opposite.LATER:
                sim.run(12.0)
                _shift(signals, run.loud, run.cost, [run.rank], sim.now_s)
        named = {because.signal.value for verdict in verdicts for because in verdict.because}
        false |= named - wanted
        seen |= named & wanted
        is_compared |= any(verdict.comparison is not None for verdict in verdicts)
        passed_s = sim.now_s - begun_s
        if wanted and named_s is None and wanted <= seen:
            named_s = passed_s
        if named_s is not None and passed_s >= named_s + AFTER_S:
            break
        is_over = passed_s >= (NAMED_S if wanted else IDLE_S) and (bool(wanted) or slow_s is None)
        if is_over or (not wanted and slow_s is not None and sim.now_s - slow_s >= QUIET_S):
            break
    return Outcome(run, named_s, tuple(sorted(false)), slow_s is not None, is_compared)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the figures by cause or opposite, as lines."""
    order = [*CAUSES, "two at once", *(opposite.value for opposite in Opposite)]
    names = sorted({outcome.run.name for outcome in outcomes}, key=order.index)
    return [
        f"{'cause':54}{'n':>5}{'named':>7}{'s':>7}{'max':>7}{'false':>7}",
        *(_row(name, [outcome for outcome in outcomes if outcome.run.name == name]) for name in names),
        _row("all causes", [outcome for outcome in outcomes if outcome.run.kinds]),
        _row("all opposites", [outcome for outcome in outcomes if not outcome.run.kinds]),
    ]


def _row(name: str, outcomes: Sequence[Outcome]) -> str:
    took = sorted(outcome.named_s for outcome in outcomes if outcome.named_s is not None)
    seconds = f"{took[len(took) // 2]:7.1f}{took[-1]:7.1f}" if took else f"{'':14}"
    num_named = str(len(took)) if any(outcome.run.kinds for outcome in outcomes) else ""
    num_false = sum(bool(outcome.false) for outcome in outcomes)
    return f"{name:54}{len(outcomes):5}{num_named:>7}{seconds}{num_false:7}"
