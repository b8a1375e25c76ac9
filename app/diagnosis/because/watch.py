"""Watches the signals of slow ranks: nothing is named from one look, and what is named does not flicker.

A look compares a fresh report of a slow rank with its peers', a few seconds apart, and only while a verdict calls a
rank slow. A cause is named once it has been found at `MIN_LOOKS` looks one after the other, and dropped once it has not
been found at `MAX_MISSES`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.diagnosis.because.candidates import Candidate, Slowness, candidates_of
from app.diagnosis.because.comparison import Peers, sampled_ranks, signals_of, standing_out
from app.diagnosis.because.findings import Because, Compared, Comparison, Confidence
from app.diagnosis.causes import Cause, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agent.wire.digest import NodeFrame
    from agent.wire.signals import Signal
    from app.diagnosis.because.comparison import RankSignals
    from app.diagnosis.verdicts import Evidence, Verdict
    from app.diagnosis.wait_fractions import WaitFractions

LOOK_S = 2.4
"""Least seconds between two looks: agents smooth over some seconds, a closer look shows the same."""
MIN_LOOKS = 3
MAX_MISSES = 5
MAX_NAMED = 3
"""Limit of causes that a verdict names."""
MAX_SLOW = 16
"""Limit of slow ranks of a verdict that are compared."""
SETTLED_S = 20.0
"""Seconds after a job could be judged from which a new verdict means that a rank has become slow, not that it is found.

A rank that is slow in some steps only takes longer to find."""
SETTLED_AT_TIMES_S = 45.0
AT_TIMES_S = 50.0
"""Seconds by which it may take longer to name a rank that is slow in some steps only."""
FORGET_S = 60.0
"""Seconds after which what is known of a rank that is no longer slow is forgotten.

One whose pace cannot be judged for a while, as in an evaluation, is still slow as far as known."""


class _Track(msgspec.Struct):
    """A cause of a rank over the looks."""

    candidate: Candidate
    num_found: int = 0
    num_missed: int = 0
    is_named: bool = False

    def find(self, candidate: Candidate) -> None:
        because, before = candidate.because, self.candidate.because
        if self.is_named and before.confidence is Confidence.LIKELY:
            because = msgspec.structs.replace(because, confidence=Confidence.LIKELY)
        has_past = self.num_found > 0 or self.is_named
        began_s = (self.candidate.began_s if has_past else None) or candidate.began_s
        self.candidate = candidate._replace(because=because, began_s=began_s)
        self.num_found, self.num_missed = self.num_found + 1, 0
        self.is_named |= self.num_found >= MIN_LOOKS

    def miss(self) -> bool:
        """Take a look that has not found it; return whether it is over."""
        self.num_found, self.num_missed = 0, self.num_missed + 1
        return not self.is_named or self.num_missed >= MAX_MISSES


class _Differing(msgspec.Struct):
    """A signal that stands out, or has at one of the last looks."""

    one: Compared
    num_found: int = 0
    num_missed: int = 0
    is_shown: bool = False


class _SlowRank:
    """What is known of a rank that a verdict calls slow."""

    def __init__(self, now_s: float) -> None:
        self.named_s = self.last_s = now_s
        self.frame: NodeFrame | None = None
        self.num_looks = 0
        self.cores: tuple[float, float] | None = None
        self.tracks: dict[Signal, _Track] = {}
        self.well_s: dict[Signal, float] = {}
        """When signals were last like those of the peers; a look that misses one among others that find it is noise."""
        self._differing: dict[Signal, _Differing] = {}

    @property
    def differing(self) -> dict[Signal, Compared]:
        """Signals that stand out, whether they may be causes or not; shown and dropped as causes are."""
        return {signal: seen.one for signal, seen in self._differing.items() if seen.is_shown}

    def take(self, found: dict[Signal, Candidate], compared: dict[Signal, Compared], run_part: float) -> None:
        """Take the causes that a look has found, and all signals that it has compared.

        Args:
            found: The causes.
            compared: The signals.
            run_part: Part of the rank's running that its peers run as well.
        """
        self.num_looks += 1
        marked = standing_out(compared, run_part, {*found, *self.named})
        for signal, one in marked.items():
            seen = self._differing.setdefault(signal, _Differing(one))
            seen.one, seen.num_found, seen.num_missed = one, seen.num_found + 1, 0
            seen.is_shown |= seen.num_found >= MIN_LOOKS
        for signal in self._differing.keys() - marked.keys():
            seen = self._differing[signal]
            seen.num_found, seen.num_missed = 0, seen.num_missed + 1
            if seen.num_missed >= (MAX_MISSES if seen.is_shown else MIN_LOOKS):
                del self._differing[signal]
        for signal, candidate in found.items():
            self.tracks.setdefault(signal, _Track(candidate)).find(candidate)
        over = [signal for signal, track in self.tracks.items() if signal not in found and track.miss()]
        for signal in over:
            del self.tracks[signal]

    def note_well(self, compared: dict[Signal, Compared], at_s: float) -> None:
        """Note which signals are like those of the peers, and were at the last looks."""
        bad = {*self.tracks, *self._differing}
        well = (signal for signal, one in compared.items() if not one.is_worse and signal not in bad)
        self.well_s |= dict.fromkeys(well, at_s)

    @property
    def named(self) -> dict[Signal, Candidate]:
        """Causes that are named."""
        return {signal: track.candidate for signal, track in self.tracks.items() if track.is_named}


class CauseWatch:
    """Finds why the slow ranks of one job are slow."""

    def __init__(self) -> None:
        self._ranks: dict[int, _SlowRank] = {}
        self._looked_s = -math.inf
        self._judged_s = math.inf
        self._comparison: Comparison | None = None

    def observe(self, verdicts: list[Verdict], evidence: Evidence, fractions: WaitFractions) -> list[Verdict]:
        """Return the verdicts, those on slow ranks with causes and with how much has been compared.

        Args:
            verdicts: Verdicts of one job.
            evidence: The job at this moment.
            fractions: How long the job's ranks wait, and which of them are slow, also where no verdict is on them now.
        """
        now_s = evidence.now_s
        if fractions.is_judged:
            self._judged_s = min(self._judged_s, now_s)
        if fractions.laggards is not None:
            self._keep(fractions.laggards.ranks, now_s)
        slow = [verdict for verdict in verdicts if is_asked(verdict)]
        if not slow:
            if self._ranks:
                self._forget(now_s)
            return verdicts
        if now_s - self._looked_s >= LOOK_S:
            self._look(slow, evidence, fractions)
        return [self._with_causes(verdict) if is_asked(verdict) else verdict for verdict in verdicts]

    def _keep(self, ranks: Iterable[int], now_s: float) -> None:
        for rank in ranks:
            if (known := self._ranks.get(rank)) is not None:
                known.last_s = now_s

    def _forget(self, now_s: float) -> None:
        self._ranks = {rank: known for rank, known in self._ranks.items() if now_s - known.last_s < FORGET_S}

    def _look(self, slow: Sequence[Verdict], evidence: Evidence, fractions: WaitFractions) -> None:
        job, now_s = evidence.job, evidence.now_s
        recent = (fractions.recent_frac, fractions.recent_cores)
        self._looked_s = now_s
        self._forget(now_s)
        culprits = {rank for verdict in slow for rank in verdict.culprits}
        for rank in culprits:
            self._ranks.setdefault(rank, _SlowRank(now_s)).last_s = now_s
        asked = [(verdict, _few(verdict.culprits)) for verdict in slow]
        own = {
            rank: found
            for rank in sorted({rank for _, ranks in asked for rank in ranks})
            if (found := signals_of(evidence.cluster, job, rank, *recent)) is not None
        }
        is_peer = evidence.facts.is_fresh.copy()
        is_peer[list(culprits)] = False
        if not own:
            self._comparison = Comparison(0, int(is_peer.sum()), 0)
            return
        sample = sampled_ranks(job, is_peer, own)
        others = (signals_of(evidence.cluster, job, rank, *recent) for rank in sample)
        peers = Peers(list(own.values()), [other for other in others if other is not None])
        num_signals = len({signal for one in own.values() for signal in peers.all_of(one)})
        self._comparison = Comparison(num_signals, peers.num_peers, len(peers.hosts))
        for verdict, ranks in asked:
            for rank in ranks:
                if rank in own and evidence.facts.is_fresh[rank]:
                    self._look_at(own[rank], peers, verdict, evidence)

    def _look_at(self, own: RankSignals, peers: Peers, verdict: Verdict, evidence: Evidence) -> None:
        known = self._ranks[own.rank]
        if known.frame is own.frame:
            return
        known.frame = own.frame
        known.cores = (own.cores, peers.cores) if own.cores and not own.has_gpu else None
        slowness = self._slowness(own.rank, verdict, evidence)
        compared = peers.all_of(own, {*known.named, *known.differing})
        known.take(candidates_of(own, peers, slowness, known.named, known.well_s), compared, peers.run_part(own))
        known.note_well(compared, own.at_s)

    def _slowness(self, rank: int, verdict: Verdict, evidence: Evidence) -> Slowness:
        job, now_s, named_s = evidence.job, evidence.now_s, self._ranks[rank].named_s
        here = np.flatnonzero((job.node_of == job.node_of[rank]) & evidence.facts.is_alive)
        is_whole_host = set(here.tolist()) <= set(verdict.culprits)
        if verdict.cost_frac is None:
            since_s = now_s - verdict.waited_s
            return Slowness(verdict.phase, None, since_s, since_s, is_whole_host)
        is_rare = verdict.is_at_times or verdict.is_in_turns
        is_known = named_s - self._judged_s >= (SETTLED_AT_TIMES_S if is_rare else SETTLED_S)
        earliest_s = named_s - AT_TIMES_S * is_rare if is_known else -math.inf
        earlier = verdict.earlier_cost
        latest_s = now_s if earlier is not None and earlier.frac < verdict.cost_frac else named_s
        phase = None if verdict.habit is None else verdict.habit.phase
        return Slowness(phase, verdict.cost_frac, earliest_s, latest_s, is_whole_host)

    def _with_causes(self, verdict: Verdict) -> Verdict:
        known = [self._ranks[rank] for rank in _few(verdict.culprits) if rank in self._ranks]
        is_compared = self._comparison is not None and (
            self._comparison.num_signals == 0 or any(one.num_looks >= MIN_LOOKS for one in known)
        )
        because = self._because(verdict)
        if not because and not is_compared:
            return verdict
        comparison, differing = self._comparison, next((one.differing for one in known if one.differing), {})
        if comparison is not None:
            cores = known[0].cores if len(verdict.culprits) == len(known) == 1 else None
            comparison = msgspec.structs.replace(comparison, differing=tuple(differing.values()), cores=cores)
        return msgspec.structs.replace(verdict, because=because, comparison=comparison)

    def _because(self, verdict: Verdict) -> tuple[Because, ...]:
        """Return the causes that are named for the ranks of a verdict, the best first, those of several ranks once."""
        ranks = [rank for rank in _few(verdict.culprits) if rank in self._ranks]
        by_signal: dict[Signal, list[Candidate]] = {}
        for rank in ranks:
            for signal, candidate in self._ranks[rank].named.items():
                by_signal.setdefault(signal, []).append(candidate)
        found = [_together(candidates, len(ranks), self._looked_s) for candidates in by_signal.values()]
        ordered = sorted(
            found, key=lambda candidate: (candidate.weight[0], -len(candidate.because.ranks), candidate.weight)
        )
        return tuple(candidate.because for candidate in ordered[:MAX_NAMED])


def is_asked(verdict: Verdict) -> bool:
    """Return whether a verdict is on slow ranks of which it is not known why they are slow."""
    return (
        verdict.cause is Cause.STRAGGLER
        and verdict.severity is not Severity.QUIET
        and verdict.slow_factor <= 1.0
        and verdict.aftermath is None
    )


def _few(ranks: Sequence[int]) -> Sequence[int]:
    """Return the ranks that are compared: of many always the same."""
    return ranks[:: -(-len(ranks) // MAX_SLOW)]


def _together(candidates: Sequence[Candidate], num_ranks: int, now_s: float) -> Candidate:
    """Return one cause of several ranks, by the rank that it holds up most."""
    best = min(candidates, key=lambda candidate: candidate.weight)
    ranks = tuple(sorted(rank for candidate in candidates for rank in candidate.because.ranks))
    confidence = best.because.confidence
    if 2 * len(ranks) < num_ranks:
        confidence = Confidence.POSSIBLE
    since_s = None if best.began_s is None else max(0.0, now_s - best.began_s)
    because = msgspec.structs.replace(best.because, ranks=ranks, confidence=confidence, since_s=since_s)
    return best._replace(because=because)
