"""Signals of a rank beside those of its peers, all other live ranks of its job, at the same time.

A value stands out where it differs from the peers' median by enough, by several times their usual spread, and by twice
as much as nearly all of them: what a rank shares with one that keeps up does not make it slow. What is compared per
second of work must differ as it is shown, too. `standing_out` decides what a verdict and a table call different.

Of a large job a sample is compared, always the same ranks: those beside the slow ones, and others evenly from the rest.
"""

from __future__ import annotations

from math import isnan
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agent.wire.machine import JobRank
from agent.wire.signals import LEVELS, RATES_OF_HOST, RATES_OF_RANK, Signal, rates_in
from app.diagnosis.because.findings import Compared
from app.diagnosis.because.signals import TRAITS, Family, Role, Scope

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from agent.wire.digest import NodeFrame
    from agent.wire.signals import Reading
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel

MAX_PEERS = 64
"""Limit of ranks that are compared."""
MAX_BESIDE = 16
"""Limit of peers on the nodes of slow ranks; in a large job the others come from other nodes."""
PER_NODE = 4
"""Peers of each other node in a large job: a node's ranks are decoded together."""
SPREAD = 4.0
"""Multiple of the peers' spread that a difference must exceed."""
FEW_VALUES = 3
FEW_SPREAD = 2.0
"""The same where few values are known, whose spread is itself uncertain."""
TO_SIGMA = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""
ALIKE = 0.5
"""Part of a rank's difference from which a peer differs alike."""
MAX_ALIKE = 0.05
"""Part of the peers that may differ alike; none of few."""
EASE = 0.7
"""Factor on the least difference of what is already named."""
MIN_WORK = 0.1
"""Least fraction of time worked that signals are divided by: waits are samples, and may be a little too high."""


class RankSignals(NamedTuple):
    """The signals that apply to a rank."""

    rank: int
    node: str
    host: str
    """Name of the machine: two nodes may be on one."""
    of_rank: Mapping[str, Reading]
    of_host: Mapping[str, Reading]
    unmeasured: Collection[Signal]
    """Rates of either that are not known."""
    has_gpu: bool
    num_cpus: int
    work_frac: float
    """Fraction of its time in which it does not wait."""
    at_s: float
    """When its node reported."""
    known_s: float
    """Time at which its process was found."""
    gpu: int | None
    has_instance: bool
    """Whether it has a MIG instance of that GPU, not the whole of it."""
    nic: str
    frame: NodeFrame
    """The report."""
    cores: float = 0.0
    """Cores that its process keeps busy; 0 where that is not known."""

    def reading(self, signal: Signal) -> Reading | None:
        """Return a reading as it was reported; None also of a rate that is left out since it is 0."""
        return (self.of_host if TRAITS[signal].scope is Scope.HOST else self.of_rank).get(signal)

    def value(self, signal: Signal) -> float | None:
        """Return a signal's value; None where it is not known."""
        found = self.reading(signal)
        if found is not None:
            return found.value
        if signal is Signal.CPUS_ALLOWED:
            return float(self.num_cpus) if self.num_cpus else None
        if signal in LEVELS or signal in self.unmeasured or (TRAITS[signal].scope is Scope.GPU and not self.has_gpu):
            return None
        return 0.0

    def compared_as(self, signal: Signal, value: float) -> float:
        """Return a value as it is compared: per second of work, where it grows with that."""
        return value / max(MIN_WORK, self.work_frac) if TRAITS[signal].is_per_work else value


GPU_LEVELS = tuple(signal for signal in LEVELS if TRAITS[signal].scope is Scope.GPU)


def signals_of(
    cluster: Cluster,
    job: JobModel,
    rank: int,
    wait_frac: NDArray[np.float64] | None = None,
    cores: NDArray[np.float64] | None = None,
) -> RankSignals | None:
    """Return the signals of a rank; None where its node takes none, or it is not known."""
    owner = int(job.node_of[rank])
    frame = cluster.nodes[cluster.node_names[owner]].report if owner >= 0 else None
    if frame is None or frame.signals is None or (worker := job.worker(rank)) is None:
        return None
    waited = float("nan") if wait_frac is None else float(wait_frac[rank])
    at_s = float(cluster.last_report_s[owner])
    me = JobRank(job.job_id, rank)
    gpu = next((gpu.figures for gpu in frame.gpus.gpus if me in gpu.owners), None)
    return RankSignals(
        rank=rank,
        node=cluster.node_names[owner],
        host=frame.hostname or cluster.node_names[owner],
        of_rank=worker.signals,
        of_host=frame.signals,
        unmeasured=rates_in(worker.unmeasured, RATES_OF_RANK) | rates_in(frame.unmeasured, RATES_OF_HOST),
        has_gpu=gpu is not None or any(signal in worker.signals for signal in GPU_LEVELS),
        num_cpus=frame.num_cpus,
        work_frac=1.0 if isnan(waited) else 1.0 - waited,
        at_s=at_s,
        known_s=at_s - worker.seen_s,
        gpu=None if gpu is None else gpu.index,
        has_instance=gpu is not None and bool(gpu.mig_instances),
        nic=frame.nic,
        frame=frame,
        cores=0.0 if cores is None else float(cores[rank]),
    )


def sampled_ranks(job: JobModel, is_eligible: NDArray[np.bool_], slow: Iterable[int]) -> list[int]:
    """Return the ranks that are compared with slow ones: all that are eligible, of many always the same sample."""
    owners = job.node_of
    ranks = is_eligible.nonzero()[0]
    if len(ranks) <= MAX_PEERS:
        return [int(rank) for rank in ranks]
    is_beside = is_eligible & np.isin(owners, owners[list(slow)])
    beside = is_beside.nonzero()[0][:MAX_BESIDE].tolist()
    others = (is_eligible & ~is_beside).nonzero()[0]
    num_nodes = (MAX_PEERS - len(beside)) // PER_NODE
    firsts = others[:: max(1, len(others) // num_nodes)][:num_nodes].tolist()
    taken = [*beside]
    for first in firsts:
        node = owners[first]
        place = int(others.searchsorted(first))
        taken += [int(rank) for rank in others[place : place + PER_NODE].tolist() if owners[rank] == node]
    return list(dict.fromkeys(taken))


class Peers:
    """The peers of slow ranks.

    Attributes:
        num_peers: Number of ranks.
        hosts: Hosts of them and of the slow ranks.
    """

    def __init__(self, slow: Sequence[RankSignals], peers: Sequence[RankSignals]) -> None:
        self._peers = peers
        own_hosts = {one.host for one in slow}
        self.num_peers = len(peers)
        self.hosts = own_hosts | {peer.host for peer in peers}
        self._by_host = {peer.host: peer for peer in peers if peer.host not in own_hosts}
        self._values: dict[Signal, tuple[list[float], float, float, float]] = {}

    def num_known(self, signal: Signal) -> int:
        """Return the number of peers, or of other hosts, that have a signal."""
        return len(self._of(signal)[0])

    @property
    def cores(self) -> float:
        """Median of the cores that their processes keep busy."""
        return median(peer.cores for peer in self._peers) if self._peers else 0.0

    def run_part(self, own: RankSignals) -> float:
        """Return which part of a rank's running its peers run as well, at most 1; 1 where that is not known."""
        return min(1.0, self.cores / own.cores) if own.cores else 1.0

    def nics(self) -> set[str]:
        """Return the interfaces that other hosts use."""
        return {peer.nic for peer in self._by_host.values() if peer.nic}

    def _of(self, signal: Signal) -> tuple[list[float], float, float, float]:
        """Return the values as they are compared, their median and spread, and the median of the plain values."""
        if (known := self._values.get(signal)) is not None:
            return known
        of_host = TRAITS[signal].scope is Scope.HOST
        among = self._by_host.values() if of_host else self._peers
        plain = [(peer, value) for peer in among if (value := peer.value(signal)) is not None]
        values = [peer.compared_as(signal, value) for peer, value in plain]
        if not values:
            self._values[signal] = ([], 0.0, 0.0, 0.0)
        else:
            middle = median(values)
            spread = TO_SIGMA * median(abs(value - middle) for value in values)
            self._values[signal] = (values, middle, spread, median(value for _, value in plain))
        return self._values[signal]

    def compare(self, own: RankSignals, signal: Signal, ease: float = 1.0) -> Compared | None:
        """Return a signal of a rank beside the peers'; None where it is not known, or of no peer.

        Args:
            own: Signals of the rank.
            signal: The signal.
            ease: Factor on the least difference: below 1 for what is known to differ.
        """
        trait, value = TRAITS[signal], own.value(signal)
        values, middle, spread, shown = self._of(signal)
        if value is None or not values:
            return None
        sign = -1.0 if trait.is_less_worse else 1.0
        # A rank that works little has much of anything per second of work, and suffers no more from it than others.
        harm = min(sign * (own.compared_as(signal, value) - middle), sign * (value - shown))
        spreads = (SPREAD if len(values) > FEW_VALUES else FEW_SPREAD) * spread
        least = ease * max(trait.least, trait.least_ratio * abs(middle), spreads)
        alike = sum(sign * (other - middle) > ALIKE * harm for other in values) if harm >= least else 0
        reading = own.reading(signal)
        age_s = None if reading is None or reading.since_s is None else reading.since_s
        return Compared(
            signal=signal,
            value=value,
            peers=shown,
            before=None if reading is None else reading.before,
            since_s=age_s,
            is_worse=harm >= least and alike <= MAX_ALIKE * len(values),
        )

    def all_of(self, own: RankSignals, known: Iterable[Signal] = ()) -> dict[Signal, Compared]:
        """Return every signal that can be compared; those of `known` with a lower least difference."""
        eased = set(known)
        found = ((signal, self.compare(own, signal, EASE if signal in eased else 1.0)) for signal in TRAITS)
        return {signal: one for signal, one in found if one is not None}


def standing_out(
    compared: Mapping[Signal, Compared], run_part: float = 1.0, causes: Iterable[Signal] = ()
) -> dict[Signal, Compared]:
    """Return the signals of a rank that stand out, in the order of the traits.

    A signal that only supports a cause follows from slowness too, as a warmer GPU does. It stands out beside another
    one of its family. Who runs longer waits longer for a CPU: such waits stand out as far as its peers run, too.

    Args:
        compared: All its signals.
        run_part: Part of its running that its peers run as well (`Peers.run_part`).
        causes: Causes that are found.
    """
    worse = {signal: one for signal, one in compared.items() if one.is_worse}
    wait, trait = worse.get(Signal.CPU_WAIT), TRAITS[Signal.CPU_WAIT]
    is_cause = any(TRAITS[signal].family is trait.family for signal in causes)
    if wait is not None and not is_cause and run_part * (wait.value - (wait.peers or 0.0)) < trait.least:
        del worse[Signal.CPU_WAIT]
    alone = {signal for signal in worse if TRAITS[signal].role is not Role.SUPPORT}
    families = {TRAITS[signal].family for signal in alone} - {Family.ALONE}
    return {signal: one for signal, one in worse.items() if signal in alone or TRAITS[signal].family in families}
