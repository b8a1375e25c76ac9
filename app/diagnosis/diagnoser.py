"""The diagnosis: what the ranks wait for, which ranks hold them up, why, since when.

`Diagnoser.observe` reads the whole model each time. Between two calls it keeps only what a snapshot cannot hold: how
long each rank has been away, the sliding window of wait fractions, and verdicts that outlive their evidence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agent.wire.jobs import JobState
from agent.wire.reports import ExitReport
from app.diagnosis import contradictions, standstill, verdicts
from app.diagnosis.aborts import aborted
from app.diagnosis.because.watch import CauseWatch
from app.diagnosis.causes import CAUSE_ORDER, IMMOBILE, Cause, RankState, Severity
from app.diagnosis.exits import (
    NO_EXITS,
    ExitContext,
    LastLooks,
    ended_by_gloo,
    ended_unseen,
    has_moved_on,
    is_part_of,
    is_root_of_a_hang,
    lasts_s,
    sort_out,
    with_end,
)
from app.diagnosis.joining import not_at_barrier, not_joined
from app.diagnosis.known_phases import KnownPhases, RankPlaces
from app.diagnosis.point_to_point import find_peer_waits
from app.diagnosis.rank_facts import STATE_CODE, RankFacts, Thresholds, all_nodes, is_in_known_phase, rank_facts
from app.diagnosis.slow_ranks import UsualPlace
from app.diagnosis.verdicts import Evidence, Verdict
from app.diagnosis.wait_fractions import WaitFractions
from app.diagnosis.waits import LATE_S, Wait, find_waits, follow, held_ranks
from app.model.cluster import settling_s
from app.model.farewells import (
    LAUNCHER_END_S,
    are_launchers_over,
    ended_with_launcher,
    ends_of,
    is_leaving,
    that_has_closed,
)
from app.model.job_model import Death, Process

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from app.diagnosis.rank_facts import AllNodes
    from app.diagnosis.rank_pace import RankPace
    from app.model.cluster import Cluster
    from app.model.group_table import GroupTable
    from app.model.job_model import AssignmentSummary, JobModel
    from ddpcore.wire import Place

__all__ = ["Diagnoser", "Diagnosis", "JobDiagnosis", "Thresholds"]

MAX_VERDICTS = 64
"""Limit of verdicts of one job; the worst are kept."""

HOLD_S = {
    Cause.MEMORY_GROWTH: 2.0,
    Cause.STRAGGLER: 1.0,
    Cause.INPUT_BOUND: 1.0,
    Cause.SILENT: 0.5,
    Cause.TRANSPORT: 0.5,
    Cause.MISMATCH: 0.5,
}
"""Seconds a verdict stays without its evidence, so that it does not flicker; plain facts do not need it."""

BUDDING_S = 1.0
"""Seconds after which a wait is remembered: the shortest timeouts are a few seconds."""

GAP_S = 2.0
"""Seconds an end stays named without its evidence: the reports of an end come one after the other."""

STICKY = frozenset({*verdicts.ENDS, Cause.FEWER_CALLS})
"""Causes that stand until the next attempt: they cannot be undone."""


class JobDiagnosis(msgspec.Struct, frozen=True, eq=False):
    """One job at one moment."""

    facts: RankFacts
    states: NDArray[np.int8]
    """Index into `app.diagnosis.rank_facts.STATES`, by rank."""
    wait_frac: NDArray[np.float64]
    """Fraction of the last seconds that each rank spent waiting; NaN when unknown."""
    pace: Callable[[], RankPace]
    """Returns how each rank has spent the last undisturbed seconds."""
    waits: list[Wait]
    verdicts: list[Verdict]
    """Verdicts, the worst first."""
    groups: dict[str, GroupTable] = {}
    """Process groups by name."""
    is_judged: bool = True
    """Whether the ranks have been compared for long enough to name a slow one."""
    stall_s: float = 0.0
    """Seconds from which a wait is a stall."""


class Diagnosis(msgspec.Struct, frozen=True, eq=False):
    """The cluster at one moment."""

    nodes: AllNodes
    jobs: dict[str, JobDiagnosis]

    @property
    def waits(self) -> list[Wait]:
        return [wait for job in self.jobs.values() for wait in job.waits]

    @property
    def verdicts(self) -> list[Verdict]:
        """Verdicts of all jobs, the worst first."""
        return sorted((verdict for job in self.jobs.values() for verdict in job.verdicts), key=_by_weight)

    def validate(self) -> None:
        """Assert the invariants: above all, a waiting rank is not a culprit."""
        for wait in self.waits:
            assert len(wait.waiting) > 0
            assert not np.intersect1d(wait.waiting, wait.missing).size
        for verdict in self.verdicts:
            states = self.jobs[verdict.job].states
            nobody = (Cause.TRANSPORT, Cause.INPUT_BOUND, Cause.STANDSTILL, Cause.MISMATCH)
            assert verdict.culprits or verdict.cause in nobody
            named = [(verdict.group, verdict.culprits)] if not verdict.sides else []
            for group, ranks in (*named, *((side.group, side.ranks) for side in verdict.sides)):
                table = self.jobs[verdict.job].groups.get(group)
                assert table is None or np.isin(ranks, table.members).all(), "the group that is named holds who is"
            assert not set(verdict.culprits) & set(verdict.waiting)
            assert all(0 <= rank < len(states) for rank in (*verdict.culprits, *verdict.waiting))
            assert list(verdict.culprits) == sorted(set(verdict.culprits))


class _Standing(msgspec.Struct):
    """A verdict and when its evidence was seen."""

    verdict: Verdict
    first_s: float
    last_s: float


class Diagnoser:
    """Watches a cluster; call `observe` a few times a second from one thread."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._jobs: dict[tuple[str, int], _JobDiagnoser] = {}

    def change(self, thresholds: Thresholds) -> None:
        """Judge by other thresholds from now on."""
        self.thresholds = thresholds
        for diagnoser in self._jobs.values():
            diagnoser.change(thresholds)

    def observe(self, cluster: Cluster, now_s: float) -> Diagnosis:
        nodes = all_nodes(cluster, self.thresholds, now_s)
        known = self._jobs
        self._jobs = {}
        found: dict[str, JobDiagnosis] = {}
        for job_id, job in cluster.jobs.items():
            key = (job_id, job.attempt)
            diagnoser = known.get(key) or _JobDiagnoser(job, self.thresholds)
            self._jobs[key] = diagnoser
            found[job_id] = diagnoser.observe(job, cluster, nodes, now_s)
        return Diagnosis(nodes, found)


class _JobDiagnoser:
    """Watches one attempt of a job."""

    def __init__(self, job: JobModel, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._fractions = WaitFractions(job.world_size)
        self._known_phases = KnownPhases(job.world_size, thresholds.patience_s)
        self._places = RankPlaces()
        self._excused_s = np.full(job.world_size, -np.inf)
        self._waited_s = np.full(job.world_size, -np.inf)
        """When each rank was last seen waiting: one that was released, or has given up, could not come before."""
        self._is_first = True
        self._standing: dict[tuple[Cause, tuple[int, ...]], _Standing] = {}
        self._exits = NO_EXITS
        self._last_looks = LastLooks()
        self._exits_key: tuple[object, ...] | None = None
        self._exits_at_s = -np.inf
        self._exits_open_until_s = -np.inf
        self._explains_failure = False
        self._joined_s: dict[tuple[str, int], float] = {}
        self._input_place: Place | None = None
        self._usual_place = UsualPlace()
        self._causes = CauseWatch()

        self._over: JobDiagnosis | None = None
        self._over_key: tuple[int, AssignmentSummary] | None = None
        self._over_since_s = np.inf

    def change(self, thresholds: Thresholds) -> None:
        self._thresholds, self._over_key = thresholds, None

    def observe(self, job: JobModel, cluster: Cluster, nodes: AllNodes, now_s: float) -> JobDiagnosis:
        """Judge the job now; one that is over, and of which nothing is news, stays as it was judged last."""
        key = (job.deaths_version, job.together) if job.is_ended() else None
        if key is None or key != self._over_key:
            self._over_key, self._over_since_s, self._over = key, now_s, None
        if self._over is None or now_s - self._over_since_s < settling_s(job, now_s):
            self._over = self._look(job, cluster, nodes, now_s)
        return self._over

    def _look(self, job: JobModel, cluster: Cluster, nodes: AllNodes, now_s: float) -> JobDiagnosis:
        facts = rank_facts(job, cluster, nodes, self._thresholds, now_s)
        self._excuse(facts, now_s)
        waits = find_waits(job, facts, self._thresholds, now_s)
        is_held = held_ranks(job, waits) & facts.is_fresh & ~facts.is_immobile & ~job.is_ending
        waits += find_peer_waits(job, facts, self._thresholds, now_s, waits)
        for wait in waits:
            self._waited_s[wait.waiting] = now_s
        knots = follow(waits, job.world_size, is_held)
        evidence = Evidence(job, cluster, facts, nodes, waits, knots, self._thresholds, now_s)
        if job.deaths or self._exits_key is not None or job.has_raised.any():
            self._sort_out_exits(evidence)
        self._watch_pace(evidence)
        awaited = {
            rank for knot in knots if knot.wait.waited_s > self._thresholds.short_s for rank in knot.ends.tolist()
        }
        self._known_phases.watch(job, awaited)
        self._places.watch(job, awaited, now_s)
        self._put(self._judge(evidence), evidence)
        current = sorted((standing.verdict for standing in self._standing.values()), key=_by_weight)[:MAX_VERDICTS]
        current = self._causes.observe(current, evidence, self._fractions)
        if self._exits.first_bad_s is None and self._last_looks.is_due(now_s):
            is_named = any(is_root_of_a_hang(verdict) for verdict in current)
            self._last_looks.put(current, [] if is_named else self._budding(evidence), now_s)
        slow = [rank for one in current if one.cause is Cause.STRAGGLER and one.cost_frac for rank in one.culprits]
        states, window, stall_s = _states(facts, waits, job, slow), self._fractions, self._thresholds.stall_s
        return JobDiagnosis(
            facts, states, window.recent_frac, window.pace, waits, current, job.groups, window.is_judged, stall_s
        )

    def _excuse(self, facts: RankFacts, now_s: float) -> None:
        """Note ranks that cannot come now, or had not reported at first: they are no stragglers for a while."""
        is_away = ~(facts.is_fresh | facts.is_starting) | facts.is_frozen | facts.is_silent
        if self._is_first:
            is_away |= ~facts.is_fresh
            self._is_first = False
        self._excused_s[is_away] = now_s

    def _sort_out_exits(self, evidence: Evidence) -> None:
        job, now_s = evidence.job, evidence.now_s
        # The rank that died first may be on a node that has not reported it yet.
        deadline_s = (self._exits.first_bad_s or -np.inf) + self._thresholds.grace_s
        is_node_late = any(assignment.received_s < deadline_s for assignment in job.assignments.values())
        is_node_late |= bool(evidence.nodes.is_late.any()) or bool(job.is_elsewhere.any())
        launcher_ended = ended_with_launcher(job, now_s, self._thresholds.grace_s)
        has_other_cause = is_node_late or self._explains_failure or bool(launcher_ended)
        is_long_ago = now_s - (self._exits.first_bad_s or now_s) > LAUNCHER_END_S
        is_over = are_launchers_over(job)
        farewells = frozenset(np.flatnonzero(job.is_ending).tolist())
        changing = (has_other_cause, is_over, is_long_ago)
        key = (job.deaths_version, job.stop_began_s, changing, launcher_ended, farewells)
        if key != self._exits_key or self._exits_at_s < self._exits_open_until_s:
            called_less = contradictions.called_less(evidence)
            leaving = called_less.intersection(np.flatnonzero(is_leaving(job)).tolist())
            ends = ends_of(job)
            context = ExitContext(
                job.stop_began_s,
                has_other_cause,
                called_less,
                now_s,
                job.world_size,
                farewells,
                self._last_looks.victims(job),
                launcher_ended,
                is_over,
                tuple(Death(rank, float(job.report_at_s[rank]), ExitReport()) for rank in sorted(leaving)),
                {rank: int(job.node_of[rank]) for rank in ends},
                that_has_closed(job),
                ended_unseen(job),
            )
            self._exits = sort_out(ends, context, self._thresholds)
            latest_s = max((death.at_s for death in ends.values()), default=now_s)
            self._exits_key, self._exits_at_s = key, now_s
            self._exits_open_until_s = latest_s + self._thresholds.grace_s + self._thresholds.instant_s

    def _watch_pace(self, evidence: Evidence) -> None:
        job, facts, now_s = evidence.job, evidence.facts, evidence.now_s
        hindered = is_in_known_phase(job, facts) | facts.is_starting | facts.is_immobile
        hindered |= now_s - self._excused_s < self._thresholds.silent_s
        longest_s = max((wait.waited_s for wait in evidence.waits), default=0.0)
        crowding = float(evidence.cluster.crowding.max(initial=1.0))
        self._fractions.sample(job, longest_s, now_s, is_clean=not bool(hindered.any()), crowding=crowding)

    def _judge(self, evidence: Evidence) -> list[Verdict]:
        job, exits = evidence.job, self._exits
        # gloo ends a rank that was sent more than it expects, by another one that is not among the first dead.
        stood = [standing.verdict for standing in self._standing.values()]
        is_explained = any(verdict.cause is Cause.MISMATCH and not verdict.aborted for verdict in stood)
        found = [] if is_explained else aborted(evidence, exits.culprits, exits.lost_connection)
        own = [death for death in exits.culprits if not ended_by_gloo(death)]
        found += verdicts.exited(evidence, own, exits.lost_connection)
        found += contradictions.fewer_calls(evidence, exits.early_leavers, exits.lost_connection)
        lost = [] if exits.culprits else exits.lost_connection
        if job.is_ended() or job.stop_began_s < evidence.now_s:
            return found + (standstill.node_lost(evidence, lost) if job.is_ended() else [])
        found += standstill.node_lost(evidence, lost)
        found += standstill.frozen(evidence)
        found += contradictions.mismatches(evidence)
        found += standstill.silent(evidence)
        found += not_joined(evidence)
        found += standstill.not_exiting(evidence)
        if exits.first_bad_s is None and all(one.cause in IMMOBILE and not is_root_of_a_hang(one) for one in found):
            lasting = self._lasting(evidence)
            late = verdicts.stalled(
                evidence, np.maximum(self._excused_s, self._waited_s), self._known_phases, self._places
            )
            late = late or standstill.transport(evidence, lasting)
            late = late or standstill.gpus_at_work(evidence, self._known_phases)
            late = late or standstill.standstill(evidence, self._known_phases)
            found += late or self._slow(evidence)
        return found + verdicts.memory_growth(evidence)

    def _budding(self, evidence: Evidence) -> list[Verdict]:
        """Return the verdicts that a shorter stall threshold would give now: a timeout may be shorter, too."""
        thresholds = msgspec.structs.replace(self._thresholds, stall_s=BUDDING_S, join_s=BUDDING_S)
        if evidence.job.is_ended() or evidence.job.stop_began_s < evidence.now_s:
            return []
        longest_s = max((wait.waited_s for wait in evidence.waits), default=0.0)
        soon = msgspec.structs.replace(evidence, thresholds=thresholds)
        if longest_s <= BUDDING_S:
            return not_joined(soon)
        late = verdicts.stalled(soon, np.maximum(self._excused_s, self._waited_s), self._known_phases, self._places)
        lasting = [wait for wait in standstill.complete_waits(soon) if (wait.group, wait.seq) in self._joined_s]
        return late or standstill.transport(soon, lasting)

    def _lasting(self, evidence: Evidence) -> list[Wait]:
        """Return the waits that every member has joined for a while.

        A late rank's report may show it in the call before the others' reports show that they have left it.
        """
        before, self._joined_s = self._joined_s, {}
        waits = standstill.complete_waits(evidence)
        for wait in waits:
            key = (wait.group, wait.seq)
            self._joined_s[key] = before.get(key, evidence.now_s)
        long_s = self._thresholds.deadlock_s
        return [wait for wait in waits if evidence.now_s - self._joined_s[wait.group, wait.seq] >= long_s]

    def _slow(self, evidence: Evidence) -> list[Verdict]:
        is_over = bool(evidence.facts.is_dead.any())
        if is_over or not self._fractions.is_fresh(evidence.now_s):
            return []
        laggards = self._fractions.laggards
        if laggards is None:
            frac = self._fractions.input_frac
            if frac is None:
                return []
            # At the moment of a report all may be doing something else; where they load does not change.
            self._input_place = verdicts.input_place(evidence) or self._input_place
            return [verdicts.input_bound(evidence, frac, self._input_place)]
        if evidence.job.has_peer_calls[list(laggards.ranks)].any():
            # The last stage of a pipeline comes last to what all call, since it waits for the stages before it.
            return []
        blamed = verdicts.name(
            evidence,
            Cause.STRAGGLER,
            laggards.ranks,
            severity=Severity.WARNING,
            waiting=tuple(np.setdiff1d(np.arange(evidence.job.world_size), laggards.ranks).tolist()),
            cost_frac=laggards.cost_frac,
            wait_frac=laggards.wait_frac,
            last_frac=laggards.last_frac,
            is_in_turns=laggards.is_in_turns,
            is_at_times=laggards.is_at_times,
            habit=self._fractions.habit,
            earlier_cost=self._fractions.trend.earlier(evidence.now_s),
        )
        usual = self._usual_place.observe(evidence.job, laggards.ranks, self._fractions.habit)
        return [blamed if usual is None else msgspec.structs.replace(blamed, place=usual, is_usual_place=True)]

    def _put(self, found: list[Verdict], evidence: Evidence) -> None:
        """Merge the verdicts found now with those that stood before."""
        job, now_s = evidence.job, evidence.now_s
        has_ended_badly = self._exits.first_bad_s is not None
        is_failed = job.state() in {JobState.FAILED, JobState.RESTARTING, JobState.LOST}
        # A failed job is stopped too, on the nodes where it still runs.
        is_stopping = job.stop_began_s < now_s and not has_ended_badly
        stood = [standing.verdict for standing in self._standing.values()]
        found = [verdict for verdict in found if not any(is_part_of(verdict, one) for one in stood)]
        has_event = any(verdict.cause in STICKY for verdict in found)
        roots = [] if has_event else self._last_looks.before(self._exits, job, self._thresholds)
        if not roots and not has_event:
            after = self._exits.aftermath
            roots = not_at_barrier(evidence, after) or contradictions.missing_at_time_out(evidence, after)
        found = [verdict for verdict in found if not self._is_cut_short(verdict, evidence)]
        if roots:
            found = roots + [verdict for verdict in found if verdict.cause is Cause.NODE_LOST]
        before, self._standing = self._standing, {}
        for verdict in found:
            key = (verdict.cause, verdict.culprits)
            known = before.pop(key, None)
            first_s = now_s if known is None else known.first_s
            kept = verdict if known is None else _with_memory(verdict, known.verdict, job)
            self._standing.setdefault(key, _Standing(kept, first_s, now_s))
        blamed = {rank for verdict in found for rank in verdict.culprits}
        ended = {rank for verdict in found if verdict.cause in STICKY for rank in verdict.culprits}
        for key, standing in before.items():
            verdict = standing.verdict
            if verdict.aborted and any(one.aborted for one in found):
                continue  # more reports have added to the same abort
            hold_s = max(HOLD_S.get(verdict.cause, 0.0), lasts_s(job, evidence.facts.is_immobile, verdict))
            is_held = now_s - standing.last_s < hold_s and not blamed & set(verdict.culprits)
            is_lasting = job.deaths.keys() >= set(verdict.culprits) or not has_moved_on(job, verdict)
            is_sticky = verdict.cause is Cause.FEWER_CALLS and is_lasting and not ended.issuperset(verdict.culprits)
            has_died = verdict.cause is Cause.FROZEN and any(rank in job.deaths for rank in verdict.culprits)
            is_past = verdict.cause in verdicts.ENDS or has_died or (verdict.cause is Cause.NODE_LOST and bool(found))
            # Between a launcher's report and a rank's, neither shows for a moment that an end was its own.
            is_gap = verdict.cause in verdicts.ENDS and not has_event and now_s - standing.last_s < GAP_S
            is_why = has_ended_badly and verdict.severity is Severity.CRITICAL and not (has_event or roots or is_past)
            if (
                is_sticky
                or is_gap
                or (not is_stopping and (is_why or (is_held and not is_failed and not job.is_ended())))
            ):
                self._standing[key] = standing
                if is_sticky:
                    standing.verdict = with_end(verdict, job)
        for standing in self._standing.values():
            standing.verdict = standstill.with_return(standing.verdict, evidence)
        self._explains_failure = any(
            standing.verdict.cause not in verdicts.ENDS and standing.verdict.severity is Severity.CRITICAL
            for standing in self._standing.values()
        )

    def _is_cut_short(self, verdict: Verdict, evidence: Evidence) -> bool:
        """Return whether all seem to be in a call only since a rank timed out and left it: one has not come."""
        if verdict.cause is not Cause.TRANSPORT or verdict.seq is None:
            return False
        stood = (standing.verdict for standing in self._standing.values())
        same = [one for one in stood if (one.group, one.seq) == (verdict.group, verdict.seq) and one.culprits]
        return any(lasts_s(evidence.job, evidence.facts.is_immobile, one) > 0.0 for one in same)


def _with_memory(verdict: Verdict, before: Verdict, job: JobModel) -> Verdict:
    """Return a verdict on an event, with what was known of it when more could be seen; any other as it is.

    An event is also that ranks end since they timed out, which had waited for a frozen one.
    """
    is_left = verdict.cause is Cause.FROZEN and bool(job.has_raised[list(before.waiting)].any())
    if verdict.cause not in STICKY and not is_left:
        return verdict
    if verdict.seq is None and before.seq is not None:
        call = {name: getattr(before, name) for name in ("group", "seq", "called_seq", "op", "label", "waited_s")}
        verdict = msgspec.structs.replace(verdict, **call)
    waiting = tuple(sorted({*verdict.waiting, *before.waiting} - set(verdict.culprits)))
    return msgspec.structs.replace(
        verdict, waiting=waiting, waiting_place=verdict.waiting_place or before.waiting_place
    )


def _by_weight(verdict: Verdict) -> tuple[int, int, float, tuple[int, ...]]:
    order = (Severity.CRITICAL, Severity.WARNING, Severity.QUIET, Severity.OK)
    return (order.index(verdict.severity), CAUSE_ORDER[verdict.cause], -verdict.waited_s, verdict.culprits)


def _states(facts: RankFacts, waits: list[Wait], job: JobModel, slow: list[int]) -> NDArray[np.int8]:
    states = np.full(job.world_size, STATE_CODE[RankState.RUNNING], np.int8)
    states[slow] = STATE_CODE[RankState.SLOW]
    for wait in waits:
        if wait.waited_s >= LATE_S:
            states[wait.missing] = STATE_CODE[RankState.MISSING]
    for wait in waits:
        states[wait.waiting] = STATE_CODE[RankState.WAITING]
    states[facts.is_starting] = STATE_CODE[RankState.STARTING]
    states[facts.is_silent] = STATE_CODE[RankState.SILENT]
    states[facts.is_frozen] = STATE_CODE[RankState.FROZEN]
    states[facts.is_lost] = STATE_CODE[RankState.LOST]
    if over := job.together.over_nodes:
        states[np.isin(job.node_of, over) & (job.process != Process.UNSEEN)] = STATE_CODE[RankState.LOST]
    if job.is_ended():
        states[(job.process == Process.UNSEEN) & ~facts.is_lost] = STATE_CODE[RankState.ENDED]
    if job.is_ended() and job.num_nodes > len(job.assignments):
        states[job.node_of < 0] = STATE_CODE[RankState.LOST]
    was_stopped = (job.died_badly | job.died_somehow) & (job.died_at_s >= job.stop_began_s)
    states[facts.is_dead] = STATE_CODE[RankState.DONE]
    states[facts.is_dead & job.died_somehow] = STATE_CODE[RankState.ENDED]
    states[facts.is_dead & was_stopped] = STATE_CODE[RankState.STOPPED]
    states[facts.is_dead & job.died_badly & ~was_stopped] = STATE_CODE[RankState.EXITED]
    return states
