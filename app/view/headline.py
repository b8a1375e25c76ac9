"""The first line of every view while no verdict stands, and why a job has failed.

`job_headline` shows what the job waits for, or how the training goes.

`root_cause_row` decides which node's root cause counts for the whole job. Each node reports its own first failure. A
rank that lost another, or was asked to end, is a cause only where there is no other. Of those that failed by
themselves, the one that a verdict blames counts, else the first. When a hang ended in deaths, its verdict is the cause.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from agent.wire.jobs import JobState
from agent.wire.reports import place_of
from app.diagnosis.causes import Cause, Severity
from app.diagnosis.rank_facts import CONNECTING, is_cause_unseen
from app.diagnosis.verdicts import ENDS
from app.diagnosis.waits import LATE_S
from app.model.cluster import ended_s
from app.model.farewells import names_lost_peer, names_time_out, raised_text
from app.model.job_model import PHASE_CODE, Process
from app.model.unreachable_reason import UnreachableKind
from app.text import (
    LINE_LIMIT,
    call_text,
    clean,
    clean_name,
    loss_step_text,
    loss_text,
    nodes_text,
    place_text,
    ranks_text,
    rate_text,
    seconds_text,
)
from app.view.nodes import disbelief_text, ended_jobs_text, new_nodes_text
from app.view.rows import Headline, RootCauseRow
from app.view.verdict_text import PHASE_TEXTS, sentence, unseen_text
from ddpcore.wire import Anomaly, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from agent.wire.logs import RootCause
    from app.diagnosis.diagnoser import Diagnosis, JobDiagnosis
    from app.diagnosis.rank_facts import AllNodes
    from app.diagnosis.verdicts import Side, Verdict
    from app.diagnosis.waits import Wait
    from app.model.cluster import Cluster
    from app.model.job_model import JobModel
    from app.model.unreachable_reason import UnreachableReason
    from app.view.rows import JobRow

LATE_WAIT_S = 5.0
"""Seconds of a wait before it is a warning: half-way to a stall."""
MAX_HEADLINE = 400
MAX_READ = 64
"""Limit of ranks whose exceptions are read: where those are all alike, so are the others, which end at once."""


def node_headline(cluster: Cluster, diagnosis: Diagnosis, job: JobModel | None = None) -> Headline | None:
    """Return the headline about nodes that do not report, with a job's ranks and waits; None when all report.

    Nodes that a job does not run on, as those that its restart left out, are only in the table of nodes.
    """
    nodes = diagnosis.nodes
    concerns = np.ones(len(nodes), np.bool_) if job is None else job.may_be_on(len(nodes))
    late = [cluster.node_names[index] for index in np.flatnonzero(nodes.is_late & concerns).tolist()]
    if late:
        about_job = (
            [] if job is None else list(_concerned(job, np.flatnonzero(nodes.is_late), diagnosis.jobs[job.job_id]))
        )
        reasons = {
            name: unreachable_reason
            for name in late
            if (unreachable_reason := cluster.nodes[name].unreachable_reason) is not None
        }
        if len(reasons) == len(late):
            parts = [_absent_text(cluster, nodes, reasons, unreachable_kind) for unreachable_kind in UnreachableKind]
            return _line(Severity.WARNING, "; ".join(filter(None, [*parts, *about_job])))
        has = "has" if len(late) == 1 else "have"
        text = f"{_names(late)} {has} not reported{_since_text(cluster, nodes, late)}"
        return _line(Severity.WARNING, "; ".join(filter(None, [text, *about_job])))
    if job is not None and job.refused:
        node = min(job.refused)
        return _line(
            Severity.WARNING, f"{_names([cluster.node_names[node]])} is {disbelief_text(cluster.node_names, job, node)}"
        )
    silent = [cluster.node_names[index] for index in np.flatnonzero((nodes.codes == CONNECTING) & concerns).tolist()]
    if silent:
        agents = "agent" if len(silent) == 1 else "agents"
        num_up = len(cluster.nodes) - len(silent)
        return _line(
            Severity.QUIET, f"waiting for the {agents} on {_names(silent)} ({num_up} of {len(cluster.nodes)} nodes up)"
        )
    return None


def _concerned(job: JobModel, late: NDArray[np.int64], found: JobDiagnosis) -> Iterator[str]:
    """Yield which ranks of a job are on nodes that do not report, and the job's longest wait."""
    if job.is_ended():
        return
    ranks = np.flatnonzero(np.isin(job.node_of, late)).tolist()
    if ranks:
        yield unseen_text(ranks)
    waits = [wait for wait in found.waits if wait.waited_s >= LATE_S]
    if waits:
        yield wait_text(max(waits, key=lambda wait: wait.waited_s))


def _absent_text(
    cluster: Cluster, nodes: AllNodes, reasons: Mapping[str, UnreachableReason], unreachable_kind: UnreachableKind
) -> str:
    """Return which nodes are unreachable for this kind of reason, since when and why; empty when there are none."""
    whys = {
        name: unreachable_reason.why
        for name, unreachable_reason in reasons.items()
        if unreachable_reason.unreachable_kind is unreachable_kind
    }
    if not whys:
        return ""
    since = _since_text(cluster, nodes, list(whys))
    parts = {name: _why_and_hint(why) for name, why in whys.items()}
    if len({why for why, _ in parts.values()}) == 1:
        hint = _common_hint({name: hint for name, (_, hint) in parts.items()})
        return f"{unreachable_kind} {_names(list(whys))}{since}: {next(iter(parts.values()))[0]}{hint}"
    each = [f"{clean_name(name)} ({'; '.join(filter(None, part))})" for name, part in parts.items()]
    return f"{unreachable_kind} {nodes_text(each)}{since}"


_WHY_AND_HINT = re.compile(r"(.*) \(([^()]*)\)", re.DOTALL)
"""A reason and the hint behind it; see `AppError.whole`."""
_UP = "rankdeck up"
MAX_HINTS = 2
MAX_NODES_TYPED = 4


def _why_and_hint(why: str) -> tuple[str, str]:
    found = _WHY_AND_HINT.fullmatch(why)
    return (why, "") if found is None else (found[1], found[2])


def _common_hint(hints: Mapping[str, str]) -> str:
    """Return ` (rankdeck up h1 h2)` for the hints of several nodes, by node; empty without any."""
    found = list(dict.fromkeys(filter(None, hints.values())))
    if len(found) > 1 and all(hint == f"{_UP} {name}" for name, hint in hints.items()):
        more = ["..."] * (len(hints) > MAX_NODES_TYPED)
        found = [" ".join([_UP, *list(hints)[:MAX_NODES_TYPED], *more])]
    return f" ({'; '.join(found[:MAX_HINTS])})" if found else ""


def _since_text(cluster: Cluster, nodes: AllNodes, names: Sequence[str]) -> str:
    """Return ` for 12 s`, the longest time without a report; empty when no node ever reported."""
    indices = [cluster.nodes[name].index for name in names]
    ages_s = nodes.age_s[indices][~nodes.is_unheard[indices]]
    return f" for {seconds_text(float(ages_s.max()))}" if len(ages_s) else ""


def idle_headline(cluster: Cluster, attach: str) -> Headline:
    """Return the headline of nodes without a job to show, which names those that have ended; `attach` as of a view."""
    up = f"{len(cluster.nodes)} node{'' if len(cluster.nodes) == 1 else 's'} up"
    past = [job for job in cluster.jobs.values() if job.is_ended()]
    ended = [(clean_name(job.job_id), job.state()) for job in sorted(past, key=ended_s, reverse=True)]
    is_idle = not any(job.is_under_way() for job in cluster.jobs.values())
    jobs = f"{up}; no job runs; {ended_jobs_text(ended, attach)}" if ended and is_idle else f"{up}, no job yet"
    return _line(Severity.QUIET, "; ".join(filter(None, (jobs, new_nodes_text(cluster.new_nodes)))))


def job_headline(cluster: Cluster, job: JobModel, row: JobRow, found: JobDiagnosis, now_s: float) -> Headline:
    """Return the headline of a job without a verdict."""
    if row.state == "prepared":
        return _line(Severity.QUIET, f"job {row.job_id} is prepared on {_names(cluster.node_names)}")
    if row.state == "stopping":
        how, _, then = (row.detail or "stopping").partition("; ")
        left = f"job {row.job_id} is {how}: {_alive(job, found)} of {job.world_size} ranks are left"
        return _line(Severity.QUIET, f"{left}; {then}" if then and not found.facts.is_dead.all() else left)
    if row.state == "restarting":
        return _line(Severity.WARNING, f"job {row.job_id} is between two attempts{_detail(row)}")
    if job.is_ended():
        return _ended(job, row)
    if row.state in {"failed", "lost"}:
        how = "has failed" if row.state == "failed" else "was lost on a node"
        return _line(Severity.CRITICAL, f"job {row.job_id} {how} and is ending{_detail(row)}")
    if rest := _rest_of_stopped(cluster, job, row):
        return rest
    if found.facts.is_dead.all():
        return _line(Severity.QUIET, f"job {row.job_id}: all ranks have ended, their launcher has not")
    line = _cut_off(job, found) or _starting(cluster, job, found) or _outside(job, row, found, now_s)
    line = line or _running(cluster, job, row, found)
    return _line(line.severity, line.text + _left(job, found))


def _rest_of_stopped(cluster: Cluster, job: JobModel, row: JobRow) -> Headline | None:
    """Return that a job was stopped on some nodes and runs on others, which the stop has not reached."""
    if job.together.is_elastic or not {JobState.STOPPED, JobState.RUNNING} <= job.together.states:
        return None
    nodes: dict[JobState, list[str]] = {}
    for node, assignment in job.assignments.items():
        nodes.setdefault(assignment.status.state, []).append(cluster.node_names[node])
    where = f"was stopped on {_names(nodes[JobState.STOPPED])} and still runs on {_names(nodes[JobState.RUNNING])}"
    return _line(Severity.WARNING, f"job {row.job_id} {where}: rankdeck stop {row.job_id} ends the rest")


def _left(job: JobModel, found: JobDiagnosis) -> str:
    """Return which ranks have ended, and which are left and where; empty while none has ended or none is left."""
    ended, left = np.flatnonzero(found.facts.is_dead).tolist(), np.flatnonzero(found.facts.is_alive).tolist()
    if not ended or not left:
        return ""
    has, are = "has" if len(ended) == 1 else "have", "is" if len(left) == 1 else "are"
    place = place_of(job.worker(left[0]))
    who = "" if len(left) == 1 else f"rank {left[0]} "
    stands = f", {who}at {place_text(place)}" if place is not None else ""
    return f"; {ranks_text(ended)} {has} ended, {ranks_text(left)} {are} left{stands}"


def _ended(job: JobModel, row: JobRow) -> Headline:
    text = f"job {row.job_id} {'was ' if row.state in {'stopped', 'lost'} else ''}{row.state}"
    ranks = f"{job.world_size} rank{'' if job.world_size == 1 else 's'}"
    progress = "" if row.step is None else f": {ranks}, step {row.step_text}{_loss(row)}"
    if row.state not in {"failed", "lost"}:
        why = f" ({row.detail})" if row.state == "stopped" and row.detail else ""
        return _line(Severity.OK if row.state == "succeeded" else Severity.QUIET, text + why + progress)
    code = "" if row.exit_code is None else f" (exit code {row.exit_code})"
    return _line(Severity.CRITICAL, f"{text}{code}{_detail(row)}")


def _detail(row: JobRow) -> str:
    return f": {row.detail}" if row.detail else ""


def _cut_off(job: JobModel, found: JobDiagnosis) -> Headline | None:
    """Return which ranks are about to end by a time-out, or since they lost a connection; None where there are none.

    An exception of a rank's own is a verdict at once.
    """
    raised = np.flatnonzero(job.has_raised & found.facts.is_alive).tolist()
    texts = {rank: raised_text(job, rank) for rank in raised[:MAX_READ]}
    late = [rank for rank, text in texts.items() if names_time_out(text)]
    ranks = late or [rank for rank, text in texts.items() if names_lost_peer(text)]
    if not ranks:
        return None
    ranks = raised if len(ranks) == MAX_READ else ranks
    have, are = ("has", "is") if len(ranks) == 1 else ("have", "are")
    if not late:
        how = f"{have} lost a connection and {are} ending; who ended first is not known yet"
    else:
        awaited = _awaited_by(job, found, ranks)
        how = f"{have} timed out{f' waiting for {ranks_text(awaited)}' if awaited else ''} and {are} ending"
    return _line(Severity.WARNING, f"{ranks_text(ranks)} {how}")


def _awaited_by(job: JobModel, found: JobDiagnosis, ranks: list[int]) -> list[int]:
    """Return the ranks that have not made the last call of some others in a group of theirs."""
    for table in job.groups.values():
        is_behind = table.enqueued < table.enqueued[np.isin(table.members, ranks)].max(initial=-1)
        behind = table.members[is_behind & found.facts.is_alive[table.members] & ~np.isin(table.members, ranks)]
        if len(behind):
            return [int(rank) for rank in behind]
    return []


def _starting(cluster: Cluster, job: JobModel, found: JobDiagnosis) -> Headline | None:
    """Return what the start still waits for; None when it is over."""
    if bool((job.step >= 0).any()):
        return None
    is_here = found.facts.is_dead | ~np.isnan(job.report_at_s)
    is_here |= job.is_elsewhere
    unborn = np.flatnonzero(~is_here & (job.process == Process.UNSEEN))
    if len(unborn):
        return _awaited(cluster, job, unborn.tolist(), "to be started")
    mute = np.flatnonzero(~is_here & ~job.is_unprobed)
    if len(mute):
        return _awaited(cluster, job, mute.tolist(), "to import torch")
    is_joining = job.phase == PHASE_CODE[Phase.JOINING]
    apart = np.flatnonzero(found.facts.is_alive & job.is_outside & ~is_joining & ~job.is_unprobed)
    if len(apart) and job.anomalies.ranks_with(Anomaly.OWN_RANKS).issuperset(apart.tolist()):
        return _line(Severity.QUIET, f"{_ranks(job, found)} running; {next(iter(job.notes().values()))}")
    if len(apart):
        return _awaited(cluster, job, apart.tolist(), "to open the process group")
    if bool((found.facts.is_alive & is_joining).any()):
        return _line(Severity.QUIET, f"{job.world_size} ranks meet in init_process_group")
    return None


def _awaited(cluster: Cluster, job: JobModel, ranks: list[int], to_do: str) -> Headline:
    owners = np.unique(job.node_of[ranks]).tolist()
    nodes = [cluster.node_names[index] for index in owners if index >= 0]
    on_nodes = f" on {_names(nodes)}" if nodes and len(owners) < len(cluster.nodes) else ""
    num_ready = job.world_size - len(ranks)
    return _line(
        Severity.QUIET, f"waiting for {ranks_text(ranks)}{on_nodes} {to_do} ({num_ready} of {job.world_size} ready)"
    )


def _running(cluster: Cluster, job: JobModel, row: JobRow, found: JobDiagnosis) -> Headline:
    wait = max(found.waits, key=lambda wait: wait.waited_s, default=None)
    is_judged = found.is_judged or job.world_size == 1
    severity = Severity.OK if is_judged else Severity.QUIET
    if wait is None or wait.waited_s < LATE_S:
        not_yet = "reading the last minutes" if cluster.awaits_past else "not judged yet"
        unjudged = "" if is_judged or row.step is None else f"; {not_yet}"
        return _line(severity, f"{_ranks(job, found)}{_training(row)}{unjudged}")
    text = wait_text(wait) + _doing(job, wait)
    if wait.waited_s < LATE_WAIT_S:
        return _line(Severity.QUIET, text)
    return _line(Severity.WARNING, text + _until_alarm(wait, found))


def _until_alarm(wait: Wait, found: JobDiagnosis) -> str:
    """Return that a wait is no alarm yet; empty from the time on when it may be one."""
    return f"; no alarm before {seconds_text(found.stall_s)}" if wait.waited_s < found.stall_s else ""


def _ranks(job: JobModel, found: JobDiagnosis) -> str:
    """Return `4 ranks`, or `3 of 4 ranks` when some have ended, or no node reports them."""
    num_left = int((~found.facts.is_dead & ~job.is_elsewhere).sum())
    of_all = f"{num_left} of " if 0 < num_left < job.world_size else ""
    return f"{of_all}{job.world_size} rank{'' if job.world_size == 1 else 's'}"


def _training(row: JobRow) -> str:
    """Return ` training, step 12, loss 2.31, 24 steps/s`; a counted step is shown as `optimizer step`."""
    if row.step is None:
        return f" running, no step reported yet{_loss(row)}"
    rate = "" if row.steps_per_s is None else f", {rate_text(row.steps_per_s)} steps/s"
    step = "optimizer step" if row.is_step_counted else "step"
    return f" training, {step} {row.step_text}{_loss(row)}{rate}"


def _loss(row: JobRow) -> str:
    """Return `, loss 2.31`, or `, loss 2.31 at 120` where it is of an earlier step than the job's."""
    return "" if row.loss is None else f", loss {loss_text(row.loss)}{loss_step_text(row.loss_step, row.step)}"


def _outside(job: JobModel, row: JobRow, found: JobDiagnosis, now_s: float) -> Headline | None:
    """Return the headline of a job without a probe in any living rank; None for every other job."""
    is_alive = found.facts.is_alive
    if not bool(is_alive.any()) or not bool(job.is_unprobed[is_alive].all()) or job.output.last_s is None:
        return None
    quiet = seconds_text(now_s - job.output.last_s)
    if job.output.is_too_quiet(now_s):
        return _line(
            Severity.WARNING,
            f"no rank has printed anything for {quiet}, longer than ever before; without a probe nothing else is known",
        )
    how = _training(row) if row.step is not None else " running"
    return _line(
        Severity.OK, f"{_ranks(job, found)}{how}; watched from outside, without a probe: last output {quiet} ago"
    )


def wait_text(wait: Wait, sides: Sequence[Side] = ()) -> str:
    """Return `ranks 0-1, 3 wait in all_reduce #57 for rank 2, 1.7 s`; several sides are shown with their own calls."""
    waiting, missing = wait.waiting.tolist(), wait.missing.tolist()
    calls = [(side.ranks, call_text(side.group, side.seq, side.op, side.label)) for side in sides]
    calls = calls or [(waiting, call_text(wait.group, wait.seq, wait.op, wait.label))]
    verb = "waits" if len(calls[0][0]) == 1 else "wait"
    first, *others = [f"{ranks_text(ranks)} {{}} in {call}" for ranks, call in calls]
    text = ", ".join([first.format(verb), *(other.replace(" {}", "") for other in others)])
    for_whom = f" for {ranks_text(missing)}" if missing else "" if wait.is_settled else " for others"
    return f"{text}{for_whom}, {seconds_text(wait.waited_s)}"


def _doing(job: JobModel, wait: Wait) -> str:
    """Return what the first missing rank is doing, when that takes long by nature: checkpoint, evaluation or data."""
    if not len(wait.missing):
        return ""
    rank = int(wait.missing[0])
    for phase in (Phase.CHECKPOINT, Phase.EVAL, Phase.DATA):
        if job.phase[rank] == PHASE_CODE[phase]:
            return f"; {ranks_text([rank])} {PHASE_TEXTS[phase]}"
    return ""


def _alive(job: JobModel, found: JobDiagnosis) -> int:
    return int(((job.process != Process.UNSEEN) & ~found.facts.is_dead).sum())


def _names(nodes: list[str] | tuple[str, ...]) -> str:
    return nodes_text([clean_name(node) for node in nodes])


def _line(severity: Severity, text: str) -> Headline:
    return Headline(severity, clean(text, MAX_HEADLINE))


MAX_TRACEBACK_LINES = 1000


def root_cause_row(
    job: JobModel, node_names: Sequence[str], verdicts: Sequence[Verdict], nodes: AllNodes
) -> RootCauseRow | None:
    """Return why a job failed; None while no rank has failed, or a victim alone has where not all nodes report."""
    roots = [verdict for verdict in verdicts if verdict.aftermath is not None]
    if roots:
        return _row_of_hang(roots[0])
    if aborts := [verdict for verdict in verdicts if verdict.aborted]:
        return _row_of_hang(aborts[0])
    parts = [
        (assignment.received_s - assignment.status.root_cause.age_s, node, assignment.status.root_cause)
        for node, assignment in ((node, job.assignments[node]) for node in job.together.nodes_with_cause)
        if assignment.status.root_cause is not None
    ]
    # A rank that ends after the stop of its job ends because of it, also on a node that the stop did not reach.
    parts = [one for one in parts if one[0] < job.stop_began_s or not one[2].is_consequence]
    own = [one for one in parts if not one[2].is_consequence]
    # When something else is to blame, such as a rank that left early, its victims are not the cause.
    candidates = own or ([] if verdicts or is_cause_unseen(job, nodes) else parts)
    if not candidates:
        return None
    culprits = {rank for verdict in verdicts if verdict.cause in ENDS for rank in verdict.culprits}
    _, node, cause = min(
        candidates, key=lambda one: (one[2].rank not in culprits, one[2].rank < 0, one[0], one[2].rank)
    )
    return _row(cause, clean_name(node_names[node]))


def job_detail(job: JobModel, root_cause: RootCauseRow | None, verdicts: Sequence[Verdict], nodes: AllNodes) -> str:
    """Return what a job waits for, or why it failed: its root cause, of which the first node's failure may follow."""
    detail, state = job.together.detail, job.state()
    if state == "stopped" and names_lost_peer(detail):
        return ""  # of ranks that the stop did not reach, and that lost those that it did
    if state != "failed" or not (detail or is_cause_unseen(job, nodes)):
        return detail
    if root_cause is not None:
        # A launcher that ended by itself knows less than the rank that it ended with; a victim knows nothing.
        is_fuller = root_cause.rank is None and not (names_lost_peer(detail) or detail.startswith(root_cause.end))
        return detail if is_fuller else root_cause.text
    if verdicts and verdicts[0].severity is Severity.CRITICAL:
        return sentence(verdicts[0])
    return _unseen_detail(job) if is_cause_unseen(job, nodes) else detail


def _unseen_detail(job: JobModel) -> str:
    """Return what is known of a failure where ranks that no node has reported may have ended first."""
    elsewhere = np.flatnonzero(job.is_elsewhere).tolist()
    lost = sorted(rank for rank, death in job.deaths.items() if names_lost_peer(death.exit.error_text))
    if not (elsewhere and lost):
        return ""
    return f"{ranks_text(lost)} lost a connection; how {ranks_text(elsewhere)} ended is not known"


def _row_of_hang(verdict: Verdict) -> RootCauseRow | None:
    """Return the row of the rank that kept the others waiting until the job ended; None when it is uncertain."""
    is_majority = len(verdict.sides) > 1 and len(verdict.sides[-1].ranks) > len(verdict.sides[0].ranks)
    is_certain = verdict.cause is not Cause.MISMATCH or len(verdict.waiting) > 0 or is_majority
    if not verdict.culprits or not is_certain:
        return None
    where = place_text(verdict.place) if verdict.place else ""
    end = "kept the others waiting until the job ended"
    if verdict.aborted:
        end = "passed other arguments than the other ranks"
    return RootCauseRow(
        rank=verdict.culprits[0],
        node=clean_name(verdict.nodes[0]) if verdict.nodes else "",
        end=end,
        exception="",
        outer="",
        where=clean(where, LINE_LIMIT),
        traceback=[],
        is_consequence=False,
        text=sentence(verdict),
    )


def _row(cause: RootCause, node: str) -> RootCauseRow:
    lines = cause.traceback.splitlines()[:MAX_TRACEBACK_LINES]
    where = clean(cause.where, LINE_LIMIT)
    return RootCauseRow(
        rank=cause.rank if cause.rank >= 0 else None,
        node=node,
        end=clean(cause.end, LINE_LIMIT),
        exception=clean(cause.exception, LINE_LIMIT),
        outer=clean(cause.outer, LINE_LIMIT),
        where=where,
        traceback=[clean(line, LINE_LIMIT) for line in lines],
        is_consequence=cause.is_consequence,
        text=clean(_sentence(cause, node) + (f"; at {where}" if where else ""), LINE_LIMIT),
    )


def _sentence(cause: RootCause, node: str) -> str:
    # The text about a launcher's end names the launcher itself.
    text = f"rank {cause.rank} on {node} {cause.end}" if cause.rank >= 0 else f"on {node} {cause.end}"
    if cause.exception:
        text += f": {cause.exception}"
    if cause.outer:
        text += f" (then {cause.outer})"
    return text
