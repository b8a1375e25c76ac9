"""Ranks that do not run, and hangs in which no rank waits for another one.

Ranks of nodes that do not report, frozen and silent ones; collectives that every member has called and that do not
complete, GPUs in work that does not end, jobs that stand outside collectives, and processes that do not end although
their program is done.

A rank that is stopped after it had waited for a stall is not the cause of that stall: somebody looks at it with a
debugger, or its wait holds the interpreter's lock. It gets a warning, and who has not come is named as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from app.diagnosis.causes import Cause, Severity
from app.diagnosis.rank_facts import NOWHERE, is_in_known_phase, unheard_nodes
from app.diagnosis.verdicts import Evidence, Side, Verdict, by_node, hosts_of, name, nodes_of, roots_of
from app.diagnosis.waits import is_common, is_root_unknown
from app.model.job_model import PHASE_CODE
from ddpcore.wire import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from app.diagnosis.known_phases import KnownPhases
    from app.diagnosis.rank_facts import Flags, Ranks
    from app.diagnosis.waits import Wait
    from app.model.cluster import Node

BUSY_CORES = 0.5
"""Cores; a rank that keeps more busy may compute at one line for long."""
BUSY_FACTOR = 6.0
"""Multiple of the stall time that a busy rank has to stand."""
ODD_FRAC = 1 / 3
"""Fraction of all ranks; those that stand elsewhere than most are odd while they are no more than this."""
EXIT_PATIENCE = 0.8
"""Fraction of `stall_s` that a process may take to end. Its probe notices that some seconds after the program's end."""
MAX_PLACES = 8
"""Limit of places shown in one sentence and one row."""
STEPS_APART_S = 3.0
"""Seconds after a rank's last report from which another's step needs the rank: its node may have been cut off later."""


def node_lost(evidence: Evidence, lost_connection: Sequence[int]) -> list[Verdict]:
    """Name nodes that have stopped reporting, with the ranks they run, and the ranks that lost a connection since."""
    verdicts = []
    for some in by_node(evidence, np.flatnonzero(evidence.facts.is_lost)):
        owners = [owner for owner in np.unique(evidence.job.node_of[some]).tolist() if owner != NOWHERE]
        last_received_s = min((evidence.job.assignments[owner].received_s for owner in owners), default=None)
        nodes = [evidence.cluster.nodes[evidence.cluster.node_names[owner]] for owner in owners]
        nodes = nodes or unheard_nodes(evidence.cluster, evidence.nodes)
        reasons = {node.unreachable_reason for node in nodes}
        reason = reasons.pop() if len(reasons) == 1 else None
        known: dict[str, Any] = {"nodes": tuple(node.name for node in nodes), "unreachable_reason": reason}
        known["lost_connection"] = tuple(sorted(lost_connection))
        for_s = None if last_received_s is None else evidence.now_s - last_received_s
        verdict = name(evidence, Cause.NODE_LOST, some.tolist(), for_s=for_s, **known)
        verdicts.append(msgspec.structs.replace(verdict, **_lost_to_whom(evidence, verdict, nodes)))
    return verdicts


def with_return(verdict: Verdict, evidence: Evidence) -> Verdict:
    """Return a verdict, that on lost nodes with whether they report again: it is the reason of a failure then."""
    if verdict.cause is not Cause.NODE_LOST:
        return verdict
    is_up = [bool(evidence.nodes.is_up[evidence.cluster.nodes[node].index]) for node in verdict.nodes]
    return msgspec.structs.replace(verdict, is_back=bool(is_up) and all(is_up))


def _lost_to_whom(evidence: Evidence, verdict: Verdict, nodes: Sequence[Node]) -> dict[str, Any]:
    """Return what follows from the other ranks for those that are not seen, as fields of their verdict.

    Who waits for an unseen rank cannot be followed to it once the others have gone on without reports of it.
    """
    wait = max(evidence.waits, key=lambda wait: wait.waited_s, default=None)
    if wait is not None and wait.waited_s >= evidence.thresholds.stall_s:
        if verdict.waiting or wait.is_settled:
            return {}
        call = {"group": wait.group, "seq": wait.seq, "op": wait.op, "label": wait.label, "waited_s": wait.waited_s}
        return call | {"waiting": tuple(wait.waiting.tolist())}
    if verdict.lost_connection:
        return {}
    others_step = _step_on_without(evidence, np.array(verdict.culprits))
    is_mild = others_step or evidence.job.is_ended() or all(node.has_left for node in nodes)
    return {"severity": Severity.WARNING, "waiting": (), "others_step": others_step} if is_mild else {}


def _step_on_without(evidence: Evidence, unseen: Ranks) -> bool:
    """Return whether every rank that reports has made steps since some were last seen: those make steps too then.

    Where those were never seen, whether all others make steps now.
    """
    job, others = evidence.job, evidence.facts.is_fresh.copy()
    others[unseen] = False
    last_step, last_s = job.step[unseen].max(), np.nanmax(job.report_at_s[unseen], initial=-np.inf)
    if last_step < 0:
        last_s = evidence.now_s - STEPS_APART_S - np.fmax(STEPS_APART_S, job.step_limit_s)
    has_gone_on = (job.stepped_at_s > last_s + STEPS_APART_S) & (job.step > last_step + 1)
    return bool(others.any() and has_gone_on[others].all())


def standstill(evidence: Evidence, known: KnownPhases) -> list[Verdict]:
    """Return the verdict on a job that makes no steps while no rank moves, and at most a few wait for the others.

    Ranks that are left once others have ended may have something to do that takes minutes.
    """
    job, facts, thresholds = evidence.job, evidence.facts, evidence.thresholds
    has_ended = facts.is_dead & ~job.died_badly
    is_left = facts.is_alive
    if not is_left.any() or not (is_left | has_ended).all() or not facts.is_fresh[is_left].all():
        return []
    wait = max(evidence.waits, key=lambda wait: wait.waited_s, default=None)
    standing = _standing(evidence)
    if facts.is_frozen.any() or _is_excused(evidence, known) or len(standing) <= int(is_left.sum()) - len(standing):
        return []
    has_steps = is_left & ~np.isnan(job.stepped_at_s)
    if has_ended.any():
        left_s = evidence.now_s - float(job.died_at_s[has_ended].max())
        age_s, limit_s = min(left_s, _shortest_stand_s(evidence, standing)), thresholds.patience_s
    elif has_steps.any():
        age_s = float(evidence.now_s - job.stepped_at_s[has_steps].max())
        limit_s = max(thresholds.stall_s, float(job.step_limit_s[has_steps].max()))
    elif wait is not None:
        age_s, limit_s = wait.waited_s, thresholds.stall_s
    elif job.groups:
        # A first step that never comes: a data set may be read, or downloaded, for minutes before it.
        age_s, limit_s = _shortest_stand_s(evidence, standing), thresholds.patience_s
    else:
        return []
    if age_s < limit_s or not _all_stand(evidence, standing) or (wait is not None and wait.waited_s < limit_s):
        return []
    return [_standstill(evidence, age_s, has_steps, (standing, wait))]


def _standing(evidence: Evidence) -> Ranks:
    """Return the ranks that wait in no call, where each wait is for some of them; else none.

    The few waits may depend on them: on a lock that one holds, or on a file that it has yet to write.
    """
    waiting = np.concatenate([np.zeros(0, np.int64), *(wait.waiting for wait in evidence.waits)])
    standing: Ranks = np.setdiff1d(np.flatnonzero(evidence.facts.is_alive), waiting)
    can_be_followed = all(wait.is_settled and len(wait.missing) for wait in evidence.waits)
    is_held = bool(evidence.job.has_open_transfers[standing].any()) and bool(evidence.waits)
    return standing if can_be_followed and not is_held else standing[:0]


def _is_excused(evidence: Evidence, known: KnownPhases) -> bool:
    """Return whether some rank is in a phase that takes its time, or the last step has been made."""
    job = evidence.job
    for phase in (Phase.CHECKPOINT, Phase.EVAL):
        is_in = job.phase == PHASE_CODE[phase]
        if is_in.any() and known.is_usual(phase, float(evidence.now_s - job.phase_since_s[is_in].min())):
            return True
    is_left = evidence.facts.is_alive
    if (is_left & (job.is_ending | job.has_exit_wait)).any():
        return True
    if not is_left.all():
        return False
    is_early = is_in_known_phase(job, evidence.facts) & job.is_outside
    first = job.worker(0)
    training = first.report.training if first is not None and first.report is not None else None
    last_step, step = training.last_step if training else None, job.lowest_step()
    is_done = last_step is not None and step is not None and step >= last_step
    return is_done or bool(is_early.any())


def _stood_s(evidence: Evidence) -> Ranks:
    """Return how long each rank has not moved, up to now."""
    job = evidence.job
    stood_s: Ranks = np.where(job.stood_s > 0, job.stood_s + (evidence.now_s - job.report_at_s), 0.0)
    return stood_s


def _shortest_stand_s(evidence: Evidence, standing: Ranks) -> float:
    return float(_stood_s(evidence)[standing].min())


def _all_stand(evidence: Evidence, standing: Ranks) -> bool:
    """Return whether none of some ranks has moved for a while; one that computes may do so at one line."""
    least_s = evidence.thresholds.stall_s / 2
    is_busy: Flags = evidence.job.cpu_cores > BUSY_CORES
    enough_s = np.where(is_busy, BUSY_FACTOR * evidence.thresholds.stall_s, least_s)
    return bool((_stood_s(evidence) >= enough_s)[standing].all())


def _standstill(evidence: Evidence, age_s: float, has_steps: Flags, found: tuple[Ranks, Wait | None]) -> Verdict:
    (standing, wait), job = found, evidence.job
    sides = _places(evidence, standing)
    odd = [rank for side in sides[1:] for rank in side.ranks]
    left = np.flatnonzero(evidence.facts.is_alive)
    is_odd = 0 < len(odd) <= ODD_FRAC * len(left) and wait is None
    culprits = np.array(sorted(odd) if is_odd else [], np.int64)
    is_mild = (
        len(left) < job.world_size or not has_steps.any() or bool((job.phase[standing] == PHASE_CODE[Phase.DATA]).all())
    )
    others = np.setdiff1d(left, culprits)
    first = int(culprits[0]) if len(culprits) else int(standing[0])
    worker = job.worker(first)
    report = None if worker is None else worker.report
    facts: dict[str, Any] = evidence.child_of(first)
    if wait is not None:
        waiting = np.setdiff1d(left, standing).tolist()
        here = wait.waiting.tolist()
        facts |= {"waiting": tuple(waiting), "waiting_here": tuple(here) if len(here) < len(waiting) else ()}
        facts |= {"group": wait.group, "seq": wait.seq, "op": wait.op, "label": wait.label, "waited_s": wait.waited_s}
        facts["called_seq"] = wait.called_seq
    return Verdict(
        cause=Cause.STANDSTILL,
        culprits=tuple(culprits.tolist()),
        nodes=nodes_of(evidence, culprits if len(culprits) else others),
        job=job.job_id,
        attempt=job.attempt,
        severity=Severity.WARNING if is_mild else Severity.CRITICAL,
        for_s=age_s,
        place=evidence.place_of(first),
        phase=None if report is None else report.phase,
        cpu_cores=job.busy_cores(culprits if len(culprits) else standing),
        step=job.lowest_step(),
        sides=tuple(sides[:MAX_PLACES]),
        ended=tuple(np.flatnonzero(evidence.facts.is_dead).tolist()),
        **facts,
    )


def _places(evidence: Evidence, standing: Ranks) -> list[Side]:
    """Return which of some ranks stand at which place, the most common one first."""
    places, counts = np.unique(evidence.job.place[standing], return_counts=True)
    sides = []
    for place in places[np.argsort(-counts, kind="stable")].tolist():
        ranks = standing[evidence.job.place[standing] == place]
        sides.append(Side(tuple(ranks.tolist()), "", 0, "", "", -1, evidence.place_of(int(ranks[0]))))
        if len(sides) > MAX_PLACES:
            break
    return sides


def complete_waits(evidence: Evidence) -> list[Wait]:
    """Return the waits in collectives that every member has called, and none has given up."""
    closed = [knot.wait for knot in evidence.knots if knot.is_closed and not evidence.job.has_raised.any()]
    return [wait for wait in closed if wait.is_settled and len(wait.missing) == 0]


def transport(evidence: Evidence, waits: Iterable[Wait]) -> list[Verdict]:
    """Return verdicts on collectives that every member has called and that do not complete for longer than a stall.

    While any rank is missing and its wait is not known, that may be the reason.
    """
    waiting = np.concatenate([np.zeros(0, np.int64), *(wait.waiting for wait in evidence.waits)])
    if any(not np.isin(wait.missing, waiting).all() for wait in evidence.waits if len(wait.missing)) or any(
        len(knot.roots) for knot in evidence.knots
    ):
        return []
    return [_incomplete(evidence, wait) for wait in waits if wait.waited_s > evidence.thresholds.stall_s]


def _incomplete(evidence: Evidence, wait: Wait) -> Verdict:
    table = evidence.job.groups.get(wait.group)
    return Verdict(
        cause=Cause.TRANSPORT,
        culprits=(),
        waiting=tuple(wait.waiting.tolist()),
        nodes=nodes_of(evidence, wait.waiting),
        job=wait.job,
        attempt=wait.attempt,
        group=wait.group,
        seq=wait.seq,
        called_seq=wait.called_seq,
        op=wait.op,
        label=wait.label,
        waited_s=wait.waited_s,
        place=evidence.place_of(int(wait.waiting[0])),
        num_hosts=len(hosts_of(evidence, wait.waiting)) if is_common(evidence.job, wait) else 0,
        num_members=0 if table is None else len(table.members),
        away=_away_in(evidence, wait),
        is_root_unknown=is_root_unknown(evidence.job, wait),
    )


def _away_in(evidence: Evidence, wait: Wait) -> tuple[str, float, float] | None:
    """Return the node that came back last of those that did not report during a wait, as a verdict has it.

    Where none reported, only this console was cut off.
    """
    cluster, since_s = evidence.cluster, evidence.now_s - wait.waited_s
    nodes = np.unique(evidence.job.node_of[wait.waiting])
    nodes = nodes[nodes >= 0]
    back = nodes[(cluster.away_s[nodes] > evidence.thresholds.lost_s) & (cluster.back_s[nodes] > since_s)]
    if not 0 < len(back) < len(nodes):
        return None
    node = int(back[cluster.back_s[back].argmax()])
    return cluster.node_names[node], float(cluster.away_s[node]), evidence.now_s - float(cluster.back_s[node])


def gpus_at_work(evidence: Evidence, known: KnownPhases) -> list[Verdict]:
    """Return the verdict on a job none of whose GPUs comes to its next call for longer than steps take."""
    job, facts = evidence.job, evidence.facts
    left = np.flatnonzero(facts.is_alive)
    if not len(left) or evidence.waits or not facts.is_fresh[left].all() or _is_excused(evidence, known):
        return []
    for table in job.groups.values():
        slots, is_member = table.slots(left)
        is_current = table.stamp[slots] == job.stamp[left]
        if not (is_member & is_current & table.is_waiting[slots] & table.is_behind_work[slots]).all():
            continue
        for_s = evidence.now_s - float(table.wait_since_s[slots].max())
        if for_s < max(evidence.thresholds.stall_s, float(np.nanmax(job.step_limit_s[left], initial=0.0))):
            continue
        first = int(slots[0])
        op, label = job.calls[table.code[first]]
        is_one = len(left) == 1
        found = name(evidence, Cause.STANDSTILL, left.tolist(), for_s=for_s, step=job.lowest_step())
        call = {"group": table.name, "seq": int(table.completed[first]) + 1, "op": op, "label": label}
        culprits = found.culprits if is_one else ()
        return [msgspec.structs.replace(found, culprits=culprits, is_behind_work=True, **call)]
    return []


def not_exiting(evidence: Evidence) -> list[Verdict]:
    """Name ranks whose program is done and whose process is kept from ending."""
    job = evidence.job
    is_late = job.has_exit_wait & evidence.facts.is_fresh
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in np.flatnonzero(is_late).tolist():
        worker = job.worker(rank)
        wait = worker.report.exit_wait if worker is not None and worker.report is not None else None
        if wait is not None and wait.waiting_s >= EXIT_PATIENCE * evidence.thresholds.stall_s:
            alike.setdefault((wait.what, wait.name), []).append(rank)
    return [_not_exiting(evidence, ranks) for ranks in alike.values()]


def _not_exiting(evidence: Evidence, ranks: list[int]) -> Verdict:
    worker = evidence.job.worker(ranks[0])
    assert worker is not None
    assert worker.report is not None
    wait = worker.report.exit_wait
    assert wait is not None
    return name(evidence, Cause.NOT_EXITING, ranks, exit_wait=wait, for_s=wait.waiting_s, place=wait.place)


def frozen(evidence: Evidence) -> list[Verdict]:
    """Name ranks whose process is stopped: immediately, whether others wait for them or not."""
    verdicts = []
    for some, known in _in_parts(evidence, np.flatnonzero(evidence.facts.is_frozen)):
        for_s = evidence.now_s - float(evidence.job.process_since_s[some].min())
        verdicts.append(name(evidence, Cause.FROZEN, some.tolist(), for_s=max(0.0, for_s), **known))
    return verdicts


def silent(evidence: Evidence) -> list[Verdict]:
    """Name ranks that do not report though their process runs, once others wait for them."""
    verdicts = []
    roots = roots_of(evidence, evidence.facts.is_silent, evidence.thresholds.silent_s / 2)
    for some, known in _in_parts(evidence, roots):
        for_s = evidence.now_s - float(evidence.job.report_at_s[some].min())
        verdicts.append(name(evidence, Cause.SILENT, some.tolist(), for_s=for_s, **known))
    return verdicts


def _in_parts(evidence: Evidence, ranks: Ranks) -> Iterator[tuple[Ranks, dict[str, object]]]:
    """Yield the ranks of each node, those apart that are no cause, with what that makes of their verdict."""
    if not len(ranks):
        return
    is_victim = _stopped_late(evidence)[ranks]
    beside: dict[str, object] = {"severity": Severity.WARNING, "waiting": ()}
    for part, known in ((ranks[~is_victim], {}), (ranks[is_victim], beside)):
        for some in by_node(evidence, part):
            yield some, known


def _stopped_late(evidence: Evidence) -> Flags:
    """Return which ranks had waited for longer than a stall, for ranks that run, before they were stopped.

    Ranks that timed out since are no longer waited for.
    """
    job, facts = evidence.job, evidence.facts
    is_stopped = facts.is_frozen | facts.is_silent
    stopped_s = np.where(facts.is_frozen, job.process_since_s, job.report_at_s)
    is_late, have_raised = np.zeros(job.world_size, np.bool_), bool(job.has_raised.any())
    for knot in evidence.knots:
        table = job.groups.get(knot.wait.group)
        if table is None or knot.wait.peer_call or not (have_raised or not facts.is_immobile[knot.roots].all()):
            continue
        is_here = table.is_waiting & (table.completed + 1 == knot.wait.seq) & is_stopped[table.members]
        ranks = table.members[is_here]
        is_late[ranks] |= stopped_s[ranks] - table.wait_since_s[is_here] > evidence.thresholds.stall_s
    for knot in evidence.knots:
        is_late[knot.wait.missing] = False
    return is_late
