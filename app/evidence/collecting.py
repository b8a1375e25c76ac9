"""Collects evidence: what this console has heard, and what the agents remember besides.

Agents are asked first, and may be waited for; then what there is by now is put together at once.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

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
from app.recording.records import FORMAT_VERSION, LinesHeard, Opening, Record, ReportHeard, StacksHeard
from app.safe_text import LINE_LIMIT, clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.roads.fleet import Fleet
    from app.view import View

LITTLE_S = 5.0
"""A console that has heard a node for so much less than `MAX_AGE_S` asks its agent for the rest."""
NO_ANSWER = {"error": "its agent has not answered in time"}


class Answers(msgspec.Struct):
    """What agents have said for an incident, as far as it has come."""

    stacks: list[StacksHeard] = []
    past: list[Record] = []
    """Reports from before this console has heard them."""
    jobs: dict[str, Any] = {}
    """By node: what it was told to run, or why that is not known."""


async def ask_agents(fleet: Fleet, nodes: Sequence[str], heard: Sequence[Record], job_id: str, into: Answers) -> None:
    """Ask all agents for what they remember; what has come is in `into`, also when this is cancelled.

    Args:
        fleet: The nodes.
        nodes: Their names.
        heard: What this console has kept, with times of the monotonic clock.
        job_id: The job that it is about.
        into: Takes the answers.
    """
    now_s = time.monotonic()
    into.jobs = dict.fromkeys(nodes, NO_ANSWER)
    await asyncio.gather(*(_ask(fleet, node, _first_report_s(heard, node, now_s), job_id, into) for node in nodes))


async def put_together(
    nodes: Sequence[str], view: View, heard: Sequence[Record], answers: Answers, about: tuple[str, str]
) -> Evidence:
    """Return the evidence up to now, masked.

    Args:
        nodes: Their names.
        view: The rows of now.
        heard: What this console has kept, with times of the monotonic clock.
        answers: What the agents have said.
        about: The job, and a sentence that says why.
    """
    job_id, why = about
    summary = summary_object(view)
    made_at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    why = masked_text(why)[:4096]
    opening = Opening(FORMAT_VERSION, WIRE_VERSION, version("rankdeck"), made_at, list(nodes), job_id, why)
    records = _in_order([*heard, *answers.past, *answers.stacks])
    return Evidence(
        opening=opening,
        records=await asyncio.to_thread(_kept, records),
        status=masked_values(summary),
        summary=[masked_text(line) for line in summary_lines(summary)],
        jobs=dict(answers.jobs),
    )


def _in_order(records: list[Record]) -> list[Record]:
    """Return records by their time; lines from before the first report as if they came with that.

    The last words before a hang may be an hour old, and nobody wants to see that hour played.
    """
    begin_s = min((record.at_s for record in records if isinstance(record, ReportHeard)), default=0.0)
    told = (
        msgspec.structs.replace(record, at_s=max(record.at_s, begin_s)) if isinstance(record, LinesHeard) else record
        for record in records
    )
    return sorted(told, key=lambda record: record.at_s)


def _kept(records: Sequence[Record]) -> list[Record]:
    """Return records that may be passed on, with times behind the first."""
    begin_s = records[0].at_s if records else 0.0
    return [masked(msgspec.structs.replace(record, at_s=record.at_s - begin_s)) for record in records]


def _first_report_s(heard: Sequence[Record], node: str, now_s: float) -> float:
    reports = (record.at_s for record in heard if isinstance(record, ReportHeard) and record.node == node)
    return next(reports, now_s)


async def _ask(fleet: Fleet, node: str, first_s: float, job_id: str, into: Answers) -> None:
    try:
        reply = await fleet.ask(node, ShowJob(job_id))
        is_told = isinstance(reply, Shown)
        into.jobs[node] = msgspec.to_builtins(reply) if is_told else {"error": "it answered something else"}
        if time.monotonic() - first_s < MAX_AGE_S - LITTLE_S:
            await _ask_past(fleet, node, first_s, into)
    except AppError as error:
        if into.jobs[node] is NO_ANSWER:
            into.jobs[node] = {"error": clean(str(error), LINE_LIMIT)}


async def _ask_past(fleet: Fleet, node: str, first_s: float, into: Answers) -> None:
    """Take what a node's agent remembers from before this console has heard it."""
    since_seq = 0
    while True:
        reply = await fleet.ask(node, PullHistory(Tier.RECENT, since_seq, MAX_AGE_S))
        if not isinstance(reply, History) or not reply.reports:
            return
        for past in reply.reports:
            at_s = time.monotonic() - past.age_s
            if at_s >= first_s or past.seq <= since_seq:
                return
            since_seq = past.seq
            if past.age_s <= MAX_AGE_S + LITTLE_S:
                into.past.append(ReportHeard(max(0.0, at_s), node, encode_node_report(past.report)))
