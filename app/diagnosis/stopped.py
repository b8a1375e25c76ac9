"""Ranks whose processes are there and do not run: frozen ones, and those that no longer report.

One that is stopped after it had waited for a stall is not the cause of that stall: somebody looks at it with a
debugger, or its wait holds the interpreter's lock. It gets a warning, and who has not come is named as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from app.diagnosis.causes import Cause, Severity
from app.diagnosis.verdicts import Evidence, Verdict, by_node, name, roots_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from app.diagnosis.rank_facts import Flags, Ranks


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
