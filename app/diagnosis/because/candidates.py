"""Which of a slow rank's differences from its peers may make it slow.

Several rules leave out what only follows from slowness, or does not fit to it:

1. **Phase.** A signal counts in the phases that it may lengthen: a GPU's clock is no reason to load data slowly.
2. **Beginning.** What was so long before the rank became slow, or began later, is no reason.
3. **Amount.** A part of time, or a lower clock, accounts for a part of the cost, or it is not named. Waits for a CPU
   do for half of it, as far as the rank runs no longer than its peers.
4. **Family.** A cause takes the figures that follow from it as its support: throttling a lower clock, a CPU quota the
   waits for a CPU. Without a cause they are named themselves.
5. **Host.** A host's signal applies to all its ranks. It explains some of them only beside a signal of their own.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from agent.wire.signals import Signal
from app.diagnosis.because.findings import Because, Compared, Confidence
from app.diagnosis.because.signals import ORDER, TRAITS, Family, Role, Scope
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from app.diagnosis.because.comparison import Peers, RankSignals
    from app.diagnosis.because.signals import Trait

LEAD_S = 40.0
"""Seconds before a rank is named from which a change may be the reason: it takes up to 15 s to name most, longer on a
busy machine."""
STALL_LEAD_S = 20.0
"""Seconds before a wait from which a change may be its reason."""
YOUNG_S = 30.0
"""Seconds after a process was found for which its signals have no past."""
MIN_EXPLAINED = 0.3
LIKELY_EXPLAINED = 0.5
"""Part of the cost that a signal must account for to be named, and to be likely."""
MIN_STALL_PART = 0.5
"""Part of a rank's time that a signal must take to keep it from moving at all."""
MIN_STALL_CPU_PART = 0.8
"""The same of waits for a CPU: a rank that gets half of one comes half as fast, and does not stand."""
MAX_STALL_RUN_S = 10.0
"""Seconds for which a rank may have run since the others began to wait: after more, no lack of a CPU holds it."""
MIN_CLOCK_DROP = 0.05
"""Part by which a GPU's clock must be lower for a throttle reason to count, where the clock is known."""
MIN_CLOCK_ALONE = 0.15
"""Part by which a clock must be lower to be named without a reason: GPUs that spin in NCCL clock a little higher."""
MAX_CAPPED_DROP = 0.3
"""Part by which the clock of a GPU at its power limit may be lower since it works more than others."""
MIN_PEERS = 3
THROTTLES = (Signal.GPU_THERMAL, Signal.GPU_HW_SLOWDOWN, Signal.GPU_POWER_BRAKE, Signal.GPU_POWER_LIMIT)
CPU_CAUSES = (Signal.CPU_THROTTLED, Signal.CPU_OTHERS, Signal.CPU_STEAL, Signal.CPUS_ALLOWED)
CPU_TAKEN = (Signal.CPU_WAIT, Signal.CPU_OTHERS)
"""Signals that show that something else has the rank's CPU."""
CLOCKS = frozenset({Signal.GPU_MEMORY_CLOCK, Signal.CPU_CLOCK})
WITNESSES = {
    Family.CPU: (Signal.CPU_WAIT,),
    Family.MEMORY: (Signal.MAJOR_FAULTS, Signal.BLOCKED),
    Family.DISK: (Signal.BLOCKED,),
}
"""Signals of a rank that show that it suffers what a signal of its host shows; other families have none."""


class Slowness(NamedTuple):
    """How a rank is slow."""

    phase: Phase | None
    """Phase in which it spends more time than the others, or stands; None where none stands out."""
    cost_frac: float | None
    """Fraction of the step time that the others lose; None where they wait for it now."""
    earliest_s: float
    """When it may have become slow at the earliest; minus infinity where that is not known."""
    latest_s: float
    """When it was slow at the latest."""
    is_whole_host: bool
    """Whether all ranks of its host are slow."""

    def may_begin_at(self, began_s: float | None, signal: Signal) -> bool:
        """Return whether a signal that became worse at a time may be the reason; also where that is not known."""
        if began_s is None:
            return True
        trait = TRAITS[signal]
        lead_s = STALL_LEAD_S if self.cost_frac is None else LEAD_S + trait.lead_s
        return self.earliest_s - lead_s <= began_s <= self.latest_s + trait.lag_s


class Candidate(NamedTuple):
    """A cause of one rank's slowness, at one look."""

    because: Because
    began_s: float | None
    """When the signal changed; None where that is not known."""
    explained: float
    """Part of the cost that it accounts for, at most 1; 1 where that is not known."""

    @property
    def weight(self) -> tuple[bool, bool, float, int]:
        """Order of candidates: the best one is the least."""
        trait = TRAITS[self.because.signal]
        is_possible = self.because.confidence is Confidence.POSSIBLE
        return is_possible, not trait.is_direct, -round(self.explained, 1), ORDER[self.because.signal]


def candidates_of(
    own: RankSignals,
    peers: Peers,
    slowness: Slowness,
    known: Collection[Signal] = (),
    well_s: Mapping[Signal, float] = MappingProxyType({}),
) -> dict[Signal, Candidate]:
    """Return the causes that a rank's signals show at one moment.

    Args:
        own: Its signals.
        peers: The ranks that are compared with it.
        slowness: How it is slow.
        known: Causes that are already named: when they began has been judged, and they may differ by less.
        well_s: When signals were last seen like the peers' while the rank was slow: they began later.
    """
    compared = peers.all_of(own, known)
    worse = {signal: one for signal, one in compared.items() if one.is_worse and _fits(signal, slowness)}
    began_s = {signal: began_of(own, one, well_s.get(signal)) for signal, one in worse.items()}
    found = {
        signal: one
        for signal, one in worse.items()
        if signal in known or slowness.may_begin_at(began_s[signal], signal)
    }
    look = _Look(own, peers, slowness, compared, began_s)
    causes = [signal for signal in found if TRAITS[signal].role is not Role.SUPPORT and look.applies(signal)]
    causes = without_what_follows(causes)
    return {signal: candidate for signal in causes if (candidate := look.candidate(signal)) is not None}


def _fits(signal: Signal, slowness: Slowness) -> bool:
    """Return whether a signal may lengthen what the rank does."""
    trait = TRAITS[signal]
    if slowness.cost_frac is None and not trait.explains_stalls:
        return False
    return slowness.phase is None or slowness.phase in trait.phases


def began_of(own: RankSignals, one: Compared, well_s: float | None = None) -> float | None:
    """Return when a signal became worse; minus infinity for long ago, None where that is not known.

    Args:
        own: Signals of the rank.
        one: The signal.
        well_s: When it was last seen like the peers'; an agent dates a change once it has lasted.
    """
    began_s = _dated(own, one)
    return well_s if well_s is not None and (began_s is None or began_s == -math.inf) else began_s


def _dated(own: RankSignals, one: Compared) -> float | None:
    trait = TRAITS[one.signal]
    if one.since_s is not None and one.before is not None:
        sign = -1.0 if trait.is_less_worse else 1.0
        was_worse = one.peers is not None and sign * (one.before - one.peers) >= _least(trait, one.peers)
        # It may have been so before its last change as well, which is not its beginning then.
        return own.at_s - one.since_s if sign * (one.value - one.before) > 0.0 and not was_worse else None
    has_past = trait.scope is Scope.HOST or own.at_s - own.known_s > YOUNG_S
    return -math.inf if has_past else None


def _least(trait: Trait, middle: float) -> float:
    return max(trait.least, trait.least_ratio * abs(middle))


def without_what_follows(causes: Iterable[Signal]) -> list[Signal]:
    """Return the causes without those that follow from another one of them."""
    left = list(dict.fromkeys(causes))

    def drop(signals: Iterable[Signal], beside: Iterable[Signal]) -> None:
        if any(signal in left for signal in beside):
            left[:] = [signal for signal in left if signal not in set(signals)]

    drop([Signal.GPU_POWER_CAP], THROTTLES)
    drop([Signal.GPU_CLOCK], [*THROTTLES, Signal.GPU_POWER_CAP])
    drop([Signal.CPU_WAIT], CPU_CAUSES)
    drop([Signal.MAJOR_FAULTS, Signal.MEMORY_PRESSURE], [Signal.SWAPPED])
    drop([Signal.MEMORY_PRESSURE], [Signal.MAJOR_FAULTS])
    drop([Signal.BLOCKED, Signal.IO_PRESSURE], [Signal.SWAPPED, Signal.MAJOR_FAULTS, Signal.MEMORY_PRESSURE])
    drop([Signal.IO_PRESSURE], [Signal.BLOCKED])
    # A thread that has no CPU, or collects garbage, keeps the interpreter lock all the while.
    drop([Signal.GIL_WAIT], [*CPU_CAUSES, Signal.CPU_WAIT, Signal.GC_PAUSE])
    return left


class _Look:
    """One look at a slow rank: what differs, and what of it may be a cause."""

    def __init__(
        self,
        own: RankSignals,
        peers: Peers,
        slowness: Slowness,
        compared: Mapping[Signal, Compared],
        began_s: Mapping[Signal, float | None],
    ) -> None:
        self._own, self._peers, self._slowness = own, peers, slowness
        self._compared, self._began_s = compared, began_s

    def _is_worse(self, signal: Signal) -> bool:
        one = self._compared.get(signal)
        return one is not None and one.is_worse

    def _is_dated(self, signal: Signal) -> bool:
        began_s = self._began_s[signal]
        return began_s is not None and began_s > -math.inf

    def _drop(self, signal: Signal) -> float | None:
        """Return the fraction by which a clock is lower than the peers'; None where it is not known."""
        one = self._compared.get(signal)
        return None if one is None or not one.peers else 1.0 - one.value / one.peers

    def _excess(self, signal: Signal) -> float:
        """Return by how much a part of time is higher than the peers'; 0 where it is not known."""
        one = self._compared.get(signal)
        return 0.0 if one is None or one.peers is None else one.value - one.peers

    def applies(self, signal: Signal) -> bool:
        """Return whether a signal that differs may be a cause here, beside the rank's other signals."""
        trait = TRAITS[signal]
        if trait.scope is Scope.HOST and not self._slowness.is_whole_host:
            return any(self._is_worse(witness) for witness in WITNESSES.get(trait.family, ()))
        if trait.family is Family.GPU_SPEED:
            return self._slows_the_gpu(signal)
        if signal is Signal.CPUS_ALLOWED:
            return self._is_dated(signal) or self._is_worse(Signal.CPU_WAIT) or self._slowness.phase is Phase.DATA
        return True

    def _slows_the_gpu(self, signal: Signal) -> bool:
        drop = self._drop(Signal.GPU_CLOCK)
        if signal in THROTTLES:
            return drop is None or drop >= MIN_CLOCK_DROP
        # Who works more is at its power limit more, and so a little slower: that follows from slowness.
        is_capped = self._excess(Signal.GPU_POWER_CAP) >= TRAITS[Signal.GPU_POWER_CAP].least
        if drop is None or drop < MIN_CLOCK_ALONE:
            return False
        return signal is Signal.GPU_POWER_CAP or not is_capped or drop > MAX_CAPPED_DROP

    def candidate(self, signal: Signal) -> Candidate | None:
        """Return a cause with its evidence; None where it accounts for too little."""
        explained = self._explained(signal)
        if explained < MIN_EXPLAINED:
            return None
        own, one, trait = self._own, self._compared[signal], TRAITS[signal]
        assert one.peers is not None
        is_dated = self._is_dated(signal)
        is_sure = is_dated or trait.is_direct
        # There may be only one other host; a rank's own signals, or all its host's ranks, agree with it.
        num_peers = self._peers.num_known(signal) if trait.scope is not Scope.HOST else self._peers.num_peers
        is_likely = is_sure and not trait.is_weak and explained >= LIKELY_EXPLAINED and num_peers >= MIN_PEERS
        because = Because(
            signal=signal,
            ranks=(own.rank,),
            value=one.value,
            peers=one.peers,
            before=one.before,
            since_s=one.since_s if is_dated else None,
            confidence=Confidence.LIKELY if is_likely else Confidence.POSSIBLE,
            node=own.node,
            gpu=own.gpu,
            has_instance=own.has_instance,
            support=tuple(self._support(signal)),
            nic=own.nic,
        )
        return Candidate(because, self._began_s[signal] if is_dated else None, explained)

    def _explained(self, signal: Signal) -> float:
        """Return the part of the cost that a signal accounts for; 1 where that is not known."""
        trait, cost_frac = TRAITS[signal], self._slowness.cost_frac
        witness = Signal.CPU_WAIT if trait.family is Family.CPU and not trait.is_part else signal
        if trait.family is Family.CPU and witness is Signal.CPU_WAIT and not self._is_worse(witness):
            # Of a whole host, or of threads and loader workers whose waits are not measured.
            return self._of_load() if signal is Signal.CPU_OTHERS else 1.0
        if TRAITS[witness].is_part:
            if cost_frac is None:
                return float(self._keeps_from_moving(witness))
            explained = self._of_cost(self._excess(witness), cost_frac)
            return self._by_waiting(explained) if signal in CPU_TAKEN else explained
        if trait.family is Family.GPU_SPEED:
            signal = Signal.GPU_CLOCK
        drop = self._drop(signal) if signal is Signal.GPU_CLOCK or signal in CLOCKS else None
        return 1.0 if drop is None or cost_frac is None else self._of_cost(drop, cost_frac)

    def _keeps_from_moving(self, witness: Signal) -> bool:
        """Return whether a signal takes so much of a rank's time that it stands."""
        part = self._compared[witness].value
        if TRAITS[witness].family is not Family.CPU:
            return part >= MIN_STALL_PART
        run_s = (1.0 - part) * (self._own.at_s - self._slowness.latest_s)
        return part >= MIN_STALL_CPU_PART and run_s <= MAX_STALL_RUN_S

    def _by_waiting(self, explained: float) -> float:
        """Return the part of the cost that waits for a CPU explain by themselves: most of it, or none.

        On a crowded machine a rank that runs longer waits longer, too, and more of its time than ranks that sleep.
        """
        explained *= self._peers.run_part(self._own)
        return explained if explained >= LIKELY_EXPLAINED else 0.0

    def _of_load(self) -> float:
        """Return the part of the cost that load of others accounts for, where the main thread does not wait for a CPU.

        Pressure shows whether anything on the host waits for one, as far as it is known. Little of it may still slow
        the loader workers.
        """
        pressure, is_loading = self._compared.get(Signal.CPU_PRESSURE), self._slowness.phase is Phase.DATA
        if self._slowness.cost_frac is None and self._compared[Signal.CPU_OTHERS].value < MIN_STALL_PART:
            return 0.0
        if pressure is None:
            return 1.0 if is_loading else MIN_EXPLAINED
        return 1.0 if pressure.is_worse else MIN_EXPLAINED * is_loading

    @staticmethod
    def _of_cost(part: float, cost_frac: float) -> float:
        return max(0.0, min(1.0, part / max(cost_frac, 1e-9)))

    def _support(self, signal: Signal) -> list[Compared]:
        """Return the other signals of a cause's family that agree with it."""
        family = TRAITS[signal].family
        if family is Family.ALONE:
            return []
        families = {family, Family.DISK} if family is Family.MEMORY else {family}
        found = []
        for other, trait in TRAITS.items():
            if other is signal or trait.family not in families:
                continue
            one = self._compared.get(other) or self._risen(other)
            is_heat = other is Signal.GPU_TEMPERATURE and signal in (Signal.GPU_THERMAL, Signal.GPU_HW_SLOWDOWN)
            is_clock = other is Signal.GPU_CLOCK and (drop := self._drop(other)) is not None and drop > 0.0
            if one is not None and (one.is_worse or is_heat or is_clock):
                found.append(one)
        return found

    def _risen(self, signal: Signal) -> Compared | None:
        """Return a signal of the only host that has risen lately; no other host's can be compared with it."""
        reading, trait = self._own.reading(signal), TRAITS[signal]
        if trait.scope is not Scope.HOST or reading is None or reading.before is None or reading.since_s is None:
            return None
        if trait.is_less_worse or reading.value - reading.before < _least(trait, reading.before):
            return None
        one = Compared(signal, reading.value, None, reading.before, reading.since_s, is_worse=True)
        return one if self._slowness.may_begin_at(began_of(self._own, one), signal) else None
