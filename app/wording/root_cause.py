"""Which node's word on why a job failed is the word of the whole job.

Each node tells its own first failure. A rank that lost another, or was told to end, is no cause while there is any
other; of those that failed by themselves, the one that a verdict blames, else the first. When a hang ended in deaths,
what stood before them is the cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.diagnosis.verdicts import ENDS
from app.rows import Cause, RootCauseRow
from app.safe_text import LINE_LIMIT, clean, clean_name
from app.wording.verdict_words import sentence
from app.words import place_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.wire.logs import RootCause
    from app.diagnosis.verdicts import Verdict
    from app.model.job_model import JobModel

MAX_TRACEBACK_LINES = 1000


def root_cause_row(job: JobModel, node_names: Sequence[str], verdicts: Sequence[Verdict]) -> RootCauseRow | None:
    """Return why a job failed; None while no rank has."""
    roots = [verdict for verdict in verdicts if verdict.aftermath is not None]
    if roots:
        return _row_of_hang(roots[0])
    if aborts := [verdict for verdict in verdicts if verdict.aborted]:
        return _row_of_hang(aborts[0])
    told = [
        (share.received_s - share.status.root_cause.age_s, node, share.status.root_cause)
        for node, share in ((node, job.shares[node]) for node in job.together.nodes_with_cause)
        if share.status.root_cause is not None
    ]
    # What ends after a stop, on a node that the stop did not reach, ends by it.
    told = [one for one in told if one[0] < job.stop_began_s or not one[2].is_consequence]
    own = [one for one in told if not one[2].is_consequence]
    # When something else is to blame, say a rank that left early, its victims are not the cause.
    candidates = own or (told if not verdicts else [])
    if not candidates:
        return None
    culprits = {rank for verdict in verdicts if verdict.cause in ENDS for rank in verdict.culprits}
    _, node, cause = min(
        candidates, key=lambda one: (one[2].rank not in culprits, one[2].rank < 0, one[0], one[2].rank)
    )
    return _row(cause, clean_name(node_names[node]))


def _row_of_hang(verdict: Verdict) -> RootCauseRow | None:
    """Return the row of who kept the others waiting until the job ended; None when that is no certain rank."""
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
    # The words about a launcher's end name it themselves.
    text = f"rank {cause.rank} on {node} {cause.end}" if cause.rank >= 0 else f"on {node} {cause.end}"
    if cause.exception:
        text += f": {cause.exception}"
    if cause.outer:
        text += f" (then {cause.outer})"
    return text
