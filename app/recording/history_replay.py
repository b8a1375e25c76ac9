"""The nodes' last minutes, through the model and the diagnosis: a new console shows what one that watched would show.

Some verdicts need time: a straggler some ten seconds, a silent rank two, growth minutes. The nodes keep their reports
on disk, so that a new console need not wait. The last minute is replayed as closely as a console does, what was before
more coarsely, with thresholds as much later as reports are apart. Of many nodes less is asked.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from agent.wire.commands import PullHistory, Tier
from app.errors import AppError
from app.recording.backfill import LATE_S, MAX_PACKED_BYTES, PAUSE_S, NodePast, in_slices, pull_past
from app.recording.playback import ReplayModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from app.diagnosis.rank_facts import Thresholds
    from app.fleet.fleet import Fleet
    from app.recording.backfill import PastReport

    Part = tuple["Stretch", Iterable[Iterator[PastReport]], float]
    """A stretch, the reports of each node in it, and its end."""

REPORT_S = 0.2
"""Seconds between two regular reports of a node."""
MAX_S = 10.0
"""Timeout in seconds of all answers: then what has come is enough."""
PARALLEL_NODES = 32


class Stretch(NamedTuple):
    """A part of the past.

    Attributes:
        tier: Where the nodes keep it.
        max_age_s: Age of its begin; it ends where the next one begins.
        period_s: Seconds between two reports of a node.
    """

    tier: Tier
    max_age_s: float
    period_s: float


_CLOSE, _NEAR = Stretch(Tier.RECENT, 60.0, REPORT_S), Stretch(Tier.RECENT, 600.0, 2.0)
PLANS: tuple[tuple[int, tuple[Stretch, ...]], ...] = (
    (4, (Stretch(Tier.DAY, 3600.0, 10.0), _NEAR, _CLOSE)),
    (16, (_NEAR._replace(period_s=4.0), _CLOSE)),
    (64, (_NEAR._replace(period_s=10.0), Stretch(Tier.RECENT, 30.0, 0.5))),
    (128, (Stretch(Tier.RECENT, 300.0, 10.0), Stretch(Tier.RECENT, 20.0, 0.5))),
    (2**31, (Stretch(Tier.RECENT, 15.0, 1.0),)),
)
"""Stretches by the most nodes that they are for: some thousand reports of all of them together, which take a second or
two."""


def stretches(num_nodes: int) -> tuple[Stretch, ...]:
    """Return the parts of the past that are replayed for so many nodes, the oldest first."""
    return next(plan for max_nodes, plan in PLANS if num_nodes <= max_nodes)


async def replay_history(
    fleet: Fleet, nodes: Sequence[str], thresholds: Thresholds, *, pause_s: float = PAUSE_S
) -> ReplayModel | None:
    """Return the model of just now, from the nodes' last minutes; None where no node has any.

    Nodes that cannot be asked in time, or use another version, are left out. Between two pieces of work other tasks
    have `pause_s`.
    """
    plan = stretches(len(nodes))
    asked_s = time.monotonic()
    pasts = await _pull_all(fleet, nodes, plan)
    if not pasts:
        return None
    replay = ReplayModel(nodes, thresholds, is_excerpt=True)
    past_reports = [[past[place].reports() for past in pasts] for place in range(len(plan))]
    ends_s = [asked_s - stretch.max_age_s for stretch in plan[1:]]
    ends_s.append(min(past[-1].last_s for past in pasts))
    await in_slices(looks(replay, thresholds, zip(plan, past_reports, ends_s, strict=True)), pause_s)
    return replay


def looks(replay: ReplayModel, thresholds: Thresholds, parts: Iterable[Part]) -> Iterator[None]:
    """Replay parts of the past, the oldest first; yields between pieces of work."""
    for stretch, past_reports, end_s in parts:
        replay.diagnoser.change(_patient(thresholds, stretch.period_s))
        yield from _looks_at(replay, stretch.period_s, past_reports, end_s)
    replay.diagnoser.change(thresholds)


def _looks_at(
    replay: ReplayModel, period_s: float, past_reports: Iterable[Iterator[PastReport]], end_s: float
) -> Iterator[None]:
    begun = []
    for one in past_reports:
        begun.append(chain([*islice(one, 1)], one))
        yield
    next_s = None
    for at_s, node, frame in heapq.merge(*begun, key=lambda one: one[0]):
        if at_s > end_s:
            break
        if next_s is not None and at_s > next_s:
            replay.look(max(next_s, replay.at_s))
            next_s += period_s
            yield
        if next_s is None or at_s > next_s:
            next_s = at_s + period_s / 2  # by then the other nodes' reports of this moment are there
        replay.receive(node, frame, at_s)
        yield
    if next_s is not None:
        replay.look(max(min(end_s, next_s + period_s), replay.at_s))


def _patient(thresholds: Thresholds, period_s: float) -> Thresholds:
    """Return thresholds for reports that are so far apart: a contradiction that lasts no longer is no event."""
    if period_s <= REPORT_S:
        return thresholds
    later = {name: getattr(thresholds, name) + period_s for name in ("silent_s", "confirm_s", "grace_s", "lost_s")}
    return msgspec.structs.replace(thresholds, **later)


async def _pull_all(fleet: Fleet, nodes: Sequence[str], plan: Sequence[Stretch]) -> list[list[NodePast]]:
    """Return the past reports of each node and stretch, of the nodes that still record them."""
    turns = asyncio.Semaphore(PARALLEL_NODES)
    found: dict[str, list[NodePast]] = {}

    async def pull(node: str) -> None:
        parts = [NodePast(node, MAX_PACKED_BYTES // len(nodes)) for _ in plan]
        ends_s = [*(stretch.max_age_s for stretch in plan[1:]), 0.0]
        async with turns:
            try:
                for part, stretch, end_s in zip(parts, plan, ends_s, strict=True):
                    period_s = 0.0 if stretch.period_s <= REPORT_S else stretch.period_s
                    command = PullHistory(stretch.tier, 0, stretch.max_age_s, period_s, is_packed=True)
                    await pull_past(fleet, part, command, max(end_s, period_s, REPORT_S))
            except AppError:
                return  # its row shows that it is away, if it is
        if parts[-1].last_s >= time.monotonic() - LATE_S:
            found[node] = parts

    pulls = [asyncio.ensure_future(pull(node)) for node in nodes]
    try:
        await asyncio.wait(pulls, timeout=MAX_S)
    finally:
        for one in pulls:
            one.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)
    return [found[node] for node in nodes if node in found]
