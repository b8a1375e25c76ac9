"""Collects evidence from a session and its nodes: what this console has heard, and what the agents remember besides."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agent.wire.commands import PullHistory, ShowJob, Tier
from agent.wire.replies import History, Shown
from agent.wire.reports import WIRE_VERSION, encode_node_report
from agent.wire.secret_mask import masked_text
from app.errors import AppError
from app.evidence.bundle import Evidence
from app.evidence.masking import masked, masked_values
from app.headless import summary_lines, summary_object
from app.recording.past import MAX_AGE_S
from app.recording.records import FORMAT_VERSION, Opening, Record, ReportHeard
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.roads.fleet import Fleet
    from app.view import View

LITTLE_S = 5.0
"""A console that has heard a node for so much less than `MAX_AGE_S` asks its agent for the rest."""


class About(NamedTuple):
    """What evidence is collected for.

    Attributes:
        job_id: The job that it is about; empty for none.
        why: A sentence.
        patience_s: For what agents are asked; what has come by then is kept.
    """

    job_id: str
    why: str
    patience_s: float


async def collect(fleet: Fleet, nodes: Sequence[str], view: View, heard: Sequence[Record], about: About) -> Evidence:
    """Return the evidence up to now.

    Args:
        fleet: The nodes, to be asked; one that does not answer is left out.
        nodes: Their names.
        view: The rows of now.
        heard: What this console has kept, with times of the monotonic clock.
        about: What it is for.
    """
    job_id = about.job_id
    now_s = time.monotonic()
    first_s = {node: _first_report_s(heard, node, now_s) for node in nodes}
    deadline_s = asyncio.get_running_loop().time() + about.patience_s
    summary = summary_object(view)
    pasts = await asyncio.gather(*(_past_of(fleet, node, first_s[node], deadline_s) for node in nodes))
    jobs = await asyncio.gather(*(_job_of(fleet, node, job_id, deadline_s) for node in nodes)) if job_id else ()
    made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    why = masked_text(about.why)[:4096]
    opening = Opening(FORMAT_VERSION, WIRE_VERSION, version("rankdeck"), made_at, list(nodes), job_id, why)
    records = sorted((*heard, *(record for past in pasts for record in past)), key=lambda record: record.at_s)
    return Evidence(
        opening=opening,
        records=await asyncio.to_thread(_kept, records),
        status=masked_values(summary),
        summary=[masked_text(line) for line in summary_lines(summary)],
        jobs=dict(zip(nodes, jobs, strict=True)) if job_id else {},
    )


def _kept(records: Sequence[Record]) -> list[Record]:
    """Return records that may be passed on, with times behind the first."""
    begin_s = records[0].at_s if records else 0.0
    return [masked(msgspec.structs.replace(record, at_s=record.at_s - begin_s)) for record in records]


def _first_report_s(heard: Sequence[Record], node: str, now_s: float) -> float:
    reports = (record.at_s for record in heard if isinstance(record, ReportHeard) and record.node == node)
    return next(reports, now_s)


async def _past_of(fleet: Fleet, node: str, first_s: float, deadline_s: float) -> list[Record]:
    """Return what a node's agent remembers from before this console has heard it."""
    found: list[Record] = []
    if time.monotonic() - first_s > MAX_AGE_S - LITTLE_S:
        return found
    since_seq = 0
    try:
        async with asyncio.timeout_at(deadline_s):
            while True:
                reply = await fleet.ask(node, PullHistory(Tier.RECENT, since_seq, MAX_AGE_S))
                if not isinstance(reply, History) or not reply.reports:
                    return found
                for past in reply.reports:
                    at_s = time.monotonic() - past.age_s
                    if at_s >= first_s:
                        return found
                    found.append(ReportHeard(max(0.0, at_s), node, encode_node_report(past.report)))
                since_seq = reply.reports[-1].seq
    except (AppError, TimeoutError):
        return found  # it is as lost as the evidence will show


async def _job_of(fleet: Fleet, node: str, job_id: str, deadline_s: float) -> Any:
    try:
        async with asyncio.timeout_at(deadline_s):
            reply = await fleet.ask(node, ShowJob(job_id))
    except AppError as error:
        return {"error": clean(str(error), LINE_LIMIT)}
    except TimeoutError:
        return {"error": "its agent has not answered in time"}
    return msgspec.to_builtins(reply) if isinstance(reply, Shown) else {"error": "it answered something else"}
