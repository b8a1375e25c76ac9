"""Which death came first by its own cause, and which were its consequence.

When a rank dies its peers lose their connections and raise, and the launchers end the rest by SIGTERM, later by
SIGKILL. torchrun blames the first non-zero exit that it notices; a rank that left with code 0 is never among those.

A hang ends in deaths too: a timeout of the process group, an abort by NCCL's watchdog, a signal to the launcher. Then
no death has a cause of its own, and what stood just before the first of them (`LastLooks`) is the cause of all.
"""

from __future__ import annotations

import re
import signal
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from app.diagnosis.causes import IMMOBILE, Cause, Severity
from app.diagnosis.verdicts import Aftermath
from app.model.farewells import (
    LAUNCHER_END_S,
    REQUEST_SIGNALS,
    is_clean,
    is_of_another,
    names_lost_peer,
    names_time_out,
)
from app.model.job_model import PHASE_CODE
from app.model.xids import is_gpu_at_fault
from ddpcore.wire import BARRIER_GROUP, FIRST_GROUP, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from app.diagnosis.rank_facts import Flags, Thresholds
    from app.diagnosis.verdicts import Verdict
    from app.model.group_table import GroupTable
    from app.model.job_model import Death, JobModel

ASKED_SIGNALS = frozenset({int(signal.SIGTERM), int(signal.SIGINT)})
"""Signals that ask a launcher to end, which passes them on."""
_TIMEOUT = re.compile(r"(?:waiting|after|ran for|barrier in) (\d{1,10}) ?(ms|milliseconds|seconds)\b", re.IGNORECASE)
OVERFLOW = "op.preamble.length <= op.nbytes"
"""gloo's message when more data came than a rank expects, which ends its process.

Source: gloo/transport/tcp/pair.cc of torch 2.13, in the what() of an uncaught gloo::EnforceNotMet.
"""

ROOTS_OF_A_HANG = frozenset(
    {
        Cause.STRAGGLER,
        Cause.FROZEN,
        Cause.SILENT,
        Cause.NODE_LOST,
        Cause.NOT_JOINED,
        Cause.MISMATCH,
        Cause.TRANSPORT,
        Cause.CHECKPOINTING,
        Cause.EVALUATING,
        Cause.STANDSTILL,
        Cause.NOT_EXITING,
    }
)
"""Causes that keep ranks waiting until they time out, or until the job is ended."""
UNSEEN_S = 3.0
"""Seconds without a report before a death that was reported late, as by the next agent of its node."""
FOUND_DEAD_S = 1.0
"""Longest time for which an agent that begins may take a rank that has ended for alive."""
VICTIM_S = 2.0
"""Seconds; a rank that has waited longer, and ends without an error, ends because of its wait."""
LOOK_S = 0.5
"""Seconds between two samples that are kept."""
MAX_LOOKS = 16
"""Limit of samples kept, of those at which a rank waited for long."""
MEMORY_S = 20.0
"""Seconds that a busy machine may take from an exception to the end of the process, and to its report."""
RECENT_S = 1.5
"""Seconds before a death in which a verdict that no rank waits for must have stood to be its cause."""
TEARDOWN_S = 4.0
"""Seconds that a process may take to end after an exception."""
PEER_OPS = frozenset({"send", "recv"})
"""Calls between two ranks, which groups do not count."""
TIMEOUT_SLACK_S = 1.5
"""Longest delay in seconds before a wait is noticed."""


class Exits(msgspec.Struct, frozen=True):
    """The deaths of a job by cause and consequence."""

    culprits: list[Death]
    """Deaths that came first by their own cause."""
    lost_connection: list[int]
    """Ranks that ended because they lost a connection."""
    early_leavers: list[Death]
    """Ranks that left with code 0 about when one lost its connection, when no other cause is known."""
    first_bad_s: float | None
    """When the first rank ended badly; None when none did."""
    aftermath: Aftermath | None = None
    """How a hang ended, when no death has a cause of its own."""


NO_EXITS = Exits([], [], [], None)


class _Look(NamedTuple):
    at_s: float
    standing: tuple[Verdict, ...]
    budding: tuple[Verdict, ...]


class LastLooks:
    """Verdicts that stood, and those about to, at the last samples before a rank ended badly."""

    def __init__(self) -> None:
        self._looks: deque[_Look] = deque(maxlen=MAX_LOOKS)
        self._latest_s = float("-inf")

    def is_due(self, now_s: float) -> bool:
        """Return whether a sample is to be kept now."""
        return not 0.0 <= now_s - self._latest_s < LOOK_S

    def put(self, standing: Sequence[Verdict], budding: Sequence[Verdict], now_s: float) -> None:
        """Keep the current verdicts, and those that a shorter stall threshold would give."""
        hanging = tuple(verdict for verdict in standing if is_root_of_a_hang(verdict))
        self._latest_s = now_s
        if hanging or budding:
            self._looks.append(_Look(now_s, hanging, tuple(budding)))

    def victims(self, job: JobModel) -> frozenset[int]:
        """Return the ranks that waited at the last samples, and have not moved on since."""
        lasting = [v for v in self._standing(job, float("inf")) if v.severity is Severity.CRITICAL]
        lasting += [verdict for verdict in self._budding(job, float("inf")) if verdict.waited_s >= VICTIM_S]
        return frozenset(rank for verdict in lasting for rank in (*verdict.waiting, *_came_since(job, verdict)))

    def before(self, exits: Exits, job: JobModel, thresholds: Thresholds) -> list[Verdict]:
        """Return the verdicts that caused the deaths; none when a death has a cause of its own."""
        after = exits.aftermath
        if exits.first_bad_s is None or after is None:
            return []
        until_s = exits.first_bad_s + thresholds.instant_s
        found = [v for v in self._standing(job, until_s) if after.is_timeout or v.severity is Severity.CRITICAL]
        if not found and after.is_timeout:
            least_s = (after.timeout_s or 0.0) - TIMEOUT_SLACK_S
            found = [verdict for verdict in self._budding(job, until_s) if verdict.waited_s >= least_s]
        return [msgspec.structs.replace(v, severity=Severity.CRITICAL, aftermath=after) for v in found]

    def _standing(self, job: JobModel, until_s: float) -> list[Verdict]:
        """Return the verdicts that stood last, each as it was when its wait was last seen."""
        looks = self._until(until_s)
        for look in looks:
            age_s = min(until_s, self._latest_s) - look.at_s
            last = [v for v in look.standing if _lasted(job, v, age_s) and not _has_stepped(job, v, look.at_s)]
            if last:
                return [_with_wait(verdict, looks, job) for verdict in last]
        return []

    def _budding(self, job: JobModel, until_s: float) -> list[Verdict]:
        for look in self._until(until_s):
            found = [verdict for verdict in look.budding if not has_moved_on(job, verdict)]
            if lasting := [verdict for verdict in found if not _has_stepped(job, verdict, look.at_s)]:
                return lasting
        return []

    def _until(self, until_s: float) -> list[_Look]:
        """Return the samples up to a moment, the latest first, that are not too old for it."""
        latest_s = min(until_s, self._latest_s)
        return [look for look in reversed(self._looks) if latest_s - MEMORY_S <= look.at_s <= until_s]


def _lasted(job: JobModel, verdict: Verdict, age_s: float) -> bool:
    """Return whether a verdict that stood some time ago may still hold."""
    if verdict.seq is None:
        return age_s <= RECENT_S
    is_of_peers = verdict.op in PEER_OPS or any(side.peer_call is not None for side in verdict.sides)
    return age_s <= TEARDOWN_S if is_of_peers else not has_moved_on(job, verdict)


def _has_stepped(job: JobModel, verdict: Verdict, since_s: float) -> bool:
    """Return whether a rank that waited, in what no group counts, has made a step since: its wait has ended."""
    is_store_barrier = verdict.group == BARRIER_GROUP or verdict.group.startswith(FIRST_GROUP)
    is_uncounted = is_store_barrier or verdict.seq is None
    return is_uncounted and bool((job.stepped_at_s[list(verdict.waiting)] > since_s).any())


def _with_wait(verdict: Verdict, looks: Sequence[_Look], job: JobModel) -> Verdict:
    """Return a verdict as it was while ranks waited: one that times out waits no more, and takes seconds to end."""
    if verdict.seq is not None:
        return verdict
    key = (verdict.cause, verdict.culprits)
    fuller = [v for look in looks for v in look.standing if (v.cause, v.culprits) == key and v.seq is not None]
    return next((v for v in fuller if not has_moved_on(job, v)), verdict)


def has_moved_on(job: JobModel, verdict: Verdict) -> bool:
    """Return whether a rank that waited has called more in that group since: then its wait has ended."""
    table = job.groups.get(verdict.group)
    if verdict.called_seq is None or table is None:
        return bool(job.groups) and verdict.cause is Cause.NOT_JOINED
    own = [
        rank for side in verdict.sides if (side.group, side.seq) == (verdict.group, verdict.seq) for rank in side.ranks
    ]
    has_waited = np.isin(table.members, own or verdict.waiting or verdict.culprits)
    return bool((table.enqueued[has_waited] > verdict.called_seq).any())


def lasts_s(job: JobModel, is_immobile: Flags, verdict: Verdict) -> float:
    """Return how long a verdict outlives its evidence: a timeout takes a rank out of a call that cannot be over.

    Its process takes seconds to end, and no rank waits during that time.
    """
    culprits = list(verdict.culprits)
    if verdict.cause is Cause.NOT_JOINED:
        is_absent = not job.groups and bool((job.phase[culprits] == PHASE_CODE[Phase.STARTING]).all())
        return MEMORY_S if is_absent else 0.0
    table = job.groups.get(verdict.group)
    has_recovered = verdict.cause in IMMOBILE and not is_immobile[culprits].all()
    if verdict.cause is Cause.STRAGGLER and verdict.seq is None and job.has_raised[list(verdict.waiting)].any():
        return MEMORY_S
    if verdict.cause is Cause.MISMATCH and verdict.op in PEER_OPS and _do_sides_stand(job, verdict):
        return TEARDOWN_S
    if table is None or verdict.called_seq is None or not is_root_of_a_hang(verdict) or has_recovered:
        return 0.0
    if verdict.op in PEER_OPS or has_moved_on(job, verdict):
        return 0.0
    if verdict.cause is Cause.MISMATCH:
        return TEARDOWN_S
    return MEMORY_S if _is_absent(table, verdict) else 0.0


def _do_sides_stand(job: JobModel, verdict: Verdict) -> bool:
    """Return whether there are sides in collectives, which have called nothing since."""
    sides = [(job.groups.get(side.group), side) for side in verdict.sides if side.peer_call is None]
    return bool(sides) and all(
        table is not None and bool((table.enqueued[np.isin(table.members, side.ranks)] <= side.seq).all())
        for table, side in sides
    )


def _is_absent(table: GroupTable, verdict: Verdict) -> bool:
    """Return whether the culprits, or those that stand elsewhere, have not made the call in which others waited."""
    absent = verdict.culprits or [rank for side in verdict.sides for rank in side.ranks]
    calls = table.enqueued[np.isin(table.members, absent)]
    return verdict.seq is not None and len(calls) > 0 and bool((calls < verdict.seq).all())


def _came_since(job: JobModel, verdict: Verdict) -> list[int]:
    """Return the ranks that are in a call which the culprits have not made, also those that came to it late."""
    table = job.groups.get(verdict.group)
    if table is None or verdict.op in PEER_OPS or not _is_absent(table, verdict):
        return []
    came: list[int] = table.members[table.enqueued == verdict.seq].tolist()
    return came


def is_root_of_a_hang(verdict: Verdict) -> bool:
    """Return whether a verdict explains why ranks wait without end, not only why they are slow."""
    is_beside = verdict.cause in IMMOBILE and verdict.severity is Severity.WARNING
    return verdict.cause in ROOTS_OF_A_HANG and verdict.cost_frac is None and not is_beside


def ended_unseen(job: JobModel) -> dict[int, float]:
    """Return when each rank last reported of those whose end was found by an agent that had not seen them alive."""
    known_s, reported_s = job.received_s - job.seen_s, np.nan_to_num(job.report_at_s, nan=-np.inf)
    found = [rank for rank, death in job.deaths.items() if known_s[rank] > death.at_s - FOUND_DEAD_S]
    return {rank: float(reported_s[rank]) for rank in found}


def ended_by_gloo(death: Death) -> bool:
    """Return whether gloo ended a rank, since another one passed more to a call than it did."""
    return death.exit.signal == signal.SIGABRT and OVERFLOW in death.exit.error


def has_left(death: Death, farewells: frozenset[int]) -> bool:
    """Return whether a rank ended in good order, or was about to when its launcher ended it."""
    return is_clean(death) or (_was_ending(death, farewells) and not death.exit.error)


def has_failed(death: Death, farewells: frozenset[int]) -> bool:
    """Return whether a rank was ending by an exception of its own when its launcher ended it.

    Peers that noticed may have ended before it, and the launcher acts on the first end.
    """
    return _was_ending(death, farewells) and bool(death.exit.error) and not has_lost_peer(death)


def _was_ending(death: Death, farewells: frozenset[int]) -> bool:
    return death.rank in farewells and death.exit.signal == signal.SIGTERM


def is_unknown(death: Death) -> bool:
    """Return whether it is unknown how a rank ended; for one that is about to end, its exception is known."""
    return death.exit.signal is None and death.exit.code is None and not death.exit.error


def has_lost_peer(death: Death) -> bool:
    """Return whether a rank's error reports the loss of another, or another's problem."""
    return not is_clean(death) and is_of_another(death.rank, death.exit.error_text)


def is_on_request(death: Death, stop_began_s: float, thresholds: Thresholds) -> bool:
    """Return whether a rank ended because its job was asked to."""
    margin_s = thresholds.short_s if death.exit.signal in REQUEST_SIGNALS else 0.0
    return death.at_s >= stop_began_s - margin_s


class ExitContext(msgspec.Struct, frozen=True):
    """Facts beside the deaths.

    Attributes:
        stop_began_s: When the stop of the job began; infinity before.
        has_other_cause: Something else explains lost connections: a lost node, or a verdict that stood before.
        called_less: Ranks, of those that left with code 0, known to have called fewer collectives than one that
            ended badly. Counts are sampled: a rank that is not among them may have called less too.
        now_s: Now.
        world_size: Number of the job's ranks.
        farewells: Ranks whose interpreters had begun to end, by their own last report.
        victims: Ranks that waited for the culprits of what stood before the first death.
        with_launcher: Ranks that a signal ended when their launcher was ended from outside.
        is_over: The launchers of all dead ranks have ended.
        leaving: Ranks that are about to end without an exception, and have called less than one that ended badly.
        node_of: Index of each dead rank's node.
        closed: A rank that has closed its connections and keeps running.
        unseen: Ranks whose end was found by an agent that has not seen them alive, with when they last reported.
    """

    stop_began_s: float
    has_other_cause: bool
    called_less: frozenset[int]
    now_s: float
    world_size: int = 0
    farewells: frozenset[int] = frozenset()
    victims: frozenset[int] = frozenset()
    with_launcher: frozenset[int] = frozenset()
    is_over: bool = False
    leaving: tuple[Death, ...] = ()
    node_of: Mapping[int, int] = {}
    closed: Death | None = None
    unseen: Mapping[int, float] = {}


def sort_out(deaths: Mapping[int, Death], context: ExitContext, thresholds: Thresholds) -> Exits:
    """Return the ranks that died first, and their causes.

    A death that looks like a consequence is shown where `grace_s` has brought no cause: the first is the best known.
    """
    now_s = context.now_s
    unrequested = [death for death in deaths.values() if not is_on_request(death, context.stop_began_s, thresholds)]
    known = sorted((d for d in unrequested if not is_clean(d) and not is_unknown(d)), key=_by_time)
    if not known:
        return NO_EXITS
    first_s = known[0].at_s
    bad = sorted(
        known + [d for d in unrequested if is_unknown(d) and d.at_s <= first_s + thresholds.instant_s], key=_by_time
    )
    first_s = bad[0].at_s
    lost_connection = [death.rank for death in bad if names_lost_peer(death.exit.error_text)]
    first = [death for death in bad if death.at_s <= first_s + thresholds.instant_s]
    own = [d for d in first if is_gpu_at_fault(d.exit) or _has_own_cause(d, context, thresholds)]
    # A rank that hangs on a broken GPU may be the last to end: those that wait for it time out.
    own = own or [death for death in bad if is_gpu_at_fault(death.exit)]
    if own := own or [d for d in bad if _was_unseen(d, first_s, context) and _has_own_cause(d, context, thresholds)]:
        noted = {death.rank for death in (*own, *first)}
        own += [d for d in bad if d.rank not in noted and d.is_like(own[0])]
        return Exits(own, lost_connection, [], first_s)
    # A rank that closes its connections dies a little later than those that lose them by it.
    until_s = first[-1].at_s + thresholds.grace_s
    if failed := [death for death in unrequested if has_failed(death, context.farewells) and death.at_s <= until_s]:
        return Exits(sorted(failed, key=_by_time), lost_connection, [], first_s)
    if context.closed is not None:
        return Exits([], lost_connection, [context.closed], first_s)
    # The victim that timed out, and so closed its connections, may take long to end.
    are_victims = context.victims.issuperset(death.rank for death in first)
    after = _aftermath(bad, context, float("inf") if are_victims else until_s)
    leavers = [death for death in unrequested if has_left(death, context.farewells) and death.at_s <= until_s]
    # A rank that waited, and gave up in good order once it timed out, has not left the others.
    leavers = [death for death in (*leavers, *context.leaving) if death.rank not in context.victims]
    # When nearly all have left in good order, the one that lost them has only been the last to end.
    is_end_of_all = len(leavers) > 1 and 0 < context.world_size <= len(leavers) + len(bad)
    if leavers and not is_end_of_all and any(has_lost_peer(death) for death in first):
        surely = [death for death in leavers if death.rank in context.called_less]
        return Exits([], lost_connection, sorted(surely or leavers, key=_by_time), first_s)
    # All by the same request: the launcher, once ended, reports whether it was its own. SIGINT never is.
    by = {death.exit.signal for death in unrequested}
    is_asked = by <= ASKED_SIGNALS and (len(unrequested) > 1 or by == {signal.SIGINT})
    patience_s = LAUNCHER_END_S if (is_asked or are_victims) and not context.is_over else thresholds.grace_s
    # A rank that times out has waited for another: it is no cause, even where the other is unknown. Neither is a victim
    # that lost a connection.
    is_no_cause = after.is_timeout or (are_victims and any(has_lost_peer(death) for death in first))
    is_early = now_s - first_s < patience_s or context.has_other_cause or is_no_cause
    named = first if is_asked and by == {signal.SIGINT} else [_earliest(first, context)]
    return Exits([] if is_early else named, lost_connection, [], first_s, after)


def _was_unseen(death: Death, first_s: float, context: ExitContext) -> bool:
    """Return whether a rank has not been seen from the first death on: it may have ended before that."""
    seen_s = context.unseen.get(death.rank, death.at_s)
    return seen_s <= first_s and death.at_s - seen_s > UNSEEN_S


def _earliest(first: Sequence[Death], context: ExitContext) -> Death:
    """Return the first of deaths that have no order: one that lost another comes behind one that may be that one.

    A signal may come from its launcher, after another rank of its node has failed. A node's own deaths have an order.
    """
    nodes_that_lost: set[int | None] = set()
    for death in sorted(first, key=lambda death: (death.at_s, not has_lost_peer(death))):
        node = context.node_of.get(death.rank)
        if has_lost_peer(death):
            nodes_that_lost.add(node)
        elif node not in nodes_that_lost and death.rank not in context.with_launcher:
            return death
    return first[0]


def _aftermath(bad: Sequence[Death], context: ExitContext, until_s: float) -> Aftermath:
    """Return how deaths came about of which none has a cause of its own."""
    near = [death for death in bad if death.at_s <= until_s]
    if timed_out := [death for death in near if names_time_out(death.exit.error_text)]:
        ranks = tuple(sorted(death.rank for death in timed_out))
        return Aftermath(ranks, is_timeout=True, timeout_s=next(filter(None, map(timeout_of, timed_out)), None))
    if lost := tuple(sorted(death.rank for death in near if has_lost_peer(death))):
        return Aftermath(lost)
    if gave_up := [death for death in near if death.exit.signal is None and death.exit.code]:
        return Aftermath(tuple(sorted(death.rank for death in gave_up)), code=gave_up[0].exit.code)
    number = next((death.exit.signal for death in near if death.exit.signal is not None), None)
    ranks = tuple(sorted(death.rank for death in near))
    return Aftermath(ranks, signal=number, is_with_launcher=context.with_launcher.issuperset(ranks))


def timeout_of(death: Death) -> float | None:
    """Return the timeout in seconds that a rank's error names, None where it names none."""
    found = _TIMEOUT.search(death.exit.error_text)
    return int(found[1]) * (1.0 if found[2].lower() == "seconds" else 0.001) if found else None


def _by_time(death: Death) -> tuple[float, int]:
    return (death.at_s, death.rank)


def _has_own_cause(death: Death, context: ExitContext, thresholds: Thresholds) -> bool:
    """Return whether nothing shows that a death is another's consequence.

    An exit code comes before its error line is read: until then it is unclear. A rank that waits runs no code of its
    own: without an exception, or by an abort that is not of gloo or CUDA, it ends because of its wait.
    """
    end = death.exit
    if has_lost_peer(death) or end.signal in ASKED_SIGNALS or death.rank in context.with_launcher:
        return False
    is_unclear = end.signal is None and not end.error
    is_aborted = end.signal == signal.SIGABRT and not ended_by_gloo(death) and "CUDA error: " not in end.error
    if death.rank in context.victims and (is_unclear or is_aborted):
        return False
    return not is_unclear or context.now_s - death.at_s >= thresholds.grace_s


def is_part_of(verdict: Verdict, before: Verdict) -> bool:
    """Return whether a verdict on ranks that left repeats an earlier one, made when more could be seen.

    So does one on ranks that kept others waiting and are interrupted: until their end is known, they leave by no
    choice.
    """
    if verdict.cause is not Cause.FEWER_CALLS:
        return False
    if before.cause is Cause.MISMATCH:
        # A rank that is done has passed by a call that is known to be the odd one, or in the circle.
        return any((side.group, side.seq) == (verdict.group, verdict.seq) for side in before.sides)
    if before.cause is Cause.STRAGGLER and is_root_of_a_hang(before):
        is_known = verdict.exit is not None and (verdict.exit.code, verdict.exit.signal) != (None, None)
        return not is_known and verdict.culprits == before.culprits
    return before.cause is Cause.FEWER_CALLS and set(verdict.culprits) < set(before.culprits)


def with_end(verdict: Verdict, job: JobModel) -> Verdict:
    """Return a verdict on ranks that were about to end with how the first has ended, once all have."""
    if verdict.exit is None or not job.deaths.keys() >= set(verdict.culprits):
        return verdict
    return msgspec.structs.replace(verdict, exit=job.deaths[verdict.culprits[0]].exit)
