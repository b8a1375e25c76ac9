"""How ranks spend their time, in rows and sentences: which rank costs the others time, and what it does then.

`JobPace` makes the rows `PaceRow` and `PaceSummary`. `slow_parts` describes what slow ranks cost the others.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.reports import place_of
from app.diagnosis.because.comparison import Peers, sampled_ranks, signals_of, standing_out
from app.diagnosis.because.watch import MAX_SLOW
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.rank_pace import MIN_HABIT, PHASES, chance_frac
from app.diagnosis.slow_ranks import MIN_COST
from app.diagnosis.verdicts import is_at_exit
from app.text import clean_name, percent_text, place_text, ranks_text, seconds_text
from app.view.because_text import because_parts, nothing_differs_text, signal_row
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agent.wire.signals import Signal
    from app.diagnosis.because.comparison import RankSignals
    from app.diagnosis.diagnoser import JobDiagnosis
    from app.diagnosis.rank_pace import RankPace
    from app.diagnosis.verdicts import Verdict
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel
    from app.view.rows import SignalRow

MANY_PEERS = 16
"""Number of peers from which a rank among them hardly moves their median: one comparison serves all ranks then."""
LEAST_LAST_FRAC = 0.05
"""Share of the collectives to which a slow rank comes last, below which it is not named: few calls were compared."""


class PaceRow(msgspec.Struct, frozen=True):
    """How a rank spends its time compared with the others; shares 0..1, None until it was observed long enough."""

    rank: int
    node: str
    severity: Severity
    """WARNING for a straggler that a verdict names."""
    cost_frac: float | None
    """How much less it waits than the median of the others, as a share of time."""
    wait_frac: float | None
    last_frac: float | None
    """Share of the collectives to which it came last among its node's ranks."""
    phases: dict[str, float]
    """Share of its time in each phase; it waits for the rest."""
    more_of: list[str]
    """Phases in which it spends clearly more time than the others."""
    where: str
    """Last seen place, as `file.py:line in function`."""
    signals: list[SignalRow] = []
    """Its signals beside those of its peers, where they are asked for; those that stand out come first."""

    @property
    def is_old(self) -> bool:
        """False: shares of undisturbed training stay valid while a rank does not report."""
        return False


class PaceSummary(msgspec.Struct, frozen=True):
    """A summary of how the ranks of the job spend their time."""

    severity: Severity
    text: str
    """A sentence."""
    window_s: float
    """Seconds of undisturbed time that the shares cover."""
    phases: list[str]
    """Phases in which any rank spends time, in the order of a step."""
    num_rows: int
    """Number of ranks that were observed long enough."""
    longest_wait_s: float
    """Longest single wait in that time."""


HOLDING_UP = frozenset({Cause.FROZEN, Cause.SILENT, Cause.FEWER_CALLS})
"""Causes by which ranks whose processes are still there hold up those that wait for them."""
MIN_HANG_S = 1.0
"""Seconds of a single wait from which, with a hang standing, a share of waiting is not one of the training before."""
LONG_WAIT_S = 5.0
"""Seconds of a single wait from which it is named beside the shares: half-way to a stall."""
MIN_SHOWN_FRAC = 0.01
"""Smallest share shown; a phase below it in all ranks is left out."""
STEP_ORDER = (
    *(Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),
    *(Phase.BARRIER, Phase.EVAL, Phase.CHECKPOINT, Phase.JOINING, Phase.STARTING, Phase.OTHER),
)


class JobPace:
    """The pace of a job's ranks at one moment; see `app.diagnosis.rank_pace`."""

    def __init__(self, cluster: Cluster, job: JobModel, found: JobDiagnosis) -> None:
        self._cluster, self._job = cluster, job
        self._pace = _with_verdicts(found.pace(), found.verdicts)
        self._order = self._pace.slowest_first()
        self._is_fresh, self._is_dead, self._verdicts = found.facts.is_fresh, found.facts.is_dead, found.verdicts
        self._recent = found.wait_frac, job.cpu_cores
        self._named = {
            rank for verdict in found.verdicts if verdict.cause is Cause.STRAGGLER for rank in verdict.culprits
        }
        costs = [verdict.cost_frac for verdict in found.verdicts if verdict.cause is Cause.STRAGGLER]
        self._cost_frac = next((cost for cost in costs if cost is not None), None)
        """Share of time that all named stragglers cost together."""
        waits_s = [verdict.waited_s for verdict in found.verdicts if verdict.cause is Cause.STRAGGLER]
        self._held_up_s = max(waits_s, default=0.0) if self._cost_frac is None else 0.0
        """Seconds for which others wait for the named ranks now; 0 where these make every step longer."""

    def summary(self) -> PaceSummary:
        """Return the summary over all ranks."""
        highest = self._phase_frac.max(axis=1) if self._order.size else np.zeros(len(PHASES))
        shown = [phase.value for phase in STEP_ORDER if highest[PHASES.index(phase)] >= MIN_SHOWN_FRAC]
        severity, text = self._sentence()
        pace = self._pace
        return PaceSummary(
            severity, self._ended_text() + text, pace.window_s, shown, len(self._order), pace.longest_wait_s
        )

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Ranks in the order of the rows."""
        return self._order

    def rows(self, wanted: Sequence[int]) -> list[PaceRow]:
        """Return the rows at these places in the order, the costliest rank first."""
        return [self._row(int(self._order[place])) for place in wanted if 0 <= place < len(self._order)]

    def signals(self, rank: int) -> list[SignalRow]:
        """Return the signals of a rank beside its peers', those that stand out first; empty where none are known.

        A signal that is 0 for the rank and its peers alike is left out.
        """
        own = signals_of(self._cluster, self._job, rank, *self._recent)
        if own is None:
            return []
        is_among_peers = rank not in self._named and len(self._sample) <= MANY_PEERS
        peers = Peers([own], self._others_of(rank)) if is_among_peers else self._peers
        causes = self._causes_of(rank)
        compared = peers.all_of(own, causes)
        marked = standing_out(compared, peers.run_part(own), causes)
        found = [one for one in compared.values() if one.value or one.peers]
        found.sort(key=lambda one: one.signal not in marked)
        return [signal_row(one, stands_out=one.signal in marked) for one in found]

    def _causes_of(self, rank: int) -> set[Signal]:
        """Return the causes that verdicts name for a rank."""
        return {one.signal for verdict in self._verdicts for one in verdict.because if rank in one.ranks}

    @cached_property
    def _sample(self) -> list[RankSignals]:
        """Signals of the ranks that others are compared with: those that are not named as slow."""
        is_peer = self._is_fresh.copy()
        is_peer[list(self._named)] = False
        ranks = sampled_ranks(self._job, is_peer, self._named)
        found = (signals_of(self._cluster, self._job, rank, *self._recent) for rank in ranks)
        return [one for one in found if one is not None]

    @cached_property
    def _peers(self) -> Peers:
        named = (signals_of(self._cluster, self._job, rank, *self._recent) for rank in sorted(self._named)[:MAX_SLOW])
        return Peers([one for one in named if one is not None], self._sample)

    def _others_of(self, rank: int) -> list[RankSignals]:
        return [one for one in self._sample if one.rank != rank]

    def _row(self, rank: int) -> PaceRow:
        pace, worker, owner = self._pace, self._job.worker(rank), int(self._job.node_of[rank])
        shares = pace.phase_frac[:, rank]
        is_more = shares - self._usual >= np.maximum(MIN_HABIT, chance_frac(self._usual, float(pace.observed_s[rank])))
        place = place_of(worker)
        return PaceRow(
            rank=rank,
            node=clean_name(self._cluster.node_names[owner]) if owner >= 0 else "",
            severity=Severity.WARNING if rank in self._named else Severity.OK,
            cost_frac=_known(pace.cost_frac[rank]),
            wait_frac=_known(pace.wait_frac[rank]),
            last_frac=_known(pace.last_frac[rank]),
            phases={phase.value: float(fraction) for phase, fraction in zip(PHASES, shares, strict=True)},
            more_of=[phase.value for phase, more in zip(PHASES, is_more, strict=True) if more],
            where="" if worker is not None and worker.exit is not None and is_at_exit(place) else place_text(place),
        )

    def _ended_text(self) -> str:
        """Return `rank 3 has ended; `, of ranks without a row of a job that goes on; empty without any."""
        is_left_out = self._is_dead.copy()
        is_left_out[self._order] = False
        ranks = [] if self._is_dead.all() or self._job.is_ended() else np.flatnonzero(is_left_out).tolist()
        return f"{ranks_text(ranks)} {'has' if len(ranks) == 1 else 'have'} ended; " if ranks else ""

    def _sentence(self) -> tuple[Severity, str]:
        is_over = self._job.is_ended()
        grave = next((verdict for verdict in self._verdicts if verdict.severity is Severity.CRITICAL), None)
        holding = ""
        if grave is not None and not is_over and _is_holding_up(grave):
            holding = _holding_text(sorted(grave.culprits), grave.waited_s, is_over=False)
        if not self._order.size:
            none = f"not enough undisturbed training {'was seen' if is_over else 'has been seen yet'}"
            return (grave.severity, f"{holding}; {none}") if grave is not None and holding else (Severity.QUIET, none)
        wait_frac, cost_frac = self._pace.wait_frac[self._order], self._pace.cost_frac[self._order]
        middle = percent_text(float(np.median(wait_frac)))
        if named := [rank for rank in self._order.tolist() if rank in self._named]:
            return Severity.WARNING, self._named_text(named, middle, is_over=is_over)
        if grave is not None and holding:
            return grave.severity, holding
        # The shares are of the training before a hang or an end; nothing of them is so now.
        is_past, before = is_over or grave is not None, "before this, " if grave is not None else ""
        severity, waits = (Severity.QUIET, "waited") if is_past else (Severity.OK, "waits")
        worst = int(cost_frac.argmax())
        observed_s = float(self._pace.observed_s[self._order[worst]])
        if cost_frac[worst] < max(MIN_COST, float(chance_frac(np.asarray(np.median(wait_frac)), observed_s))):
            holds = "held" if is_past else "holds"
            # With a hang in the window, what a rank waits is mostly that.
            is_mixed = grave is not None and self._pace.longest_wait_s >= MIN_HANG_S
            typical = "" if is_mixed else f": a typical rank {waits} {middle} of the time"
            return severity, f"{before}nobody {holds} the others up{typical}"
        less = f"{ranks_text([int(self._order[worst])])} {waits} {percent_text(float(cost_frac[worst]))} less"
        # Of a job that is over a verdict may have stood, and none is to come.
        unsure = " before the job ended" if is_over else ": not long or not surely enough for a verdict"
        return severity, f"{before}{less} than the others{'' if before else unsure}"

    def _named_text(self, named: list[int], middle: str, *, is_over: bool) -> str:
        """Return what ranks that a verdict names cost the others, or for how long they hold them up."""
        if self._held_up_s:
            return _holding_text(sorted(named), self._held_up_s, is_over=is_over)
        who, is_one = ranks_text(sorted(named)), len(named) == 1
        cost = percent_text(self._cost_frac or float(self._pace.cost_frac[named[0]]))
        costs = "costs" if is_one else "cost"
        return f"{who} {costs} the others {cost} of the step time; a typical rank waits {middle}"

    @property
    def _phase_frac(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return self._pace.phase_frac[:, self._order]

    @cached_property
    def _usual(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return self._pace.usual_frac


def _is_holding_up(verdict: Verdict) -> bool:
    """Return whether ranks that are still there keep others waiting now."""
    is_there = verdict.exit is None and verdict.aftermath is None
    return verdict.cause in HOLDING_UP and bool(verdict.waiting) and is_there


def _holding_text(ranks: Sequence[int], held_up_s: float, *, is_over: bool) -> str:
    """Return `rank 3 holds the others up for 12 s now`, or how long ranks did in a job that is over."""
    holds = "held" if is_over else "holds" if len(ranks) == 1 else "hold"
    return f"{ranks_text(ranks)} {holds} the others up for {seconds_text(held_up_s)}{'' if is_over else ' now'}"


def _with_verdicts(pace: RankPace, verdicts: Sequence[Verdict]) -> RankPace:
    """Return the pace with what verdicts name of slow ranks, which they judge by windows of their own.

    The cost of several ranks is that of the costliest one, or the sum where they are slow in turns.
    """
    cost_frac, last_frac = pace.cost_frac.copy(), pace.last_frac.copy()
    for one in verdicts:
        named = [rank for rank in one.culprits if not math.isnan(cost_frac[rank])]
        if one.cause is not Cause.STRAGGLER or one.cost_frac is None or one.is_in_turns or not named:
            continue
        costliest = max(named, key=lambda rank: float(cost_frac[rank]))
        cost_frac[named] = np.minimum(cost_frac[named], one.cost_frac)
        cost_frac[costliest] = one.cost_frac
        if len(one.culprits) == 1 and one.last_frac is not None:
            last_frac[named] = one.last_frac
    return msgspec.structs.replace(pace, cost_frac=cost_frac, last_frac=last_frac)


def window_text(summary: PaceSummary) -> str:
    """Return the time that the shares cover, as text; one long wait in it is no training."""
    window = f"shares of the last {seconds_text(summary.window_s)}"
    if summary.longest_wait_s >= LONG_WAIT_S:
        return f"{window}, a wait of {seconds_text(summary.longest_wait_s)} included"
    return f"{window} of undisturbed training"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


HABIT_TEXT = {
    Phase.DATA: "loading data",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.OPTIMIZER: "in the optimizer",
    Phase.CHECKPOINT: "saving checkpoints",
    Phase.EVAL: "evaluating",
    Phase.OTHER: "outside the model",
}


def slow_parts(verdict: Verdict, ranks: str) -> list[str]:
    """Return the parts of the sentence about ranks that make every step longer.

    Args:
        verdict: The verdict about them.
        ranks: The ranks and their nodes, as text.
    """
    is_one = len(verdict.culprits) == 1
    slow = "is slow and costs" if is_one else "are slow and cost"
    if verdict.is_in_turns:
        slow = "are slow in turns and cost"
    elif verdict.is_at_times:
        slow = slow.replace("slow", "slow in some steps", 1)
    comes = f"{'it waits' if is_one else 'they wait'} {percent_text(verdict.wait_frac)} of the time"
    # None, or next to nothing: its calls have not been compared with the others' yet.
    if verdict.last_frac is not None and verdict.last_frac >= LEAST_LAST_FRAC and not verdict.is_at_times:
        comes = "it comes" if is_one else "they come"
        comes += f" last to {percent_text(verdict.last_frac)} of the collectives"
    asked = f"slowed {verdict.slow_factor:g}x on request" if verdict.slow_factor > 1 else ""
    place = place_text(verdict.place) if verdict.place else ""
    usual = f", mostly at or below {place}" if verdict.is_usual_place else ""
    last = f"last seen at {place}" if place and not verdict.is_usual_place else ""
    cost = f"about {percent_text(verdict.cost_frac)} of the step time{_trend(verdict)}"
    head = f"{ranks} {slow} the others {cost}"
    # What a narrow screen cuts off is last: how often the others wait for it.
    if because := because_parts(verdict):
        where = usual.removeprefix(", ") or last
        return [f"{head}: {because[0]}", *because[1:], where, asked, _habit(verdict), comes]
    return [f"{head}{usual}", asked, _habit(verdict), nothing_differs_text(verdict), last, comes]


def input_bound_parts(verdict: Verdict) -> list[str]:
    """Return the parts of the sentence about a job whose input limits its speed."""
    place = f"at {place_text(verdict.place)}" if verdict.place else ""
    return [f"the ranks spend {percent_text(verdict.cost_frac)} of their time waiting for input", place]


def _trend(verdict: Verdict) -> str:
    """Return `, up from 12 % 3 min ago`."""
    earlier = verdict.earlier_cost
    if earlier is None or verdict.cost_frac is None:
        return ""
    way = "up" if verdict.cost_frac > earlier.frac else "down"
    return f", {way} from {percent_text(earlier.frac)} {seconds_text(earlier.age_s)} ago"


def _habit(verdict: Verdict) -> str:
    """Return `it spends 55 % of its time in data, the others 3 %`."""
    habit = verdict.habit
    if habit is None or habit.phase not in HABIT_TEXT:
        return ""
    spends, its = ("it spends", "its") if len(verdict.culprits) == 1 else ("they spend", "their")
    own, others = percent_text(habit.frac), percent_text(habit.others_frac)
    return f"{spends} {own} of {its} time {HABIT_TEXT[habit.phase]}, the others {others}"
